"""Which combinations of a gate's parameters run per commit: each pair of values meets in one.

Each gate meets chains and trees of each method. Drafters that are alike in both take turns, from
one gate to the next.

Of other targets than the embedded model each meets each method in one gate of test_equality.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest

EMBEDDED = "embedded"
FIXTURES = ("drafter_name", "target_name")
METHODS_LEFT_TO_FULL = ("none", "ngram", "python")
"""Of other targets: heads depend on a target more than these do."""

Values = tuple[object, ...]
"""The drafter first, then one value for each parameter of a gate."""


SHARED = {"peagle": "eagle3"}
"""Methods whose model, and what it learns, is another one's: they take turns with its variants."""


def method_of(drafter: object) -> str:
    """Of a drafter's name: `eagle3` of `eagle3 tree`; those written in Python count as one."""
    name = "python" if str(drafter).startswith("(") else str(drafter).partition(" ")[0]
    return SHARED.get(name, name)


def is_tree(drafter: object) -> bool:
    """Of a drafter's name: those whose drafts branch end in `tree`."""
    return str(drafter).strip("()").endswith(" tree")


def needs_of(values: Values) -> set[object]:
    """What a case shows: a chain or a tree of its method, and each two of its method and its
    parameters."""
    drafter, *others = values
    method = method_of(drafter)
    return {(method, is_tree(drafter)), *combinations(enumerate((method, *others)), 2)}


def cover_pairs(cases: Sequence[Values], turns: Counter[object]) -> list[int]:
    """Places of cases that together show all that any case shows.

    Greedy: always the case with the most that none before it showed, and of equals the one whose
    drafter had the fewest turns. `turns` counts them, over all gates that share it.
    """
    left = [needs_of(values) for values in cases]
    chosen = []
    while any(left):
        best = max(range(len(cases)), key=lambda at: (len(left[at]), -turns[cases[at][0]]))
        chosen.append(best)
        turns[cases[best][0]] += 1
        shown = left[best].copy()
        for needs in left:
            needs -= shown
    return sorted(chosen)


def gate_of(item: pytest.Function) -> str:
    """Its name, without parameters."""
    return item.nodeid.partition("[")[0]


def parameters(item: pytest.Function) -> Values:
    """The values that a gate runs with."""
    params = item.callspec.params
    others = (repr(params[name]) for name in sorted(params) if name not in FIXTURES)
    return (params["drafter_name"], *others)


def choose_for_targets(cases: Sequence[tuple[str, str, str]]) -> list[int]:
    """Places of cases (gate, target, method) in which each target meets each method once.

    Gates take turns: always the one with the fewest, of its cases the last.
    """
    turns: Counter[str] = Counter()
    chosen = []
    for pair in sorted({case[1:] for case in cases}):
        places = [place for place, case in enumerate(cases) if case[1:] == pair]
        best = min(places, key=lambda place: (turns[cases[place][0]], -place))
        turns[cases[best][0]] += 1
        chosen.append(best)
    return sorted(chosen)


def split(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests to run and tests to leave to `--full`: those marked so, and of gates over every drafter
    those that no pair needs."""
    gates: dict[str, list[pytest.Function]] = {}
    left_out = {item for item in items if item.get_closest_marker("full")}
    others: list[pytest.Function] = []
    for item in items:
        if not isinstance(item, pytest.Function) or "drafter_name" not in item.fixturenames:
            continue
        if item in left_out:
            continue
        if item.callspec.params["target_name"] == EMBEDDED:
            gates.setdefault(gate_of(item), []).append(item)
        else:
            others.append(item)
    turns: Counter[object] = Counter()
    for cases in gates.values():
        chosen = cover_pairs([parameters(case) for case in cases], turns)
        left_out |= set(cases) - {cases[place] for place in chosen}
    left_out |= set(others)
    candidates = [
        (item, (gate_of(item), str(item.callspec.params["target_name"]), method))
        for item in others
        if (method := method_of(item.callspec.params["drafter_name"])) not in METHODS_LEFT_TO_FULL
        and "test_equality" in gate_of(item)
    ]
    for place in choose_for_targets([case for _, case in candidates]):
        left_out.remove(candidates[place][0])
    return [item for item in items if item not in left_out], [*left_out]
