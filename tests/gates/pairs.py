"""Which combinations of a gate's parameters run per commit: each pair of values meets in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest

Values = tuple[object, ...]
"""The drafter first, then one value for each parameter of a gate."""


def method_of(drafter: object) -> str:
    """Of a drafter's name: `eagle3` of `eagle3 tree`; those written in Python count as one."""
    return "python" if str(drafter).startswith("(") else str(drafter).partition(" ")[0]


def needs_of(values: Values) -> set[object]:
    """What a case shows: its drafter, and each two of its method and its parameters."""
    drafter, *others = values
    return {drafter, *combinations(enumerate((method_of(drafter), *others)), 2)}


def cover_pairs(cases: Sequence[Values]) -> list[int]:
    """Places of cases that together show all that any case shows.

    Greedy: always the case with the most that none before it showed, and of equals the one whose
    drafter had the fewest turns.
    """
    left = [needs_of(values) for values in cases]
    turns: Counter[object] = Counter()
    chosen = []
    while any(left):
        best = max(range(len(cases)), key=lambda at: (len(left[at]), -turns[cases[at][0]]))
        chosen.append(best)
        turns[cases[best][0]] += 1
        shown = left[best].copy()
        for needs in left:
            needs -= shown
    return sorted(chosen)


def parameters(item: pytest.Function) -> Values:
    """The values that a gate runs with."""
    params = item.callspec.params
    others = (repr(params[name]) for name in sorted(params) if name != "drafter_name")
    return (params["drafter_name"], *others)


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests to run and tests to leave to `--full`: those marked so, and of gates over every drafter
    those that no pair needs."""
    gates: dict[str, list[pytest.Function]] = {}
    left_out = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        if isinstance(item, pytest.Function) and "drafter_name" in item.fixturenames:
            gates.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in gates.values():
        chosen = cover_pairs([parameters(case) for case in cases])
        left_out |= set(cases) - {cases[place] for place in chosen}
    return [item for item in items if item not in left_out], [*left_out]
