"""The minimal form of a deterministic automaton: equal sets of texts become equal rows.

An automaton is its disjoint classes of characters, a row for each state, and the states that end a
text. State 0 starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from openspec.grammar.patterns.characters import Ranges, union

Row: TypeAlias = dict[int, int]
"""A state's next states by class of characters; without those from which no text ends."""


def trimmed(rows: Sequence[Row], ends: set[int]) -> tuple[list[Row], set[int]]:
    """Without states from which no text ends; all states are reached from the start."""
    before: list[list[int]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        for to in row.values():
            before[to].append(number)
    alive, waiting = set(ends), list(ends)
    while waiting:
        for number in before[waiting.pop()]:
            if number not in alive:
                alive.add(number)
                waiting.append(number)
    if not alive:
        return [{}], set()  # the start stays, also without a text
    place = {number: at for at, number in enumerate(sorted(alive))}
    kept = [{one: place[to] for one, to in rows[number].items() if to in alive} for number in place]
    return kept, {place[number] for number in ends}


def merged(rows: list[Row], ends: set[int]) -> tuple[list[Row], set[int]]:
    """Equal states as one: Hopcroft's algorithm, for automata without a state for failure."""
    before: list[list[tuple[int, int]]] = [[] for _ in rows]
    for number, row in enumerate(rows):
        for one, to in row.items():
            before[to].append((one, number))
    blocks = [block for block in (set(range(len(rows))) - ends, set(ends)) if block]
    block_of = [0] * len(rows)
    for at, block in enumerate(blocks):
        for number in block:
            block_of[number] = at
    waiting = set(range(len(blocks)))
    while waiting:
        sources: dict[int, set[int]] = {}
        for number in blocks[waiting.pop()]:
            for one, source in before[number]:
                sources.setdefault(one, set()).add(source)
        for _, found in sorted(sources.items()):
            touched: dict[int, set[int]] = {}
            for number in found:
                touched.setdefault(block_of[number], set()).add(number)
            for at, inside in touched.items():
                if len(inside) == len(blocks[at]):
                    continue
                blocks[at] -= inside
                new = len(blocks)
                small, large = sorted((inside, blocks[at]), key=len)
                blocks[at] = large
                blocks.append(small)
                for number in small:
                    block_of[number] = new
                # Where the whole waits both have to; else the smaller one tells them apart.
                waiting.add(new)
    blocks_start = block_of[0]
    order = [blocks_start, *(at for at in range(len(blocks)) if at != blocks_start)]
    place = {at: number for number, at in enumerate(order)}
    merged = [
        {one: place[block_of[to]] for one, to in rows[min(blocks[at])].items()} for at in order
    ]
    return merged, {place[block_of[number]] for number in ends}


def joined(classes: Sequence[Ranges], rows: list[Row]) -> tuple[list[Ranges], list[Row]]:
    """Classes that no state tells apart as one, and those that lead nowhere left out."""
    columns: dict[int, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        for one, to in row.items():
            columns.setdefault(one, []).append((number, to))
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for one, column in columns.items():
        alike.setdefault(tuple(column), []).append(one)
    groups = sorted((union(classes[one] for one in group), group) for group in alike.values())
    becomes = {group[0]: number for number, (_, group) in enumerate(groups)}
    joined = [{becomes[one]: to for one, to in row.items() if one in becomes} for row in rows]
    return [ranges for ranges, _ in groups], joined


def ordered(
    classes: list[Ranges], rows: list[Row], ends: set[int]
) -> tuple[tuple[Ranges, ...], tuple[Row, ...], frozenset[int]]:
    """States in the order in which they are met from the start."""
    place, order = {0: 0}, [0]
    for number in order:
        for _, to in sorted(rows[number].items()):
            if to not in place:
                place[to] = len(place)
                order.append(to)
    ordered = tuple(
        {one: place[to] for one, to in sorted(rows[number].items())} for number in order
    )
    return tuple(classes), ordered, frozenset(place[number] for number in ends)
