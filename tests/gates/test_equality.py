"""Tokens and lengths equal plain decoding's, without tolerance, whatever else goes on."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from openspec.messages import SpeculativeOptions
from tests.gates.conftest import SELECTORS, STRANGER, TREES, Reference, drafter_settings
from tests.gates.harness import Job, kv_memory, make_core, run, texts
from tests.gates.pairs import EMBEDDED
from tests.gates.workload import jobs

KINDS = ("greedy", "sampled", "mixed")
WIDEST_TREES = ("eagle3 tree", "dflash tree", "dspark tree")
"""A commit runs these at their widest: one of each way to grow a tree."""


def as_jobs(kind: str, num_jobs: int) -> list[Job]:
    return [dataclasses.replace(job) for job in jobs(kind, num_jobs)]


@pytest.mark.by_turns
@pytest.mark.parametrize("adaptive", [True, False], ids=["adaptive", "always"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_concurrency(
    drafter_name: str,
    target_name: str,
    kind: str,
    concurrency: int,
    adaptive: bool,
    reference: Reference,
) -> None:
    """Staggered arrivals and budgets, at most so many at a time."""
    batch = as_jobs(kind, 16)
    settings = drafter_settings(drafter_name)
    settings.setdefault("adaptive_speculation", adaptive)
    core = make_core(**settings, max_num_seqs=concurrency)
    assert texts(run(core, batch)) == texts(reference(batch))
    # Heads with a selector are random: they guess what other targets say by luck only.
    is_lucky = drafter_name in SELECTORS and target_name != EMBEDDED
    if drafter_name not in ("none", "(garbage)", STRANGER) and not (adaptive or is_lucky):
        assert core.stats().num_accepted_tokens > 0, "a gate without an accepted draft shows little"


@pytest.mark.by_turns
@pytest.mark.parametrize("max_num_batched_tokens", [33, 48, 97, 512])
def test_prefill_chunks(
    drafter_name: str, max_num_batched_tokens: int, reference: Reference
) -> None:
    batch = as_jobs("mixed", 16)
    core = make_core(
        **drafter_settings(drafter_name), max_num_batched_tokens=max_num_batched_tokens
    )
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.by_turns
@pytest.mark.parametrize("num_drafts", [1, 2, 7, 15])
def test_number_of_drafts(drafter_name: str, num_drafts: int, reference: Reference) -> None:
    batch = as_jobs("mixed", 8)
    settings = drafter_settings(drafter_name, num_drafts) | {"adaptive_speculation": False}
    assert texts(run(make_core(**settings), batch)) == texts(reference(batch))


@pytest.mark.parametrize("name", SELECTORS)
def test_selector_heads(name: str, reference: Reference) -> None:
    """Prompts in chunks, then prefix hits, greedy and sampled requests side by side."""
    batch = as_jobs("mixed", 8)
    settings = drafter_settings(name, 7) | {"adaptive_speculation": False}
    core = make_core(**settings, max_num_seqs=5, max_num_batched_tokens=64)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "name",
    [
        name if name in WIDEST_TREES else pytest.param(name, marks=pytest.mark.full)
        for name in TREES
    ],
)
def test_widest_trees(name: str, reference: Reference) -> None:
    """Drafting may write many more entries than there are drafts, in every slot."""
    batch = as_jobs("mixed", 16)
    settings = drafter_settings(name, 8) | {"draft_top_k": 10, "adaptive_speculation": False}
    assert texts(run(make_core(**settings, max_num_seqs=16), batch)) == texts(reference(batch))


def test_prefix_hit_equals_miss(drafter_name: str, reference: Reference) -> None:
    batch = as_jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name))
    expected = texts(reference(batch))
    assert texts(run(core, batch)) == expected
    before = core.stats().prefix_cache_hits
    assert texts(run(core, batch)) == expected
    assert core.stats().prefix_cache_hits > before
    # Answers of the first round are prefixes of these prompts.
    longer = [
        dataclasses.replace(job, prompt=job.prompt + tuple(tokens[:20]))
        for job, (tokens, _) in zip(batch, expected, strict=True)
    ]
    assert texts(run(core, longer)) == texts(reference(longer))
    core.reset_prefix_cache()
    assert texts(run(core, batch)) == expected


@pytest.mark.by_turns
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("num_pages", [14, 24])
def test_preemption(drafter_name: str, num_pages: int, cache: bool, reference: Reference) -> None:
    """Far too few pages: requests are preempted and resume, some more than once."""
    batch = as_jobs("mixed", 16)
    settings = drafter_settings(drafter_name)
    core = make_core(
        **settings,
        kv_cache_memory=kv_memory(num_pages, **settings),
        max_model_len=200,
        enable_prefix_caching=cache,
    )
    assert texts(run(core, batch)) == texts(reference(batch))
    # With the larger number a drafter that is often right may be done before pages are short.
    assert core.stats().num_preemptions > 0 or num_pages > 14


def test_priorities(drafter_name: str, reference: Reference) -> None:
    batch = [dataclasses.replace(job, priority=-i) for i, job in enumerate(as_jobs("mixed", 16))]
    settings = drafter_settings(drafter_name)
    core = make_core(**settings, kv_cache_memory=kv_memory(20, **settings), max_model_len=200)
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.by_turns
@pytest.mark.parametrize("num_pages", [20, 100])
def test_places_taken(drafter_name: str, num_pages: int, reference: Reference) -> None:
    """Each newcomer takes a running sequence's place, which goes on later."""
    batch = [
        dataclasses.replace(job, priority=-i, arrives_at=2 * i)
        for i, job in enumerate(as_jobs("mixed", 12))
    ]
    settings = drafter_settings(drafter_name)
    core = make_core(
        **settings,
        kv_cache_memory=kv_memory(num_pages, **settings),
        max_model_len=200,
        max_num_seqs=3,
        scheduling_policy="priority",
    )
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_preemptions > 0


def test_cancellation(drafter_name: str, reference: Reference) -> None:
    """Half of the requests are called off on the way; the others do not notice."""
    batch = [
        dataclasses.replace(job, abort_after=(1 + i) if i % 2 else None)
        for i, job in enumerate(as_jobs("mixed", 16))
    ]
    results = run(make_core(**drafter_settings(drafter_name)), batch)
    for job, result, expected in zip(batch, results, reference(batch), strict=True):
        if result.finish_reason == "abort":
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
            assert job.abort_after is not None and len(result.token_ids) >= job.abort_after
        else:
            assert result.text == expected.text


@pytest.mark.by_turns
def test_requests_with_their_own_say(drafter_name: str, reference: Reference) -> None:
    """Some draft, some do not, some draft less."""
    choices = (
        SpeculativeOptions(),
        SpeculativeOptions(enabled=False),
        SpeculativeOptions(num_speculative_tokens=1),
        SpeculativeOptions(num_speculative_tokens=0),
    )
    batch = [
        dataclasses.replace(job, speculative=choices[i % 4])
        for i, job in enumerate(as_jobs("mixed", 16))
    ]
    assert texts(run(make_core(**drafter_settings(drafter_name)), batch)) == texts(reference(batch))


@pytest.mark.by_turns
@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads(drafter_name: str, num_threads: int, reference: Reference) -> None:
    batch = as_jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name), num_threads=num_threads)
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.by_turns
def test_context_limit(drafter_name: str, reference: Reference) -> None:
    """Drafts stop short of the limit; the request runs to it and is no error."""
    batch = [
        dataclasses.replace(
            job,
            sampling=msgspec.structs.replace(job.sampling, max_tokens=1000),
            prompt=(job.prompt * 20)[: 96 - i],
        )
        for i, job in enumerate(as_jobs("mixed", 8))
    ]
    limits = {"max_model_len": 100, "max_num_batched_tokens": 128}
    spec = run(make_core(**drafter_settings(drafter_name), **limits), batch)
    assert texts(spec) == texts(reference(batch, **limits))
    assert [len(one.token_ids) for one in spec] == [4 + i for i in range(8)]
    assert {one.finish_reason for one in spec} == {"length"}


@pytest.mark.by_turns
def test_bfloat16(drafter_name: str, reference: Reference) -> None:
    batch = as_jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name), dtype="bfloat16")
    assert texts(run(core, batch)) == texts(reference(batch, dtype="bfloat16"))
