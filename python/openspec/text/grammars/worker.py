"""The process that makes grammars of demands and compiles them.

    python -m openspec.text.grammars.worker

`grammar/worker.py` says how it is spoken to.
"""

from __future__ import annotations

import sys

import msgspec

from openspec.grammar.lanes import Work
from openspec.grammar.worker import Start, serve
from openspec.text.grammars.demand import Demand
from openspec.text.json_reader import read_json

COMMAND = (sys.executable, "-m", "openspec.text.grammars.worker")


def begin(start: Start) -> Work:
    """What compiles demands for a vocabulary."""
    # The owner of the process needs none of it.
    from openspec.grammar.compiled import compiling
    from openspec.text.grammars.answer_grammar import answer_format

    compiled = compiling(start)
    return lambda demand: compiled(answer_format(demand_of(demand)))


def demand_of(encoded: bytes) -> Demand:
    """What `Demand.encoded` wrote."""
    return msgspec.convert(read_json(encoded, "a demand"), Demand)


if __name__ == "__main__":
    serve(begin)
