"""A request ends at the token that ends it, also in the middle of an accepted run."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import msgspec
import pytest

from openspec import _C, LLM, SamplingParams
from openspec.text.outputs import RequestOutput
from tests.gates.conftest import Reference, drafter_settings
from tests.gates.harness import make_core, run, with_options
from tests.gates.workload import jobs, prompts


class Oracle(_C.Drafter):
    """Knows the answers: every draft is accepted, so every end falls inside an accepted run."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self.answers = answers

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
        for answer in self.answers:
            if len(answer) > len(token_ids) and answer[: len(token_ids)] == token_ids:
                return answer[len(token_ids) : len(token_ids) + num_wanted]
        return []


def oracle_settings(num_drafts: int, answers: list[list[int]]) -> dict[str, object]:
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "drafter": Oracle(answers),
        "adaptive_speculation": False,
    }


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_stop_id_at_every_place_of_the_run(kind: str, reference: Reference) -> None:
    job = dataclasses.replace(jobs(kind, 1, 30)[0], arrives_at=0)
    full = reference([job])[0].token_ids
    answers = [list(job.prompt) + full]
    for at in range(1, min(len(full), 20)):
        stop = full[at]
        sampling = msgspec.structs.replace(job.sampling, stop_token_ids=[stop], logprobs=1)
        stopped = dataclasses.replace(job, sampling=sampling)
        core = make_core(**oracle_settings(7, answers))
        result = run(core, [stopped])[0]
        end = full.index(stop) + 1
        assert result.text == (full[:end], "stop")
        assert len(result.logprobs) == end, "log-probabilities beyond the stop"
        assert core.stats().num_generation_tokens == end
        if end > 2:
            assert core.stats().num_accepted_tokens > 0


def test_budget_at_every_place_of_the_run(reference: Reference) -> None:
    job = dataclasses.replace(jobs("greedy", 1, 30)[0], arrives_at=0)
    full = reference([job])[0].token_ids
    core = make_core(**oracle_settings(7, [list(job.prompt) + full]))
    for budget in range(1, 20):
        sampling = msgspec.structs.replace(job.sampling, max_tokens=budget)
        result = run(core, [dataclasses.replace(job, sampling=sampling)])[0]
        assert result.text == (full[:budget], "length")


def answers(settings: dict[str, Any]) -> list[RequestOutput]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=60, stop=["result", "sheep", "ther "], logprobs=2
    )
    asked = [list(ids) for ids in prompts()]
    return LLM(**settings).generate(asked, sampling, use_tqdm=False)


@cache
def plain_answers() -> list[RequestOutput]:
    return answers({"method": "none"})


@pytest.mark.by_turns
def test_stop_strings(drafter_name: str) -> None:
    """Text, ids and log-probabilities end together; equal to plain decoding's."""
    plain, spec = plain_answers(), answers(with_options(drafter_settings(drafter_name)))
    assert any(one.outputs[0].finish_reason == "stop" for one in plain)
    for one, other in zip(plain, spec, strict=True):
        a, b = one.outputs[0], other.outputs[0]
        assert (a.text, a.token_ids, a.finish_reason, a.stop_reason) == (
            b.text,
            b.token_ids,
            b.finish_reason,
            b.stop_reason,
        )
        assert a.logprobs == b.logprobs
        assert a.logprobs is not None and len(a.logprobs) == len(a.token_ids)
        if a.stop_reason is not None:
            assert str(a.stop_reason) not in a.text
