"""The engine's EAGLE-3 drafter against the reference's stored cases, in float32.

Prefill, chain, verification by the target, re-extension by what was committed, chain again: logits
within 1e-4 of the largest one, and the very same drafts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from openspec import _C
from openspec.config import config_from_settings
from openspec.engine_loader import load_engine
from tests.golden import eagle3_checkpoints
from tests.golden.make_eagle3 import CHAIN, DATA, DEPTH, NODES, PROMPTS, TINY, TOP_K

MAX_ERROR = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Target and head by case."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = eagle3_checkpoints.write(root / "target", eagle3_checkpoints.target())
    random = {
        dialect: (
            target,
            eagle3_checkpoints.write(root / dialect, eagle3_checkpoints.head(dialect)),
        )
        for dialect in eagle3_checkpoints.DIALECTS
    }
    return {**random, **dict.fromkeys(PROMPTS, (TINY, TINY / "eagle3"))}


def read_case(name: str) -> dict[str, Tensor]:
    """A stored case by the names in make_eagle3's docstring."""
    prefix = f"{name}."
    return {
        key.removeprefix(prefix): value
        for key, value in load_file(DATA).items()
        if key.startswith(prefix)
    }


def make_runner(folders: tuple[Path, Path], num_drafts: int, **options: int | str) -> _C.Runner:
    """The core of an engine that always drafts; `options` are settings of it."""
    core = load_engine(
        config_from_settings(
            {
                "model": str(folders[0]),
                "draft_model": str(folders[1]),
                "method": "eagle3",
                "num_speculative_tokens": num_drafts,
                "adaptive_speculation": False,
                "device": "cpu",
                "max_model_len": 128,
                "max_num_seqs": 2,
                "num_threads": 2,
                "stats_interval_s": 0.0,
                **options,
            }
        )
    )
    runner = core._executor._runner  # type: ignore[attr-defined]
    assert isinstance(runner, _C.Runner)
    return runner


def step(runner: _C.Runner, slot: int, num_new: int, num_drafts: int) -> list[int]:
    """One step of one sequence; the tokens it adds."""
    lease = runner.reserve([(slot, num_new, num_drafts)])
    runner.launch(lease)
    (result,) = runner.collect(lease)
    runner.commit(lease)
    return list(result.token_ids)


def check_logits(found: list[float], expected: Tensor) -> None:
    """Relative to the largest logit."""
    error = np.abs(np.array(found) - expected.numpy()).max() / expected.abs().max().item()
    assert error < MAX_ERROR


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("name", [*PROMPTS, *eagle3_checkpoints.DIALECTS])
def test_drafts_are_the_references(
    name: str, chunk: int, folders: dict[str, tuple[Path, Path]]
) -> None:
    case = read_case(name)
    tokens = case["tokens"].tolist()
    prompt = tokens[: int(case["num_prefilled"])]
    for num_drafts in (1, CHAIN):
        runner = make_runner(folders[name], num_drafts)
        params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=num_drafts)
        slot = runner.add_sequence(prompt, len(prompt), params)
        known: list[int] = []
        for begin in range(0, len(prompt), chunk):
            known += step(runner, slot, min(chunk, len(prompt) - begin), 0)
        assert known == [tokens[len(prompt)]]
        known += step(runner, slot, 1, num_drafts)
        chains = case["chain_tokens"].tolist()
        assert runner.last_drafts() == [chains[0][:num_drafts]]
        if num_drafts == 1:
            check_logits(runner.last_draft_logits(), case["logits"][0])
            continue
        assert known == tokens[len(prompt) :]
        step(runner, slot, 1, num_drafts)
        assert runner.last_drafts() == [chains[1]]


@pytest.mark.parametrize("name", [*PROMPTS, *eagle3_checkpoints.DIALECTS])
def test_what_was_committed_teaches_the_head(
    name: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    """The state after a verification is that after a prompt with the same tokens."""
    case = read_case(name)
    tokens = case["tokens"].tolist()
    runner = make_runner(folders[name], 1)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=1)
    # One draft a step: other verifications than the case's, the same tokens.
    slot = runner.add_sequence(tokens[: int(case["num_prefilled"])], 1, params)
    count = step(runner, slot, int(case["num_prefilled"]), 0)
    while int(case["num_prefilled"]) + len(count) < len(tokens):
        left = len(tokens) - int(case["num_prefilled"]) - len(count)
        count += step(runner, slot, 1, 1 if left > 1 else 0)
    step(runner, slot, 1, 1)
    check_logits(runner.last_draft_logits(), case["logits"][1])


def test_a_prefix_hit_loses_nothing(folders: dict[str, tuple[Path, Path]]) -> None:
    """The token before the first new one runs again for its states."""
    case = read_case("problem")
    tokens = case["tokens"].tolist()
    prompt = tokens[: int(case["num_prefilled"])]
    assert len(prompt) > 17
    runner = make_runner(folders["problem"], 1)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=1)
    for _ in range(2):
        slot = runner.add_sequence(prompt, len(prompt), params)
        step(runner, slot, len(prompt) - runner.kv_len(slot), 0)
        step(runner, slot, 1, 1)
        check_logits(runner.last_draft_logits(), case["logits"][0])
        runner.remove_sequence(slot)
        runner.check_integrity()
    assert runner.prefix_cache_stats[1] >= 16


def test_window(folders: dict[str, tuple[Path, Path]]) -> None:
    """One that holds the context changes no bit; a short one leaves tokens out."""
    case = read_case("problem")
    prompt = case["tokens"].tolist()[: int(case["num_prefilled"])]
    assert len(prompt) > 33
    logits = []
    for window in (0, len(prompt), 16):
        runner = make_runner(folders["problem"], 1, draft_window=window)
        params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=1)
        slot = runner.add_sequence(prompt, len(prompt), params)
        step(runner, slot, len(prompt), 0)
        step(runner, slot, 1, 1)
        logits.append(runner.last_draft_logits())
    assert logits[0] == logits[1]
    assert logits[0] != logits[2]


def test_several_sequences_at_once(folders: dict[str, tuple[Path, Path]]) -> None:
    """Each draws the drafts that it draws alone, whatever the others do."""
    runner = make_runner(folders["problem"], CHAIN)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=CHAIN)
    cases = [read_case("problem"), read_case("copy")]
    prompts = [case["tokens"].tolist()[: int(case["num_prefilled"])] for case in cases]
    slots = [runner.add_sequence(prompt, len(prompt), params) for prompt in prompts]
    for num_drafts, counts in ((0, [len(prompt) for prompt in prompts]), (CHAIN, [1, 1])):
        spans = [(slot, count, num_drafts) for slot, count in zip(slots, counts, strict=True)]
        lease = runner.reserve(spans)
        runner.launch(lease)
        runner.collect(lease)
        runner.commit(lease)
    assert runner.last_drafts() == [case["chain_tokens"][0].tolist() for case in cases]


def by_path(tokens: list[int], parents: list[int], scores: list[float]) -> dict[str, float]:
    """Scores of a tree's nodes by their tokens from the root on."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {str(path): score for path, score in zip(paths, scores, strict=True)}


def last_tree(runner: _C.Runner) -> dict[str, float]:
    """The tree of a step of one sequence; its nodes are ordered by their scores."""
    (tokens,), (parents,) = runner.last_drafts(), runner.last_draft_parents()
    (scores,) = runner.last_draft_scores()
    assert scores == sorted(scores, reverse=True)
    return by_path(tokens, parents, scores)


def check_tree(found: dict[str, float], expected: dict[str, float]) -> None:
    """The same nodes with the same scores."""
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(score, abs=MAX_ERROR)


TREE = {"draft_top_k": TOP_K, "draft_tree_size": NODES}


@pytest.mark.parametrize("name", [*PROMPTS, *eagle3_checkpoints.DIALECTS])
def test_trees_are_the_references(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    """After the prompt, and after the tokens that the case ends with."""
    case = read_case(name)
    tokens = case["tokens"].tolist()
    runner = make_runner(folders[name], DEPTH, **TREE)
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=NODES)
    for index, num_known in enumerate((int(case["num_prefilled"]), len(tokens) - 1)):
        slot = runner.add_sequence(tokens[:num_known], num_known, params)
        assert step(runner, slot, num_known - runner.kv_len(slot), 0) == [tokens[num_known]]
        step(runner, slot, 1, NODES)
        names = ("tree_tokens", "tree_parents", "tree_scores")
        expected = by_path(*(case[name][index].tolist() for name in names))
        check_tree(last_tree(runner), expected)


@pytest.mark.parametrize("name", PROMPTS)
def test_verified_trees_teach_the_head(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    """What a tree had accepted stood among what was not; the next tree is that after a prompt."""
    case = read_case(name)
    prompt = case["tokens"].tolist()[: int(case["num_prefilled"])]
    runner, fresh = (make_runner(folders[name], DEPTH, **TREE) for _ in range(2))
    params = _C.SequenceParams(max_tokens=64, num_speculative_tokens=NODES)
    slot = runner.add_sequence(prompt, len(prompt), params)
    known = prompt + step(runner, slot, len(prompt), 0)
    num_moved = 0
    for _ in range(8):
        added = step(runner, slot, 1, NODES)
        (tokens,) = runner.last_drafts()
        num_moved += added[:-1] != tokens[: len(added) - 1]
        again = fresh.add_sequence(known[:-1], len(known) - 1, params)
        assert step(fresh, again, len(known) - 1 - fresh.kv_len(again), 0) == [known[-1]]
        step(fresh, again, 1, NODES)
        check_tree(last_tree(runner), last_tree(fresh))
        fresh.remove_sequence(again)
        known += added
        if runner.kv_len(slot) > 90:
            break
    assert num_moved > 0
