"""The engine's block drafters against the reference's stored cases, in float32.

Prefill, chain, verification by the target, what was committed joining the context, chain again:
logits within 1e-4 of the largest one, and the very same drafts; then trees.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from openspec import _C
from tests.golden import dflash_checkpoints, eagle3_checkpoints
from tests.golden.make_dflash import CHAIN, DATA, NODES, SHIPPED, TOP_K, cases
from tests.golden.make_eagle3 import PROMPTS, TINY
from tests.golden.test_engine import (
    by_path,
    check_logits,
    check_tree,
    last_tree,
    make_runner,
    step,
)

NAMES = [name for name, _ in cases()]
TREE = {"draft_top_k": TOP_K, "draft_tree_size": NODES}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = eagle3_checkpoints.write(root / "target", eagle3_checkpoints.target())
    random = {
        dialect: (
            target,
            eagle3_checkpoints.write(root / dialect, dflash_checkpoints.head(dialect)),
        )
        for dialect in dflash_checkpoints.DIALECTS
    }
    return {
        **random,
        **{f"{head}_{name}": (TINY, TINY / head) for head in SHIPPED for name in PROMPTS},
    }


def read_case(name: str) -> dict[str, Tensor]:
    """A stored case by the names in make_dflash's docstring."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value
        for key, value in load_file(DATA).items()
        if key.startswith(prefix)
    }


def drafting(
    name: str, folders: dict[str, tuple[Path, Path]], num_drafts: int, **options: int
) -> _C.Runner:
    """An engine with the head of a case."""
    method = "dspark" if name.startswith("dspark") else "dflash"
    return make_runner(folders[name], num_drafts, method=method, **options)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(
    name: str, chunk: int, folders: dict[str, tuple[Path, Path]]
) -> None:
    case = read_case(name)
    tokens = case["tokens"].tolist()
    prompt = tokens[: int(case["num_prefilled"])]
    for num_drafts in (1, CHAIN):
        runner = drafting(name, folders, num_drafts)
        params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=num_drafts)
        slot = runner.add_sequence(prompt, len(prompt), params)
        known: list[int] = []
        for begin in range(0, len(prompt), chunk):
            known += step(runner, slot, min(chunk, len(prompt) - begin), 0)
        assert known == [tokens[len(prompt)]]
        known += step(runner, slot, 1, num_drafts)
        if num_drafts == 1:
            check_logits(runner.last_draft_logits(), case["logits"][0])
            continue
        chains = case["chain_tokens"].tolist()
        assert runner.last_drafts() == [chains[0]]
        assert known == tokens[len(prompt) :]
        step(runner, slot, 1, num_drafts)
        assert runner.last_drafts() == [chains[1]]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_joins_the_context(
    name: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    """The context after a verification is that after a prompt with the same tokens."""
    case = read_case(name)
    tokens = case["tokens"].tolist()
    runner = drafting(name, folders, 1)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=1)
    # One draft a step: other verifications than the case's, the same tokens.
    num_prefilled = int(case["num_prefilled"])
    slot = runner.add_sequence(tokens[:num_prefilled], 1, params)
    known = tokens[:num_prefilled] + step(runner, slot, num_prefilled, 0)
    while len(known) < len(tokens):
        known += step(runner, slot, 1, 1 if len(tokens) - len(known) > 1 else 0)
    assert known == tokens
    step(runner, slot, 1, 1)
    check_logits(runner.last_draft_logits(), case["logits"][1])


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_references(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    """After the prompt, and after the tokens that the case ends with."""
    case = read_case(name)
    tokens = case["tokens"].tolist()
    runner = drafting(name, folders, CHAIN, **TREE)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=NODES)
    for index, num_known in enumerate((int(case["num_prefilled"]), len(tokens) - 1)):
        slot = runner.add_sequence(tokens[:num_known], num_known, params)
        assert step(runner, slot, num_known - runner.kv_len(slot), 0) == [tokens[num_known]]
        step(runner, slot, 1, NODES)
        names = ("tree_tokens", "tree_parents", "tree_scores")
        expected = by_path(*(case[name][index].tolist() for name in names))
        check_tree(last_tree(runner), expected)


def test_several_sequences_at_once(folders: dict[str, tuple[Path, Path]]) -> None:
    """Each draws the drafts that it draws alone, whatever the others do."""
    for name in ("zlab", "dspark"):
        case = read_case(name)
        runner = drafting(name, folders, CHAIN)
        params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=CHAIN)
        tokens = case["tokens"].tolist()
        prompts = [tokens[: int(case["num_prefilled"])], tokens[:-1]]
        slots = [runner.add_sequence(prompt, len(prompt), params) for prompt in prompts]
        for num_drafts, counts in ((0, [len(prompt) for prompt in prompts]), (CHAIN, [1, 1])):
            spans = [(slot, count, num_drafts) for slot, count in zip(slots, counts, strict=True)]
            lease = runner.reserve(spans)
            runner.launch(lease)
            runner.collect(lease)
            runner.commit(lease)
        assert runner.last_drafts() == case["chain_tokens"].tolist()
