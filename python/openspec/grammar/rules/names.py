"""Names of properties that an object does not name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON, complement, set_of, union
from openspec.grammar.patterns.nodes import ENDLESS, Chars, Choice, Repeat
from openspec.grammar.schemas.json_tree import Object

MAX_STATES_OF_NAMES = 32
"""Of the names of one tree that are told apart in full. Each takes 20 ms at 150,000 tokens."""


def affordable(objects: Iterable[Object]) -> Mapping[Automaton, Automaton]:
    """What stands for the other names of a tree's objects: the same ones, or fewer.

    Names that differ from an object's own take a state for each character of those. Where a tree
    has many, all its objects share one set of other names: those that begin otherwise than any name
    of the tree.
    """
    seen = set(objects)
    firsts = {one.name[:1] for node in seen for one in node.properties}
    found = {one.names for node in seen for one in node.others if one.names is not None}
    plain = complement(ESCAPED_IN_JSON)
    first = complement(union([ESCAPED_IN_JSON, *map(set_of, firsts)]))
    shared = Automaton.of(Choice(((Chars(first), Repeat(Chars(plain), 0, ENDLESS)),)))
    result, left = {}, MAX_STATES_OF_NAMES
    for names in sorted(found, key=lambda names: names.num_states):
        left -= names.num_states
        is_dear = left < 0 and not shared.is_empty and (shared - names).is_empty
        result[names] = shared if is_dear else names
    return result
