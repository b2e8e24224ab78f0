"""Typed look-ups in the JSON objects of a checkpoint, with errors that name key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from openspec.checkpoint.strict_json import JsonValue, describe_value
from openspec.errors import ConfigError


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
