"""Acceptance by rejection sampling: another text than plain decoding's, the same distribution."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from openspec.drafters import available_drafters, get_drafter
from openspec.messages import SamplingParams
from tests.gates import harness
from tests.gates.conftest import EchoDrafter, Reference
from tests.gates.harness import Job, kv_memory, make_core, run, run_alone, texts
from tests.gates.pairs import SHARED
from tests.gates.test_statistics import chi_square_limit, count, seeded
from tests.gates.workload import jobs, prompts
from tests.heads.untrained import draft_model

NUM_SEEDS = 2500 if harness.IS_FULL else 1200
NUM_TOKENS = 4
METHODS = [
    pytest.param(name, marks=pytest.mark.full if name in SHARED else ())
    for name in available_drafters()
    if get_drafter(name).supports_rejection
]

pytestmark = pytest.mark.parametrize("method", METHODS)


def settings(method: str, **others: object) -> dict[str, Any]:
    """Drafts at every step, so that nothing depends on how long steps take."""
    return {
        "method": method,
        "draft_model": draft_model(method),
        "acceptance": "rejection",
        "num_speculative_tokens": 4,
        "adaptive_speculation": False,
        **others,
    }


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"temperature": 1.0}, marks=pytest.mark.full),
        pytest.param({"temperature": 1.5, "top_k": 12}, marks=pytest.mark.full),
        {"temperature": 1.0, "top_p": 0.8, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_tokens_follow_the_distribution(method: str, sampling: dict[str, float]) -> None:
    """Given the tokens before it, each token is distributed as the target's row says; all but the
    first have had a draft to decide on."""
    core = make_core(**settings(method))
    cells = count(run(core, seeded(NUM_SEEDS, NUM_TOKENS, sampling)), first_place=1)
    assert cells.num_free >= 20, "too few rows to tell anything"
    assert cells.statistic < chi_square_limit(cells.num_free), cells
    stats = core.stats()
    num_first_accepted = stats.num_accepted_tokens_per_pos[0]
    # Both outcomes occur often enough to count.
    assert min(num_first_accepted, stats.num_drafts - num_first_accepted) > NUM_SEEDS // 10
    assert stats.num_drafter_failures == stats.num_step_failures == 0


def test_greedy_requests_are_plain_decodings(method: str, reference: Reference) -> None:
    batch = [dataclasses.replace(job) for job in jobs("mixed", 16)]
    results = texts(run(make_core(**settings(method)), batch))
    expected = texts(reference(batch))
    is_greedy = [job.sampling.temperature == 0 for job in batch]
    assert [text for text, greedy in zip(results, is_greedy, strict=True) if greedy] == [
        text for text, greedy in zip(expected, is_greedy, strict=True) if greedy
    ]
    assert results != expected, "sampled texts are others, or this is acceptance by match"


def test_a_seed_keeps_its_text_in_any_batch(method: str) -> None:
    """While every draft gets its row, a request's draws depend on nobody else."""
    batch = [dataclasses.replace(job) for job in jobs("sampled", 8)]
    core = make_core(**settings(method))
    alone = texts(run_alone(core, batch))
    assert texts(run(core, batch)) == alone
    assert texts(run(make_core(**settings(method, num_threads=3)), batch)) == alone


def test_parameters_hold(method: str) -> None:
    """Masks, stops and budgets see each token as ever."""
    allowed = [10, 300, 301, 302, 500, 700]
    batch = [
        Job(
            prompts()[index],
            SamplingParams(
                temperature=5.0,
                seed=index,
                max_tokens=30,
                min_tokens=6,
                allowed_token_ids=allowed,
                stop_token_ids=[500],
                logprobs=3,
            ),
        )
        for index in range(8)
    ]
    results = run(make_core(**settings(method)), batch)
    assert {result.finish_reason for result in results} <= {"stop", "length"}
    for result in results:
        assert set(result.token_ids) <= set(allowed)
        assert 500 not in result.token_ids[:6] and 500 not in result.token_ids[:-1]
        assert len(result.token_ids) == 30 or result.token_ids[-1] == 500
        assert [row.token_ids[0] for row in result.logprobs] == result.token_ids
    assert any(result.finish_reason == "stop" for result in results)


def test_preemption(method: str, reference: Reference) -> None:
    batch = [dataclasses.replace(job) for job in jobs("mixed", 16)]
    core = make_core(
        **settings(method, max_model_len=200),
        kv_cache_memory=kv_memory(16, **settings(method)),
    )
    results = run(core, batch)
    assert core.stats().num_preemptions > 0
    for job, result, expected in zip(batch, results, reference(batch), strict=True):
        assert result.error is None and result.finish_reason is not None
        if job.sampling.temperature == 0:
            assert result.text == expected.text


def test_what_cannot_work_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="by rejection needs the probabilities"):
        make_core(drafter=EchoDrafter(), **settings(method))
    assert make_core(**settings(method, num_speculative_tokens=0)).stats().num_drafts == 0
