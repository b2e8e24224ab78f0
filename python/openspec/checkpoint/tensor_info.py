"""What a file says of a tensor, and how messages name tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openspec.checkpoint.strict_json import describe_value

MAX_NAMED = 8  # tensors that one message lists


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor. `dtype` is the format's code, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path


def name_some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - MAX_NAMED
    shown = ", ".join(shown_name(name) for name in names[:MAX_NAMED])
    return f"{shown} and {rest} more" if rest > 0 else shown


def shown_name(name: str) -> str:
    """A tensor's name on one line, whatever is in it."""
    return name if name.isprintable() and 0 < len(name) <= 120 else describe_value(name)
