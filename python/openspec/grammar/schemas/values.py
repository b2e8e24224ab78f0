"""JSON values: their types, and when two are the same."""

from __future__ import annotations

from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue


class SpelledNumber(float):
    """A number of JSON that remembers its text, where `float` alone would change it."""

    __slots__ = ("text",)

    text: str

    def __new__(cls, text: str) -> SpelledNumber:
        """Of a number as JSON spells it; one that is too large is infinite as a float."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __getnewargs__(self) -> tuple[str]:
        return (self.text,)


def type_of(value: JsonValue) -> str:
    """A value's type; of whole numbers `integer`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def same(one: JsonValue, two: JsonValue) -> bool:
    """Equality as JSON has it: true is not 1."""
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two
