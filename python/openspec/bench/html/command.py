"""The command line that repeats a benchmark."""

from __future__ import annotations

import dataclasses
import json
import shlex

from openspec.bench.bench_config import BenchConfig
from openspec.bench.document import Document


def command_of(document: Document) -> str:
    """`python -m openspec.bench` with the flags that were not left at their defaults."""
    parts = ["python", "-m", "openspec.bench"]
    defaults = {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(BenchConfig)
    }
    for name, value in document.flags.items():
        if value is None or (name in defaults and _plain(value) == _plain(defaults[name])):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            parts += [f"--{flag}", _plain(value)]
    return shlex.join(parts)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
