"""The engine's block drafters against the reference's stored cases, in float32.

Prefill, chain, verification by the target, what was committed joining the context, chain again:
logits within 1e-4 of the largest one, and the very same drafts; then trees.
"""

from __future__ import annotations

import functools

import pytest

from tests.golden import dflash_checkpoints, eagle3_checkpoints
from tests.golden.engine_runs import (
    Folders,
    MakeRunner,
    check_chains,
    check_commits,
    check_together,
    check_trees,
    make_runner,
    prompt_of,
)
from tests.golden.make_dflash import CHAIN, DATA, NODES, SHIPPED, TOP_K, cases
from tests.golden.make_eagle3 import PROMPTS, TINY
from tests.golden.stored_cases import read_cases

STORED = read_cases(DATA)
NAMES = [name for name, _ in cases()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    random = eagle3_checkpoints.write_pairs(
        root, {name: dflash_checkpoints.head(name) for name in dflash_checkpoints.DIALECTS}
    )
    shipped = {f"{head}_{name}": (TINY, TINY / head) for head in SHIPPED for name in PROMPTS}
    return {**random, **shipped}


def drafting(name: str, folders: dict[str, Folders]) -> MakeRunner:
    """Engines with the head of a case."""
    method = "dspark" if name.startswith("dspark") else "dflash"
    return functools.partial(make_runner, folders[name], method)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(name: str, chunk: int, folders: dict[str, Folders]) -> None:
    check_chains(drafting(name, folders), STORED[name], chunk, CHAIN)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_joins_the_context(name: str, folders: dict[str, Folders]) -> None:
    check_commits(drafting(name, folders), STORED[name])


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_references(name: str, folders: dict[str, Folders]) -> None:
    runner = drafting(name, folders)(CHAIN, draft_top_k=TOP_K, draft_tree_size=NODES)
    check_trees(runner, STORED[name], NODES)


@pytest.mark.parametrize("name", ["zlab", "dspark"])
def test_several_sequences_at_once(name: str, folders: dict[str, Folders]) -> None:
    case = STORED[name]
    prompts = [prompt_of(case), case["tokens"].tolist()[:-1]]
    check_together(drafting(name, folders), prompts, case["chain_tokens"].tolist())
