"""Checks an installed openspec, not the source tree: `python -I check_installed.py [--cuda]`."""

import subprocess
import sys
from pathlib import Path

import torch

import openspec
from openspec import _grammar, ops
from openspec.grammar.formats import pattern
from openspec.grammar.rules.json_rules import compile_format

SOURCES = Path(__file__).resolve().parents[1] / "python" / "openspec"


def main() -> None:
    installed = Path(openspec.__file__).parent
    assert SOURCES not in (installed, *installed.parents), f"{installed} is the source tree"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "."], cwd=SOURCES, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    missing = [name for name in tracked if name and not (installed / name).exists()]
    assert not missing, f"not in the installed package: {missing}"

    # A tiny lookup through the compiled extension.
    tensors = ([[1, 2, 1, 2]], [4], [0], [3])
    drafts, _, match_len = ops.ngram_lookup(
        *(torch.tensor(t, dtype=torch.int32) for t in tensors), max_drafts=3
    )
    assert drafts.tolist() == [[1, 2, 1]], drafts
    assert match_len.tolist() == [2], match_len

    vocabulary = _grammar.Vocabulary([b"a", b"b", b""], 3, [2])
    matcher = _grammar.Matcher(vocabulary, compile_format(vocabulary, pattern("ab*")))
    assert matcher.allowed() == [0], matcher.allowed()

    commands = {
        name: subprocess.Popen(
            [sys.executable, "-I", "-m", f"openspec.{name}", "--help"], stdout=subprocess.DEVNULL
        )
        for name in ("serve", "bench", "doctor", "convert_drafter")
    }
    failed = [name for name, command in commands.items() if command.wait()]
    assert not failed, f"--help fails of {failed}"

    if "--cuda" in sys.argv:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has_kernel("openspec::ngram_lookup", "CUDA"), "built without CUDA"
    print(
        f"openspec {installed}: complete, torch {torch.__version__}, CUDA usable: {ops.has_cuda()}"
    )


if __name__ == "__main__":
    main()
