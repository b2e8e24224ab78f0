"""Prompts that begin alike: computed and stored once, and every text as it was."""

from __future__ import annotations

import random

import pytest

from openspec.messages import EngineRequest, SamplingParams
from tests.gates import harness
from tests.gates.conftest import Reference, drafter_settings
from tests.gates.harness import PAGE_SIZE, Job, make_core, run, texts

NUM = 8


def shared_jobs(length: int, num_private: int, num_arrivals: int = 1) -> list[Job]:
    """`NUM` prompts of `length` common tokens, and as many of their own."""
    noise = random.Random(length)
    common = tuple(noise.randrange(300, 4000) for _ in range(length))
    return [
        Job(
            prompt=(*common, *(noise.randrange(300, 4000) for _ in range(num_private))),
            sampling=SamplingParams(temperature=index % 2, seed=index, max_tokens=6 + index % 3),
            arrives_at=index % num_arrivals,
        )
        for index in range(NUM)
    ]


@pytest.mark.parametrize("method", ["none", "eagle3"])
@pytest.mark.parametrize("num_private", [0, 30])
@pytest.mark.parametrize("length", [60, 500, pytest.param(2000, marks=pytest.mark.full)])
def test_rows_and_pages_of_one_prompt(method: str, num_private: int, length: int) -> None:
    """At most a tenth more than one prompt and the private ends."""
    core = make_core(
        **drafter_settings(method), max_model_len=2100, max_num_batched_tokens=512, max_num_seqs=NUM
    )
    batch = shared_jobs(length, num_private)
    for index, job in enumerate(batch):
        core.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=list(job.prompt),
                sampling=SamplingParams(seed=index, max_tokens=1),
            )
        )
    most_pages = 0
    while core.has_work:
        core.step()
        stats = core.stats()
        most_pages = max(most_pages, stats.num_pages - stats.num_free_pages)
    num_shared = (length - (num_private == 0)) // PAGE_SIZE
    num_own = length + num_private - num_shared * PAGE_SIZE
    assert core.stats().num_prompt_tokens <= 1.1 * num_shared * PAGE_SIZE + NUM * (num_own + 1)
    assert most_pages <= 1.1 * num_shared + NUM * -(-(num_own + 1) // PAGE_SIZE)


@pytest.mark.by_turns
@pytest.mark.parametrize("num_private", [0, 20])
def test_texts(drafter_name: str, num_private: int, reference: Reference) -> None:
    """In chunks; some arrive while the first is on its way."""
    batch = shared_jobs(150, num_private, num_arrivals=4)
    core = make_core(**drafter_settings(drafter_name), max_num_batched_tokens=64)
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_short_of_pages_and_by_priority(method: str, reference: Reference) -> None:
    batch = [
        Job(job.prompt, job.sampling, arrives_at=index, priority=-index)
        for index, job in enumerate(shared_jobs(150, 20))
    ]
    settings = drafter_settings(method)
    core = make_core(
        **settings,
        kv_cache_memory=harness.kv_memory(20, **settings),
        max_model_len=200,
        max_num_batched_tokens=64,
    )
    assert texts(run(core, batch)) == texts(reference(batch))
