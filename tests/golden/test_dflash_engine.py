"""The engine's block drafters against the reference's stored cases, in float32.

Prefill, chain, verification by the target, what was committed joining the context, chain again:
logits within 1e-4 of the largest one, and the very same drafts; then trees.
"""

from __future__ import annotations

import functools

import pytest

from openspec import LLM, SamplingParams
from tests.golden.engine_runs import (
    Folders,
    MakeRunner,
    check_chains,
    check_commits,
    check_together,
    check_trees,
    make_runner,
    prefill,
    prompt_of,
    step,
)
from tests.golden.make_dflash import CHAIN, DATA, NODES, SHIPPED, TOP_K, cases
from tests.golden.make_eagle3 import PROMPTS, TINY
from tests.golden.stored_cases import read_cases
from tests.heads import seeded

STORED = read_cases(DATA)
NAMES = [name for name, _ in cases()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    random = seeded.write_pairs(root, {name: seeded.dflash(name) for name in seeded.DFLASH_KINDS})
    shipped = {f"{head}_{name}": (TINY, TINY / head) for head in SHIPPED for name in PROMPTS}
    return {**random, **shipped}


def drafting(name: str, folders: dict[str, Folders], **options: int | str) -> MakeRunner:
    """Engines with the head of a case."""
    method = "dspark" if has_markov(name) else "dflash"
    return functools.partial(make_runner, folders[name], method, **options)


def has_markov(name: str) -> bool:
    return name.startswith("dspark")


def published_chains(name: str, folders: dict[str, Folders]) -> MakeRunner:
    """Engines whose drafts are chosen of all tokens.

    With a Markov head it takes an acceptance that needs their whole distributions.
    """
    if has_markov(name):
        return drafting(name, folders, acceptance="rejection")
    return drafting(name, folders)


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(name: str, chunk: int, folders: dict[str, Folders]) -> None:
    check_chains(published_chains(name, folders), STORED[name], chunk, CHAIN)


@pytest.mark.parametrize("name", [name for name in NAMES if "path_tokens" in STORED[name]])
def test_drafts_of_a_markov_head_are_candidates(name: str, folders: dict[str, Folders]) -> None:
    case = STORED[name]
    runner = drafting(name, folders)(CHAIN)
    for known, path in zip(
        (prompt_of(case), case["tokens"].tolist()[:-1]), case["path_tokens"].tolist(), strict=True
    ):
        slot, _ = prefill(runner, known)
        step(runner, slot, 1, CHAIN)
        assert runner.last_drafts() == [path]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_joins_the_context(name: str, folders: dict[str, Folders]) -> None:
    check_commits(published_chains(name, folders), STORED[name])


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_the_references(name: str, folders: dict[str, Folders]) -> None:
    runner = drafting(name, folders)(CHAIN, draft_top_k=TOP_K, draft_tree_size=NODES)
    check_trees(runner, STORED[name], NODES)


@pytest.mark.parametrize("name", ["zlab", "dspark"])
def test_several_sequences_at_once(name: str, folders: dict[str, Folders]) -> None:
    case = STORED[name]
    prompts = [prompt_of(case), case["tokens"].tolist()[:-1]]
    check_together(published_chains(name, folders), prompts, case["chain_tokens"].tolist())


@pytest.mark.parametrize("options", [{}, {"draft_top_k": 64, "draft_tree_size": 15}])
def test_what_filters_leave_of_a_position_does_not_bound_a_markov_head(
    options: dict[str, int],
) -> None:
    """With the checkpoint's recommended sampling drafts are accepted as far as without filters."""

    def mean_length(**filters: float) -> float:
        sampling = [
            SamplingParams(temperature=0.6, seed=seed, max_tokens=96, **filters)
            for seed in range(4)
        ]
        stats = [
            output.metrics.spec_decode
            for prompt in PROMPTS.values()
            for output in llm.generate([prompt] * 4, sampling, use_tqdm=False)
        ]
        num_accepted = sum(stat.num_accepted_tokens for stat in stats)
        return 1 + num_accepted / sum(stat.num_drafts for stat in stats)

    with LLM(
        model=str(TINY), device="cpu", method="dspark", num_speculative_tokens=CHAIN,
        adaptive_speculation=False, copied_drafts=False, max_num_seqs=4, max_model_len=512,
        stats_interval_s=0.0,
        method_options=dict(options),
    ) as llm:  # fmt: skip
        assert mean_length(top_k=20, top_p=0.95) > 0.88 * mean_length()
