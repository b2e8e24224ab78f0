"""What a file says of a tensor, and how messages name tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openspec.checkpoint.strict_json import describe_value

MAX_NAMED = 8  # tensors that one message lists
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(|_scale_inv)")
_MAX_EXPERTS = 4096  # so that no file fills memory with names
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


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


def split_experts(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Headers of a file's tensors, in which each expert of those stored together has its own.

    transformers holds `gate_up_proj` [experts, 2 * width, hidden], of each expert the gate's rows,
    then those of up, and `down_proj` [experts, hidden, width]; names here are those of published
    files. A part's header says in `part_of` the tensor, the expert and the rows.
    """
    found: dict[str, Any] = {}
    for name, header in headers.items():
        match = _FUSED.fullmatch(name)
        shape = header["shape"]
        is_stack = len(shape) == 3 and 0 not in shape and shape[0] <= _MAX_EXPERTS
        if match is None or not is_stack or shape[1] % len(_PARTS[match[2]]):
            found[name] = header
        else:
            found |= _parts(name, header, match)
    return found


def _parts(name: str, header: Mapping[str, Any], match: re.Match[str]) -> Iterator[Any]:
    num_experts, num_rows, width = header["shape"]
    begin, end = header["data_offsets"]
    row_bytes = (end - begin) // (num_experts * num_rows)
    parts = _PARTS[match[2]]
    count = num_rows // len(parts)
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            at = begin + (expert * num_rows + i * count) * row_bytes
            yield (
                f"{match[1]}.{expert}.{part}.weight{match[3]}",
                {
                    "dtype": header["dtype"],
                    "shape": [count, width],
                    "data_offsets": [at, at + count * row_bytes],
                    "part_of": (name, expert, slice(i * count, (i + 1) * count)),
                },
            )
