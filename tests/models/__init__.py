"""Tiny targets of other kinds than the embedded model, trained by `bench/tiny_model/targets`."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from openspec.config import EMBEDDED_MODEL

NAMES = ("tiny_hybrid", "tiny_mixture")
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


def stored(name: str) -> Path:
    """The folder as it lies here, without a tokenizer."""
    return Path(__file__).parent / name


@cache
def folder(name: str) -> Path:
    """A model folder: the stored one with the tokenizer that it was made with."""
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="openspec-"))
    root = Path(FOLDERS[-1].name) / name
    shutil.copytree(stored(name), root)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED_MODEL / file, root / file)
    return root
