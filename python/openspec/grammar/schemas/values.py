"""JSON values: their types, when two are the same, exact numbers, and how they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from fractions import Fraction
from typing import SupportsFloat

from openspec.checkpoint.strict_json import JsonValue

MAX_EXPONENT = 4096
"""Of a number that is computed with: its digits are written out."""
MAX_VALUE_DEPTH = 64
"""Of a value that a schema lists."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE]([+-]?[0-9]+))?")


class SpelledNumber(float):
    """A number of JSON that remembers its text, where `float` alone would change it."""

    __slots__ = ("text",)

    text: str

    def __new__(cls, text: str) -> SpelledNumber:
        """Of a number as JSON spells it; one that is too large is infinite as a float."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[SpelledNumber], tuple[str]]:
        return SpelledNumber, (self.text,)


class ValueLimit(ValueError):
    """Why a value is not computed with."""


def exact(number: SupportsFloat) -> Fraction:
    """The number that the decimal digits of an int, float or `SpelledNumber` say.

    Raises:
        ValueLimit: not finite, or of an exponent beyond `MAX_EXPONENT`.
    """
    if isinstance(number, int):
        return Fraction(number)
    text = number.text if isinstance(number, SpelledNumber) else repr(float(number))
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueLimit(f"{text[:40]} is no number of JSON")
    if (
        len(text) > MAX_EXPONENT
        or len(found[1] or "") > 6
        or abs(int(found[1] or 0)) > MAX_EXPONENT
    ):
        raise ValueLimit(f"a number has more than {MAX_EXPONENT} digits, written out")
    return Fraction(text)


def type_of(value: JsonValue) -> str:
    """A value's type; of whole numbers `integer`.

    Raises:
        ValueLimit: as `exact`.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if exact(value).denominator == 1 else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def key_of(value: JsonValue, depth: int = 0) -> Hashable:
    """What equal values share, as JSON has equality: 1.0 is 1, true is not, names have no order.

    Raises:
        ValueLimit: as `exact`, or it is nested too deeply.
    """
    if depth > MAX_VALUE_DEPTH:
        raise ValueLimit(f"a listed value is nested deeper than {MAX_VALUE_DEPTH}")
    if value is None or isinstance(value, (bool, str)):
        return type(value), value
    if isinstance(value, (int, float)):
        return exact(value)
    if isinstance(value, Mapping):
        return frozenset((name, key_of(one, depth + 1)) for name, one in value.items())
    return tuple(key_of(one, depth + 1) for one in value)


def json_text(value: JsonValue) -> str:
    """A value as JSON, its numbers as they were spelled."""
    if isinstance(value, SpelledNumber):
        return value.text
    if isinstance(value, Mapping):
        items = (f"{json_text(name)}:{json_text(one)}" for name, one in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(json_text, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and _is_broken(value))


def _is_broken(text: str) -> bool:
    """Whether it holds half of a character, which only an escape can spell."""
    return any(0xD800 <= ord(character) <= 0xDFFF for character in text)
