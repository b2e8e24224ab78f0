"""The process that makes grammars of demands and compiles them.

    python -m openspec.text.grammars.worker

`grammar/worker.py` says how it is spoken to.
"""

from __future__ import annotations

import re
import sys
import zlib

import msgspec

from openspec.errors import RequestError
from openspec.grammar.lanes import Work
from openspec.grammar.worker import Start, serve
from openspec.text.grammars.demand import Demand
from openspec.text.json_reader import read_json

COMMAND = (sys.executable, "-m", "openspec.text.grammars.worker")

_PLACE = re.compile(r"at line \d+, column \d+")
_UNKNOWN_RULE = re.compile(r'[Rr]ule "?([\w.-]+)"? is not defined')


def begin(start: Start) -> Work:
    """What compiles demands for a vocabulary."""
    from openspec import _grammar
    from openspec.grammar.rules.lengths import chars_behind_quote
    from openspec.grammar.rules.json_rules import compile_format
    from openspec.text.grammars.answer_grammar import answer_format

    vocabulary = _grammar.Vocabulary(start.tokens, start.vocab_size, start.stop_ids)
    behind_quote = chars_behind_quote(start.tokens)

    def compiled(demand: bytes) -> tuple[bytes, int]:
        format = answer_format(demand_of(demand))
        try:
            data = compile_format(vocabulary, format, behind_quote)
        except _grammar.Complaint as error:
            print(f"a grammar was refused: {error}", file=sys.stderr)
            raise RequestError(f"the grammar cannot be used: {_in_words(str(error))}") from None
        except ValueError as error:
            raise RequestError(f"the grammar cannot be used: {error}") from None
        # It travels compressed. Read, it takes about as much as its text (measured: 0.6 to 1).
        return data, len(zlib.decompress(data))

    return compiled


def demand_of(encoded: bytes) -> Demand:
    """What `Demand.encoded` wrote."""
    return msgspec.convert(read_json(encoded, "a demand"), Demand)


def _in_words(message: str) -> str:
    """What can be said of the library's message, which speaks of its own insides."""
    if found := _UNKNOWN_RULE.search(message):
        return f"the rule {found[1]} is not defined"
    if found := _PLACE.search(message):
        return f"it is no valid EBNF {found[0]}"
    return "it is not valid, or allows no text"


if __name__ == "__main__":
    serve(begin)
