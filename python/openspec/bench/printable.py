"""Text of models and strangers, made fit for a terminal and for a page."""

from __future__ import annotations

import unicodedata

_TURNS_LINES = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def printable(text: str) -> str:
    """The text; what would steer a terminal, or turn lines around, shows as U+FFFD."""
    return "".join("\ufffd" if _steers(character) else character for character in text)


def _steers(character: str) -> bool:
    if character in "\n\t":
        return False
    return character in _TURNS_LINES or unicodedata.category(character) in {"Cc", "Cs"}
