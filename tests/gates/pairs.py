"""Which combinations of a gate's parameters run per commit: each pair of values meets in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

Values = tuple[object, ...]
"""One value for each parameter of a test."""


def pairs_of(values: Values) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    """Each two parameters with their values."""
    yield from combinations(enumerate(values), 2)


def cover_pairs(cases: Sequence[Values]) -> list[int]:
    """Places of cases that together hold every pair of values that occurs in any case.

    Greedy: always the case with the most pairs that none before it held, of equals the first.
    """
    left = [set(pairs_of(values)) for values in cases]
    chosen = []
    while any(left):
        best = max(range(len(cases)), key=lambda place: len(left[place]))
        chosen.append(best)
        held = left[best].copy()
        for pairs in left:
            pairs -= held
    return sorted(chosen)


def parameters(item: pytest.Function) -> Values:
    """The values that a gate runs with; a drafter's name counts as its method and its variant."""
    params = item.callspec.params
    method, _, variant = str(params["drafter_name"]).partition(" ")
    others = (repr(params[name]) for name in sorted(params) if name != "drafter_name")
    return (method, variant, *others)


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
