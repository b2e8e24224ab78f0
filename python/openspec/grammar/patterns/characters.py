"""Sets of characters, as ranges of code points, and those that patterns name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeAlias

MAX_CODE = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""A set of code points: ranges in order, without overlap."""


def union(sets: Iterable[Ranges]) -> Ranges:
    """Characters of any of the sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(itertools.chain(*sets)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other code points that text has: no surrogates."""
    result, start = [], 0
    for low, high in union([ranges, SURROGATES]):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE:
        result.append((start, MAX_CODE))
    return tuple(result)


def set_of(characters: str) -> Ranges:
    """The characters of a text."""
    return union([((ord(character), ord(character)),) for character in characters])


SURROGATES: Ranges = ((0xD800, 0xDFFF),)
ESCAPED_IN_JSON: Ranges = union([((0, 0x1F),), set_of('"\\')])
"""What JSON writes as an escape."""
TAG_OPENING = set_of("<")
LINE_ENDS = set_of("\n\r\u2028\u2029")
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = union([_DIGITS, ((65, 90), (97, 122)), set_of("_")])
_SPACES = set_of("\t\n\v\f\r ")
_ALL_SPACES = union(
    [
        set_of("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"),
        ((0x2000, 0x200A),),
        set_of("\x1c\x1d\x1e\x1f\x85"),  # not ECMA's, but those of others
    ]
)
CLASSES = {
    "d": _DIGITS,
    "D": complement(_DIGITS),
    "w": _WORD,
    "W": complement(_WORD),
    "s": _SPACES,
    "S": complement(_ALL_SPACES),
}
"""What every dialect means by a class."""
WIDE_CLASSES = {**CLASSES, "s": _ALL_SPACES, "S": complement(_SPACES)}
"""What some dialect means by a class."""
CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "0": 0}
