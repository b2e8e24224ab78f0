"""sglang's bench_serving over completions and chat; argv[1] is the server's address.

The package imports the whole engine, kernels included. Its load generator needs none of it, so that
the packages above the generator's files stay empty here.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path

from load import MODEL, address, run_load

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")


def generate(arguments: list[str]) -> None:
    """Runs the generator in this process."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]).parent
    for name in (*PACKAGES, "sglang.srt.disaggregation.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    package.FAKE_BOOTSTRAP_HOST = ""  # for disaggregated prefill
    from sglang.benchmark.serving import cli_main

    sys.argv[1:] = arguments
    cli_main()


def main() -> None:
    """One small load over each endpoint."""
    turns = [("human", "Tom has {} apples. How many?"), ("gpt", "He has some, and then some more.")]
    rows = [
        {"conversations": [{"from": who, "value": text.format(i)} for who, text in turns]}
        for i in range(16)
    ]
    data = Path("sharegpt.json").resolve()
    data.write_text(json.dumps(rows))
    for backend in ("sglang-oai", "sglang-oai-chat"):
        report = run_load(
            *(sys.executable, __file__, "--generate", "--backend", backend),
            *("--base-url", address(), "--model", "tiny", "--tokenizer", str(MODEL)),
            *("--dataset-name", "sharegpt", "--dataset-path", str(data)),
            # One at a time: drafts of several at once may not pay on a busy CPU.
            *("--num-prompts", "8", "--sharegpt-output-len", "32", "--max-concurrency", "1"),
            *("--output-file", "report.jsonl"),
        )
        result = json.loads(report["report.jsonl"])
        assert (result["completed"], result["total_output_tokens"]) == (8, 8 * 32), result
        # It asks the server for its acceptance.
        assert result["accept_length"] > 1, result
    print("sglang", importlib.metadata.version("sglang"))


if sys.argv[1] == "--generate":
    generate(sys.argv[2:])
else:
    main()
