"""Properties that a schema does not name, by what their values must fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.schemas.choices import Choices
from openspec.grammar.schemas.constraints import At, Others, Parts, Plain, Unenforceable, joined
from openspec.grammar.schemas.json_tree import AnyOf, Matching, Node, Text, Texts
from openspec.grammar.schemas.texts import UNESCAPED, of_length

MAX_REGIONS = 64
MAX_NAMES_BESIDE_OTHERS = 16
"""Above it an object has no properties of any name: they would have to differ from all."""
ANY_NAME = At({"type": "string"}, "#name")
"""What every property's name is."""


@dataclass(frozen=True, slots=True)
class Region:
    """Names whose properties must fit the same schemas."""

    names: Automaton | None
    """Without those of an object's own properties; None: any name."""
    parts: Parts = ()
    has_pattern: bool = False


def regions(plain: Plain, choices: Choices, names: Automaton | None) -> list[Region]:
    """The names of other properties, in disjoint sets; all of them are among `names`.

    Names that a schema does not speak of are left out where it speaks of some.

    Raises:
        Unenforceable: they take too many states.
    """
    own = plain.properties.keys() | plain.required.keys()
    splitter = _Splitter(plain, choices)
    if not plain.speaks_of_names:
        return [Region(splitter.other_than(own, names))]
    is_closed = any(other.schema.schema is False for other in plain.others)
    if not plain.by_pattern and (is_closed or not plain.others):
        return []
    is_wide = names is None and len(own) > MAX_NAMES_BESIDE_OTHERS
    if is_wide and not plain.by_pattern and not any(other.patterns for other in plain.others):
        return []
    found = [Region(splitter.other_than(own, names))]
    for pattern, at in plain.by_pattern:
        found = splitter.with_pattern(found, pattern, at)
    for other in plain.others:
        found = splitter.with_others(found, other)
    return [one for one in found if one.parts and (one.has_pattern or not is_wide)]


class _Splitter:
    def __init__(self, plain: Plain, choices: Choices) -> None:
        self._choices, self._texts = choices, choices.texts
        self._pointer = f"{plain.pointer or '#'}/patternProperties"
        self._plain = plain

    def other_than(self, own: set[str], names: Automaton | None) -> Automaton | None:
        """The names that are none of an object's own; None: any name."""
        if not own:
            return names
        among = UNESCAPED if names is None else names
        pointer = f"{self._plain.pointer or '#'}/properties"
        return self._texts.built(lambda: among - Automaton.of_texts(own), pointer, "other names")

    def with_pattern(self, found: list[Region], pattern: At, at: At) -> list[Region]:
        """Names that may match a pattern have a schema of its own."""
        matching = self._texts.pattern(pattern, is_wide=True)
        result = []
        for region in found:
            inside, outside = self._split(region, matching)
            result.append(Region(inside, joined(region.parts, (at,)), has_pattern=True))
            result.append(Region(outside, region.parts, region.has_pattern))
        return self._kept(result)

    def with_others(self, found: list[Region], others: Others) -> list[Region]:
        """Names that match none of some patterns have the schema of additional properties."""
        for pattern in others.patterns:
            self._texts.pattern(pattern)
        result = []
        for region in found:
            rest = region.names
            for pattern in others.patterns:
                inside, rest = self._split(Region(rest), self._texts.pattern(pattern))
                result.append(Region(inside, region.parts, region.has_pattern))
            if others.schema.schema is not False:
                parts = joined(region.parts, (others.schema,))
                result.append(Region(rest, parts, region.has_pattern))
        return self._kept(result)

    def _split(self, region: Region, matching: Automaton) -> tuple[Automaton, Automaton]:
        among = UNESCAPED if region.names is None else region.names
        what = "other names"
        return (
            self._texts.built(lambda: among & matching, self._pointer, what),
            self._texts.built(lambda: among - matching, self._pointer, what),
        )

    def _kept(self, found: list[Region]) -> list[Region]:
        kept = [one for one in found if one.names is None or not one.names.is_empty]
        if len(kept) > MAX_REGIONS:
            raise Unenforceable(
                self._pointer, f"its patterns overlap in more than {MAX_REGIONS} ways"
            )
        return kept


def names_of(node: Node, choices: Choices, pointer: str) -> Automaton | None:
    """The names that a JSON string may be; None: any.

    Raises:
        Unenforceable: they take too many states, naming `pointer`.
    """
    if node == Text():
        return None

    def parts(node: Node) -> Iterator[Automaton]:
        if isinstance(node, AnyOf):
            for option in node.options:
                yield from parts(option)
        elif isinstance(node, Matching):
            yield node.automaton
        elif isinstance(node, Text):
            yield of_length(node.low, node.high)
        else:
            assert isinstance(node, Texts)
            yield Automaton.of_texts(json.loads(text) for text in node.texts)

    def whole() -> Automaton:
        found = Automaton.of_texts(())
        for one in parts(node):
            found |= one
        return found & UNESCAPED

    return choices.texts.built(whole, pointer, "these names")
