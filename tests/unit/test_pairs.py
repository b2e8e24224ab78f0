"""The choice of gates that run per commit."""

from __future__ import annotations

from itertools import product

import pytest

from tests.gates.pairs import Values, cover_pairs, pairs_of, split

DRAFTERS = [("none", ""), ("ngram", ""), ("eagle3", ""), ("eagle3", "tree"), ("dflash", "tree")]
FULL = [
    (*drafter, *values) for drafter, *values in product(DRAFTERS, "abc", range(4), (True, False))
]


@pytest.mark.parametrize(
    "cases",
    [FULL, FULL[::-1], FULL[::7], [("one", 1)], []],
    ids=["full", "reversed", "sparse", "single", "empty"],
)
def test_every_pair_of_values_that_occurs_is_covered(cases: list[Values]) -> None:
    chosen = cover_pairs(cases)
    covered = {pair for place in chosen for pair in pairs_of(cases[place])}
    assert covered == {pair for values in cases for pair in pairs_of(values)}
    assert chosen == sorted(set(chosen))
    assert chosen == cover_pairs(cases), "the choice is the same in every process"


def test_the_choice_is_much_smaller_than_the_product() -> None:
    assert len(cover_pairs(FULL)) * 4 < len(FULL)


def test_only_gates_and_what_is_marked_are_left_out(request: pytest.FixtureRequest) -> None:
    assert split([request.node]) == ([request.node], [])
    request.node.add_marker("full")
    assert split([request.node]) == ([], [request.node])
