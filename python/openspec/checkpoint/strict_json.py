"""JSON read from files that nobody vouches for: typed, no duplicate keys, errors as ConfigError."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from openspec.errors import ConfigError

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
"""What JSON can hold; covariant, so that any mixture of dicts and lists fits."""


def parse_json_object(data: bytes | memoryview, source: str) -> dict[str, JsonValue]:
    """The JSON object in `data`; `source` names it in messages.

    Raises:
        ConfigError: not UTF-8, not JSON, not an object, a key twice, NaN or infinity, too deep.
    """
    try:
        # The parsed value is only ever looked at through isinstance.
        value: JsonValue = json.loads(
            str(data, "utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        # json quotes nothing of the document; a duplicate key is quoted shortened.
        raise ConfigError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object, found {describe_value(value)}")
    return value


def read_json_object(path: Path, max_bytes: int = 1 << 28) -> dict[str, JsonValue]:
    """The JSON object in a file."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes, which no {path.name} is")
    return parse_json_object(data, str(path))


def describe_value(value: object) -> str:
    """A value as messages show it: JSON, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (dict, list, tuple)) and len(value) > 16:
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)} entries"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {describe_value(key)} appears twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
