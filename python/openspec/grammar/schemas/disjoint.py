"""Whether no value fits two schemas: then `oneOf` is `anyOf`."""

from __future__ import annotations

from collections.abc import Callable

from openspec.grammar.schemas.constraints import Parts, Plain, Unenforceable, Unsatisfiable, merged
from openspec.grammar.schemas.scalars import admits

MAX_DEPTH = 4

Expand = Callable[[Parts], list[Plain]]
"""The choices of several schemas at once."""


def are_disjoint(one: Plain, two: Plain, expand: Expand, depth: int = 0) -> bool:
    """Whether no answer to one of them fits the other.

    Answers have no properties that their schema does not speak of, so `is_closed` tells more than
    the schema itself.
    """
    try:
        both = merged(one, two)
    except Unsatisfiable:
        return True
    except Unenforceable:
        return False
    try:
        if both.enum is not None:
            return not any(admits(both, value) for value in both.enum)
    except Unenforceable:
        return False
    if not one.possible_types & two.possible_types:
        kinds = one.possible_types | two.possible_types
        if not {"integer", "number"} <= kinds and one.types is not None and two.types is not None:
            return True
    kinds = one.possible_types & two.possible_types
    if kinds and kinds <= {"integer", "number"} and both.low and both.high:
        low, high = both.low, both.high
        return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))
    if one.possible_types != {"object"} or two.possible_types != {"object"}:
        return False
    if _lacks(one, two) and _lacks(two, one):
        return True
    if depth == MAX_DEPTH:
        return False
    for name in both.properties:
        # Where only one of them demands it, an answer to the other may leave it out.
        needed = name in one.required and name in two.required
        if needed and name in one.properties and name in two.properties:
            ones, twos = expand(one.properties[name]), expand(two.properties[name])
            if all(are_disjoint(a, b, expand, depth + 1) for a in ones for b in twos):
                return True
    return False


def _lacks(answer: Plain, schema: Plain) -> bool:
    """Whether answers to the first lack what the second demands, or have what it forbids."""
    lacking = answer.is_closed and not set(schema.required) <= set(answer.properties)
    forbidden = any(
        other.schema.schema is False and any(map(other.concerns, answer.required))
        for other in schema.others
    )
    return lacking or forbidden
