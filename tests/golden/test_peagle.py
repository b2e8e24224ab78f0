"""P-EAGLE: the reference gives what is stored, and the engine drafts it."""

from __future__ import annotations

import functools

import pytest

from tests.golden.engine_runs import (
    Folders,
    MakeRunner,
    check_chains,
    check_commits,
    check_together,
    check_tree,
    check_trees,
    last_tree,
    make_runner,
    prefill,
    prompt_of,
    step,
)
from tests.golden.make_eagle3 import CHAIN, DEPTH, NODES, TOP_K, make
from tests.golden.make_peagle import DATA, cases
from tests.golden.stored_cases import check_same, read_cases
from tests.heads import seeded
from tests.heads.seeded import write_pairs

KINDS = seeded.PEAGLE_KINDS
STORED = read_cases(DATA)
TREE = {"draft_top_k": TOP_K, "draft_tree_size": NODES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    return write_pairs(root, {kind: seeded.peagle(kind) for kind in KINDS})


def drafting(kind: str, folders: dict[str, Folders]) -> MakeRunner:
    return functools.partial(make_runner, folders[kind], "peagle")


def test_the_stored_cases_are_the_references() -> None:
    made = {name: make(case) for name, case in cases()}
    assert made.keys() == STORED.keys() == set(KINDS)
    for name, case in made.items():
        check_same(case, STORED[name])
        # Masks are no copies of each other: every depth has a say of its own.
        assert len(set(case["chain_tokens"][0].tolist())) > 1


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_the_references(kind: str, chunk: int, folders: dict[str, Folders]) -> None:
    check_chains(drafting(kind, folders), STORED[kind], chunk, CHAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_committed_teaches_the_head(kind: str, folders: dict[str, Folders]) -> None:
    """Entries of masks give way to those of the tokens that took their places."""
    check_commits(drafting(kind, folders), STORED[kind])
    case = STORED[kind]
    check_together(
        drafting(kind, folders), [prompt_of(case)] * 2, [case["chain_tokens"][0].tolist()] * 2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_references(kind: str, folders: dict[str, Folders]) -> None:
    check_trees(drafting(kind, folders)(DEPTH, **TREE), STORED[kind], NODES)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_teach_as_prompts_do(kind: str, folders: dict[str, Folders]) -> None:
    """After several verified trees the next one is that after a prompt of the same tokens."""
    runner, fresh = (drafting(kind, folders)(DEPTH, **TREE) for _ in range(2))
    slot, known = prefill(runner, prompt_of(STORED[kind]))
    known = prompt_of(STORED[kind]) + known
    for _ in range(6):
        known += step(runner, slot, 1, NODES)
    again, following = prefill(fresh, known[:-1])
    assert following == [known[-1]]
    step(fresh, again, 1, NODES)
    step(runner, slot, 1, NODES)
    check_tree(last_tree(runner), last_tree(fresh))
