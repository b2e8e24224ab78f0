"""What the tests of the engine's drafters against their references share.

A case holds `tokens`, of which the first `num_prefilled` are the prompt, and what the reference
says after the prompt and after all of them; see the docstrings of make_*.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from openspec import _C
from openspec.config import config_from_settings
from openspec.engine.load import load_engine
from openspec.messages import SamplingParams
from tests.gates import harness

from .stored_cases import Stored

MAX_ERROR = 1e-4

Folders = tuple[Path, Path]
"""Of a target and a head."""
MakeRunner = Callable[..., _C.Runner]
"""From K and options of the method."""


def prompt_of(case: Stored) -> list[int]:
    return case["tokens"].tolist()[: int(case["num_prefilled"])]


def make_runner(folders: Folders, method: str, num_drafts: int, **options: int | str) -> _C.Runner:
    """The core of an engine that always drafts; `options` are settings of it, or of its method."""
    core = load_engine(
        config_from_settings(
            harness.with_options(
                {
                    "model": str(folders[0]),
                    "draft_model": str(folders[1]),
                    "method": method,
                    "num_speculative_tokens": num_drafts,
                    "adaptive_speculation": False,
                    "copied_drafts": False,
                    "device": "cpu",
                    "max_model_len": 128,
                    "max_num_seqs": 2,
                    "num_threads": harness.NUM_THREADS,
                    "stats_interval_s": 0.0,
                    **options,
                }
            )
        )
    )
    runner = core._runner  # type: ignore[attr-defined]
    assert isinstance(runner, _C.Runner)
    return runner


def add(runner: _C.Runner, tokens: list[int]) -> int:
    """The slot of a sequence with this prompt."""
    return runner.add_sequence(
        tokens, len(tokens), _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=64)
    )


def step(runner: _C.Runner, slot: int, num_new: int, num_drafts: int) -> list[int]:
    """One step of one sequence; the tokens it adds."""
    return step_all(runner, [(slot, num_new, num_drafts)])[0]


def step_all(runner: _C.Runner, spans: list[tuple[int, int, int]]) -> list[list[int]]:
    lease = runner.reserve(spans)
    lease.launch()
    results = lease.collect()
    lease.commit()
    return [list(result.token_ids) for result in results]


def prefill(runner: _C.Runner, tokens: list[int], chunk: int = 1000) -> tuple[int, list[int]]:
    """A sequence after its prompt: the slot, and the token that follows."""
    slot = add(runner, tokens)
    known: list[int] = []
    while not known:
        known = step(runner, slot, min(chunk, len(tokens) - runner.kv_len(slot)), 0)
    return slot, known


def check_logits(found: list[float], expected: Tensor) -> None:
    """Relative to the largest logit."""
    error = np.abs(np.array(found) - expected.numpy()).max() / expected.abs().max().item()
    assert error < MAX_ERROR


def check_chains(make: MakeRunner, case: Stored, chunk: int, num_drafts: int) -> None:
    """The logits of a first draft alone; chains of `num_drafts` after the prompt and all tokens."""
    tokens, prompt = case["tokens"].tolist(), prompt_of(case)
    chains = case["chain_tokens"].tolist()
    for count in (1, num_drafts):
        runner = make(count)
        slot, known = prefill(runner, prompt, chunk)
        assert known == [tokens[len(prompt)]]
        known += step(runner, slot, 1, count)
        if count == 1:
            check_logits(runner.last_draft_logits(), case["logits"][0])
            continue
        assert runner.last_drafts() == [chains[0]]
        assert known == tokens[len(prompt) :]
        step(runner, slot, 1, count)
        assert runner.last_drafts() == [chains[1]]


def check_commits(make: MakeRunner, case: Stored) -> None:
    """The state after verifications is that after a prompt with the same tokens."""
    tokens, prompt = case["tokens"].tolist(), prompt_of(case)
    runner = make(1)
    # One draft a step: other verifications than the case's, the same tokens.
    slot, known = prefill(runner, prompt)
    while len(prompt) + len(known) < len(tokens):
        num_left = len(tokens) - len(prompt) - len(known)
        known += step(runner, slot, 1, 1 if num_left > 1 else 0)
    assert prompt + known == tokens
    step(runner, slot, 1, 1)
    check_logits(runner.last_draft_logits(), case["logits"][1])


def check_together(make: MakeRunner, prompts: list[list[int]], chains: list[list[int]]) -> None:
    """Each draws the drafts that it draws alone, whatever the others do."""
    num_drafts = len(chains[0])
    runner = make(num_drafts)
    slots = [add(runner, prompt) for prompt in prompts]
    step_all(runner, [(slot, len(p), 0) for slot, p in zip(slots, prompts, strict=True)])
    step_all(runner, [(slot, 1, num_drafts) for slot in slots])
    assert runner.last_drafts() == chains


def _by_path(tokens: list[int], parents: list[int], scores: list[float]) -> dict[str, float]:
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
    return _by_path(tokens, parents, scores)


def check_tree(found: dict[str, float], expected: dict[str, float]) -> None:
    """The same nodes with the same scores."""
    assert found.keys() == expected.keys()
    for path, score in expected.items():
        assert found[path] == pytest.approx(score, abs=MAX_ERROR)


def check_trees(runner: _C.Runner, case: Stored, num_nodes: int) -> None:
    """After the prompt, and after the tokens that the case ends with."""
    tokens = case["tokens"].tolist()
    for index, known in enumerate((prompt_of(case), tokens[:-1])):
        slot = add(runner, known)
        num_new = len(known) - runner.kv_len(slot)
        assert step(runner, slot, num_new, 0) == [tokens[len(known)]]
        step(runner, slot, 1, num_nodes)
        names = ("tree_tokens", "tree_parents", "tree_scores")
        check_tree(last_tree(runner), _by_path(*(case[name][index].tolist() for name in names)))
