"""Numbers of JSON as they were spelled, from a body to the compile process."""

from __future__ import annotations

import math

import msgspec

from openspec.grammar.schemas.values import SpelledNumber


def spelled(text: str) -> float:
    """The number of a text that is no integer; one that `float` would respell remembers it.

    Raises:
        ValueError: it is beyond the range of floats.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is beyond the range of floats")
    # An exponent has several spellings, of which encoders choose different ones.
    is_plain = repr(value) == text and "e" not in text
    return value if is_plain else SpelledNumber(text)


def raw_number(value: object) -> msgspec.Raw:
    """The `enc_hook` of a JSON encoder that meets such numbers."""
    if isinstance(value, SpelledNumber):
        return msgspec.Raw(value.text.encode())
    raise TypeError(f"{type(value).__name__} is not JSON")
