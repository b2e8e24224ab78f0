"""The choice of gates that run per commit."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.gates.pairs import (
    Values,
    choose_for_targets,
    cover_pairs,
    is_tree,
    method_of,
    needs_of,
    split,
)

DRAFTERS = [
    "none",
    "ngram",
    "eagle3",
    "eagle3 tree",
    "eagle3 long",
    "eagle3 deep tree",
    "peagle",
    "dflash",
    "(echo)",
    "(bush tree)",
]
FULL: list[Values] = list(product(DRAFTERS, "abc", range(4), (True, False)))


@pytest.mark.parametrize(
    "cases",
    [FULL, FULL[::-1], FULL[::7], [(drafter,) for drafter in DRAFTERS], [("none", 1)], []],
    ids=["full", "reversed", "sparse", "drafters only", "single", "empty"],
)
def test_all_that_any_case_shows_is_shown(cases: list[Values]) -> None:
    chosen = cover_pairs(cases, Counter())
    shown = set().union(*(needs_of(cases[place]) for place in chosen))
    assert shown == set().union(*(needs_of(values) for values in cases))
    assert chosen == sorted(set(chosen))
    assert chosen == cover_pairs(cases, Counter()), "the choice is the same in every process"


def test_every_parameter_meets_every_method_and_every_other() -> None:
    chosen = [FULL[place] for place in cover_pairs(FULL, Counter())]
    methods = {"none", "ngram", "eagle3", "dflash", "python"}
    assert {(method_of(case[0]), case[1]) for case in chosen} == set(product(methods, "abc"))
    assert {case[1:3] for case in chosen} == set(product("abc", range(4)))
    assert len(chosen) * 5 < len(FULL)


def test_methods_take_turns_over_the_values_of_a_gate() -> None:
    chosen = [FULL[place] for place in cover_pairs(FULL, Counter(), by_turns=True)]
    assert {method_of(case[0]) for case in chosen} == {*map(method_of, DRAFTERS)}
    assert {is_tree(case[0]) for case in chosen} == {True, False}
    assert {case[1:3] for case in chosen} == set(product("abc", range(4)))
    assert {case[2:] for case in chosen} == set(product(range(4), (True, False)))
    assert len(chosen) == 12, "as few as have each pair of values"


def test_each_gate_meets_chains_and_trees_and_drafters_take_turns() -> None:
    cases: list[Values] = [(drafter,) for drafter in DRAFTERS]
    turns: Counter[object] = Counter()
    gates = [[DRAFTERS[place] for place in cover_pairs(cases, turns)] for _ in range(3)]
    kinds = {(method_of(drafter), is_tree(drafter)) for drafter in DRAFTERS}
    for gate in gates:
        assert len(gate) == len(kinds) == 7
        assert {(method_of(drafter), is_tree(drafter)) for drafter in gate} == kinds
    assert {drafter for gate in gates for drafter in gate} == set(DRAFTERS)


def test_only_gates_and_what_is_marked_are_left_out(request: pytest.FixtureRequest) -> None:
    assert split([request.node]) == ([request.node], [])
    request.node.add_marker("full")
    assert split([request.node]) == ([], [request.node])


def test_each_other_target_meets_each_method_in_gates_that_take_turns() -> None:
    cases = list(product(("stops", "chunks", "faults"), ("llama", "qwen2.5"), ("ngram", "dflash")))
    chosen = [cases[place] for place in choose_for_targets(cases)]
    assert sorted(case[1:] for case in chosen) == sorted({case[1:] for case in cases})
    assert len({gate for gate, _, _ in chosen}) == 3
    assert choose_for_targets([]) == []


def test_formats_of_one_family_take_turns() -> None:
    targets = ("llama", "fp8 channel", "fp8 tensor")
    cases = list(product(("stops", "chunks", "faults"), targets, ("dflash", "eagle3")))
    chosen = [cases[place] for place in choose_for_targets(cases)]
    assert sorted(target for _, target, _ in chosen) == [
        "fp8 channel",
        "fp8 tensor",
        "llama",
        "llama",
    ]
    assert {method for _, target, method in chosen if target != "llama"} == {"dflash", "eagle3"}
