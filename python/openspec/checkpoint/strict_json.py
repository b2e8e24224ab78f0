"""JSON read from files that nobody vouches for: typed, no duplicate keys, errors as ConfigError."""

from __future__ import annotations

import json
import os
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
            # Not more than there is: `read` takes memory for all that it may return.
            data = file.read(min(os.fstat(file.fileno()).st_size, max_bytes + 1))
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


class JsonKeys:
    """One JSON object; a null counts as absent. All look-ups raise ConfigError."""

    def __init__(self, values: Mapping[str, JsonValue], source: str) -> None:
        """`source` is the file, and the object in it, as messages name them."""
        self.values = values
        self.source = source

    def get(self, name: str) -> JsonValue:
        """The value as it stands there."""
        return self.values.get(name)

    def refuse(self, name: str, expected: str, remedy: str = "") -> NoReturn:
        """Raises ConfigError with the key, what was expected, what is there and what to do."""
        found = describe_value(self.values[name]) if name in self.values else "nothing"
        message = f"{self.source}: {name}: expected {expected}, found {found}"
        raise ConfigError(f"{message}; {remedy}" if remedy else message)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number in [low, high]."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"a number in [{low}, {high}]")
        if not low <= value <= high:  # compares big integers without converting them
            self.refuse(name, f"a number in [{low}, {high}]")
        return float(value)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        """A number in [low, high], or None if absent."""
        return None if self.get(name) is None else self.number(name, low, high)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, not empty; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not value:
            self.refuse(name, "a list of integers")
        numbers = tuple(n for n in value if isinstance(n, int) and not isinstance(n, bool))
        if len(numbers) != len(value):
            self.refuse(name, "a list of integers")
        return numbers

    def object(self, name: str) -> JsonKeys | None:
        """The object under a key; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "an object or null")
        return JsonKeys(value, f"{self.source}: {name}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a short list of them, without duplicates; empty if absent."""
        value = self.get(name)
        if value is None:
            return ()
        ids = [value] if isinstance(value, int) else value
        if not isinstance(ids, list) or len(ids) > 64:
            self.refuse(name, "a token id or a short list of them")
        checked: list[int] = []
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                self.refuse(name, f"token ids in [0, {vocab_size})")
            if item not in checked:
                checked.append(item)
        return tuple(checked)
