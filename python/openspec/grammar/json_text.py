"""JSON within requests: read strictly, with its numbers as they were spelled, and written so."""

from __future__ import annotations

import json
import math
from typing import NoReturn

import msgspec

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.values import SpelledNumber

MAX_KEYS = 16384
"""Of one object."""


def read_json(text: str) -> JsonValue:
    """The value of a text.

    Raises:
        ValueError: in words of our own: it is no JSON, an object has a key twice or too many, a
            number is too large, a string holds half of a character, or it is nested too deeply.
    """
    try:
        value: JsonValue = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=spelled
        )
        if "\\u" in text:
            msgspec.json.encode(value, enc_hook=_raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise ValueError("a string has a lone surrogate") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def write_json(value: object) -> bytes:
    """A value or a struct as JSON, with numbers as they were spelled.

    Raises:
        RecursionError: nested too deeply.
        UnicodeEncodeError: a text holds half of a character.
    """
    return msgspec.json.encode(value, enc_hook=_raw)


def spelled(text: str) -> float:
    """The number of a text that is no integer; one that `float` would respell remembers it.

    Raises:
        ValueError: it is beyond the range of floats.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is beyond the range of floats")
    is_plain = repr(value) == text and "e" not in text
    return value if is_plain else SpelledNumber(text)


def _raw(value: object) -> msgspec.Raw:
    if isinstance(value, SpelledNumber):
        return msgspec.Raw(value.text.encode())
    raise TypeError(f"{type(value).__name__} is not JSON")


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has over {MAX_KEYS} keys")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
