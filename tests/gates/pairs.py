"""Which combinations of a gate's parameters run per commit: each pair of values meets in one.

Each gate meets chains and trees of each method. Drafters that are alike in both take turns, from
one gate to the next. In a gate marked `by_turns` a method's chains and trees take turns, too, and
so do methods over the values of its parameters: every pair of values still meets, but each with
some method.

Of other targets than the embedded model each meets each method in one gate of test_equality. Those
that differ in their format alone count as one target.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest

EMBEDDED = "embedded"
MEETS_TARGETS = "tests.gates.test_equality"
"""The gates that a commit runs with other targets, too."""
FIXTURES = ("drafter_name", "target_name")
WITHOUT_HEAD = ("none", "ngram", "python")
"""Methods that meet other targets with `--full` alone: a target matters to heads more."""

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


def needs_of(values: Values, by_turns: bool = False) -> set[object]:
    """What a case shows: a chain or a tree of its method, its parameters, and each two of these.
    With `by_turns` its method, a chain or a tree, its parameters, and each two of the latter."""
    drafter, *others = values
    method, shape = method_of(drafter), is_tree(drafter)
    paired = others if by_turns else [method, *others]
    shown = {*enumerate(others), *combinations(enumerate(paired), 2)}
    return shown | ({method, shape} if by_turns else {(method, shape)})


def cover_pairs(
    cases: Sequence[Values], turns: Counter[object], by_turns: bool = False
) -> list[int]:
    """Places of cases that together show all that any case shows.

    Greedy: always the case with the most that none before it showed, and of equals the one whose
    drafter had the fewest turns. `turns` counts them, over all gates that share it.
    """
    left = [needs_of(values, by_turns) for values in cases]
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


def family_of(target: str) -> str:
    """`fp8` of `fp8 block`: they differ in the target's weights, which no head reads."""
    return target.partition(" ")[0]


def choose_for_targets(cases: Sequence[tuple[str, str, str]]) -> list[int]:
    """Places of cases (gate, target, method) in which each family meets each method once.

    Gates and targets take turns: always the ones with the fewest, of their cases the last.
    """
    turns: Counter[str] = Counter()
    chosen = []
    pairs = [(family_of(target), method) for _, target, method in cases]
    for pair in sorted({*pairs}):
        places = [place for place, other in enumerate(pairs) if other == pair]
        best = min(places, key=lambda place: (*(turns[name] for name in cases[place][:2]), -place))
        turns.update(cases[best][:2])
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
        by_turns = cases[0].get_closest_marker("by_turns") is not None
        chosen = cover_pairs([parameters(case) for case in cases], turns, by_turns)
        left_out |= set(cases) - {cases[place] for place in chosen}
    left_out |= set(others)
    candidates = [
        (item, (gate_of(item), str(item.callspec.params["target_name"]), method))
        for item in others
        if (method := method_of(item.callspec.params["drafter_name"])) not in WITHOUT_HEAD
    ]
    for place in choose_for_targets([case for _, case in candidates]):
        left_out.remove(candidates[place][0])
    return [item for item in items if item not in left_out], [*left_out]
