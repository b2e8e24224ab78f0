"""A pattern as positions: which follows which, the automaton of Glushkov (1961).

Sets of positions are whole numbers, one bit for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from openspec.grammar.patterns.characters import Ranges
from openspec.grammar.patterns.nodes import ENDLESS, Chars, Node, PatternError, Repeat

MAX_LINKS = 1 << 20
"""Pairs of neighbouring positions that are looked at."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The characters of a pattern, each repetition written out."""

    first: int
    """Where a text may begin."""
    follow: list[int]
    """What may come behind each position."""
    end: int
    """The bit that stands in `first` and `follow` for the end of the text."""
    classes: list[Ranges]
    """Disjoint sets of characters."""
    readers: list[int]
    """The positions that read each class."""


def positions_of(node: Node) -> Positions:
    """The positions of a pattern.

    Raises:
        PatternError: too many are neighbours.
    """
    builder = _Builder()
    part = builder.part(node)
    end = 1 << len(builder.sets)
    builder.link(part.last, end)
    classes = _classes(builder.sets)
    return Positions(
        first=part.first | (end if part.is_optional else 0),
        follow=builder.follow,
        end=end,
        classes=list(classes.values()),
        readers=list(classes),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the texts of a node begin and end, and whether the empty one is among them."""

    first: int
    last: int
    is_optional: bool


class _Builder:
    def __init__(self) -> None:
        self.sets: list[Ranges] = []
        self.follow: list[int] = []
        self._num_links = 0

    def link(self, last: int, first: int) -> None:
        """What begins with `first` may come behind each of `last`."""
        while last:
            low = last & -last
            self.follow[low.bit_length() - 1] |= first
            last ^= low
            self._num_links += 1
        if self._num_links > MAX_LINKS:
            raise PatternError("it is too ambiguous: too many of its parts may be left out")

    def part(self, node: Node) -> _Part:
        if isinstance(node, Chars):
            bit = 1 << len(self.sets)
            self.sets.append(node.ranges)
            self.follow.append(0)
            return _Part(bit, bit, False)
        if isinstance(node, Repeat):
            return self._repeat(node)
        first, last, is_optional = 0, 0, False
        for option in node.options:
            part = _Part(0, 0, True)
            for one in option:
                part = self._then(part, self.part(one))
            first, last = first | part.first, last | part.last
            is_optional = is_optional or part.is_optional
        return _Part(first, last, is_optional)

    def _then(self, one: _Part, two: _Part) -> _Part:
        self.link(one.last, two.first)
        return _Part(
            one.first | (two.first if one.is_optional else 0),
            two.last | (one.last if two.is_optional else 0),
            one.is_optional and two.is_optional,
        )

    def _repeat(self, node: Repeat) -> _Part:
        """Copies that each have a character: one that may be empty may as well be left out."""
        if not node.high:
            return _Part(0, 0, True)
        copies = [self.part(node.node)]
        is_endless = node.high >= ENDLESS
        for _ in range(1, max(node.low, 1) if is_endless else node.high):
            copies.append(self.part(node.node))
            self.link(copies[-2].last, copies[-1].first)
        if is_endless:
            self.link(copies[-1].last, copies[-1].first)
        low = 0 if copies[0].is_optional else node.low
        last = 0
        for copy in copies[max(low, 1) - 1 :]:
            last |= copy.last
        return _Part(copies[0].first, last, low == 0)


def _classes(sets: list[Ranges]) -> dict[int, Ranges]:
    """Disjoint sets of characters by the positions that read them."""
    edges: dict[int, int] = {}
    for position, ranges in enumerate(sets):
        for low, high in ranges:
            edges[low] = edges.get(low, 0) ^ 1 << position
            edges[high + 1] = edges.get(high + 1, 0) ^ 1 << position
    found: dict[int, list[tuple[int, int]]] = {}
    readers, start = 0, 0
    for code in sorted(edges):
        if readers:
            found.setdefault(readers, []).append((start, code - 1))
        readers, start = readers ^ edges[code], code
    return {readers: tuple(ranges) for readers, ranges in found.items()}
