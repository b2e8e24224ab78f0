"""Formats compiled for a vocabulary, and what the library says of them in words of our own."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable

from openspec import _grammar
from openspec.errors import RequestError
from openspec.grammar.formats import Format
from openspec.grammar.lark import DIALECTS
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.grammar.worker import Start

_PLACE = re.compile(r"at line \d+, column \d+")
_UNKNOWN_RULE = re.compile(r'[Rr]ule "?([\w.-]+)"? is not defined')


def compiling(start: Start) -> Callable[[Format], tuple[bytes, int]]:
    """What compiles: it gives a grammar as the engine loads it, and the bytes that it takes there.

    It raises a RequestError, without a field's name, where the grammar cannot be used.
    """
    vocabulary = _grammar.Vocabulary(start.tokens, start.vocab_size, start.stop_ids)
    behind_quote = chars_behind_quote(start.tokens)

    def compiled(format: Format) -> tuple[bytes, int]:
        try:
            data = compile_format(vocabulary, format, behind_quote)
        except _grammar.Complaint as error:
            print(f"a grammar was refused: {error}", file=sys.stderr)
            raise RequestError(f"the grammar cannot be used: {_in_words(str(error))}") from None
        except UnicodeDecodeError:  # the library's message has a part of a character
            raise RequestError(f"the grammar cannot be used: {_in_words('')}") from None
        except ValueError as error:
            raise RequestError(f"the grammar cannot be used: {error}") from None
        # It travels compressed. Read, it takes up to half as much again as its text.
        return data, len(zlib.decompress(data)) * 3 // 2

    return compiled


def _in_words(message: str) -> str:
    """What can be said of the library's message, which speaks of its own insides."""
    if found := _UNKNOWN_RULE.search(message):
        return f"the rule {found[1]} is not defined"
    if found := _PLACE.search(message):
        return f"it is no valid EBNF {found[0]}; {DIALECTS}"
    return "it is not valid, or allows no text"
