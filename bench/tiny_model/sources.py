"""The three text sources, each split once into training and held-out text.

- GSM8K: the official train file trains, the official test file is only ever held out.
- Plays: the last five percent of the file are held out.
- Python: the standard library of the interpreter that runs this; whole files are held out.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

HELD_OUT_SHARE = 0.05
TEST_SUITE_SHARE = 0.45  # of the standard library's own tests, which would outweigh the rest
MAX_FILE_BYTES = 200_000
SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "__phello__", "data"}


@dataclass
class Sources:
    """Text of one split: `problems` are (question, annotated answer) pairs."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    python_files: list[str] = field(default_factory=list)
    plays: str = ""


def load_sources(folder: Path) -> tuple[Sources, Sources]:
    """Return (training, held-out) sources; `folder` holds the GSM8K files and the plays."""
    train, held_out = Sources(), Sources()
    train.problems = _read_problems(folder / "gsm8k_train.jsonl")
    held_out.problems = _read_problems(folder / "gsm8k_test.jsonl")
    plays = (folder / "tinyshakespeare.txt").read_text(encoding="utf-8")
    cut = plays.index("\n\n", int(len(plays) * (1 - HELD_OUT_SHARE))) + 2
    train.plays, held_out.plays = plays[:cut], plays[cut:]
    for name, text in _read_standard_library():
        split = held_out if _fraction("split:" + name) < HELD_OUT_SHARE else train
        split.python_files.append(text)
    return train, held_out


def _read_problems(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [(row["question"].strip(), row["answer"].strip()) for row in rows]


def _read_standard_library() -> list[tuple[str, str]]:
    """(relative path, text) of every readable source file, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        folders = set(path.relative_to(root).parts[:-1])
        if folders & SKIPPED_FOLDERS or path.stat().st_size > MAX_FILE_BYTES:
            continue
        is_test = bool(folders & {"test", "tests", "idle_test"})
        if is_test and _fraction("test:" + name) > TEST_SUITE_SHARE:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        letters = sum(character.isalpha() for character in text)
        if len(text) > 200 and letters > 0.4 * len(text.replace(" ", "")):
            files.append((name, text.expandtabs(4)))
    return files


def _fraction(key: str) -> float:
    """A number in [0, 1) that depends on `key` alone, so the split never moves."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
