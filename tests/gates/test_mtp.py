"""The layer that came with a target which has a running state: its drafts change no text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from openspec.engine.core.engine_core import EngineCore
from openspec.errors import ConfigError
from openspec.messages import SpeculativeOptions
from tests.gates import harness, hybrid_target
from tests.gates.grammars import KINDS, grammar_core
from tests.gates.harness import Job, make_core, run, run_alone, texts
from tests.gates.test_hybrid import check_hits, going_on_from, tokens_of
from tests.gates.workload import jobs
from tests.heads import fitted

NUM_JOBS = 12
DTYPES = ("bfloat16",) if harness.DEVICE == "cuda" else ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(harness, "MODEL", str(hybrid_target.folder()))
    yield


def batch_of(kind: str = "mixed") -> list[Job]:
    return [dataclasses.replace(job) for job in jobs(kind, NUM_JOBS)]


@cache
def expected(dtype: str = DTYPES[0], kind: str = "mixed") -> list[tuple[list[int], str | None]]:
    """Texts of plain decoding, each job alone."""
    core = make_core(method="none", enable_prefix_caching=False, dtype=dtype)
    return texts(run_alone(core, batch_of(kind)))


@cache
def head() -> Path:
    """A head that is right about many of these texts."""
    known = [
        [*job.prompt, *tokens] for job, (tokens, _) in zip(batch_of(), expected(), strict=True)
    ]
    return fitted.folder(hybrid_target.folder(), known, is_hybrid=True)


def drafting(num_drafts: int = 3, **settings: Any) -> EngineCore:
    """An engine that always drafts."""
    return make_core(
        **{
            "method": "mtp",
            "draft_model": str(head()),
            "num_speculative_tokens": num_drafts,
            "adaptive_speculation": False,
            "dtype": DTYPES[0],
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("dtype", "num_drafts"),
    [
        *((dtype, 3) for dtype in DTYPES),
        pytest.param(DTYPES[0], 1, marks=pytest.mark.full),
        (DTYPES[0], 15),
    ],
)
def test_drafts_in_a_batch(dtype: str, num_drafts: int) -> None:
    """Accepted in part: over the edges of the recurrence's blocks of 16, at every place of them."""
    core = drafting(num_drafts, dtype=dtype)
    assert texts(run(core, batch_of())) == expected(dtype)
    stats = core.stats()
    assert 0.04 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_drafter_failures == 0


@pytest.mark.parametrize("num_rows", [33, 97])
def test_chunks_beside_others(num_rows: int) -> None:
    assert texts(run(drafting(max_num_batched_tokens=num_rows), batch_of())) == expected()


def test_requests_with_their_own_say() -> None:
    """Draft, no draft, draft."""
    choices = (SpeculativeOptions(), SpeculativeOptions(enabled=False))
    batch = [
        dataclasses.replace(job, speculative=choices[i % 2]) for i, job in enumerate(batch_of())
    ]
    assert texts(run(drafting(), batch)) == expected()


def test_steps_that_leave_it_out() -> None:
    """The step's times decide; its rows wait until it drafts again."""
    core = drafting(adaptive_speculation=True)
    assert texts(run(core, batch_of())) == expected()


def test_preemption() -> None:
    """Far too few pages, of which running states take some, and the head's entries others."""
    plan = drafting().info.memory_plan
    num_base_pages = (plan["sequence_bytes"] - plan["state_bytes"] // 16) // plan["page_bytes"]
    num_pages = 13 + 5 * num_base_pages
    core = drafting(kv_cache_memory=num_pages * plan["page_bytes"], max_model_len=200)
    assert texts(run(core, batch_of())) == expected()
    assert core.stats().num_preemptions > 0


def test_grammars() -> None:
    batch = [
        dataclasses.replace(job, grammar=KINDS[i % len(KINDS)]) for i, job in enumerate(batch_of())
    ]
    plain = texts(run_alone(grammar_core(method="none", enable_prefix_caching=False), batch))
    core = grammar_core(method="mtp", draft_model=str(head()), num_speculative_tokens=4)
    assert texts(run(core, batch)) == plain
    assert core.stats().num_forced_tokens > 0


def test_cancellation() -> None:
    batch = [
        dataclasses.replace(job, abort_after=(1 + i) if i % 2 else None)
        for i, job in enumerate(batch_of())
    ]
    for job, result, (token_ids, reason) in zip(
        batch, run(drafting(4), batch), expected(), strict=True
    ):
        is_aborted = result.finish_reason == "abort"
        assert is_aborted or result.text == (token_ids, reason)
        assert not is_aborted or result.token_ids == token_ids[: len(result.token_ids)]
        assert job.abort_after is not None or not is_aborted


@pytest.mark.parametrize("page_size", [pytest.param(16, marks=pytest.mark.full), 32])
def test_prefix_hits(page_size: int) -> None:
    """Of prompts and of answers; with drafts that are accepted as often as without a hit."""
    core = drafting(4, page_size=page_size)
    accepted = []
    for _ in range(2):
        before = core.stats()
        assert texts(run(core, batch_of())) == expected()
        accepted.append(core.stats().num_accepted_tokens - before.num_accepted_tokens)
        hits = core.stats().prefix_cache_hits - before.prefix_cache_hits
    assert hits > 0 and accepted[0] == accepted[1] > 0
    longer = [
        dataclasses.replace(job, prompt=job.prompt + tuple(tokens))
        for job, (tokens, _) in zip(batch_of(), expected(), strict=True)
    ]
    alone = make_core(method="none", enable_prefix_caching=False)
    before = core.stats()
    assert texts(run(core, longer)) == texts(run_alone(alone, longer))
    assert core.stats().prefix_cache_hits > before.prefix_cache_hits


def test_hits_around_a_snapshot() -> None:
    """Where they are without drafts, but for the last token: it runs again for what the layer
    reads of it."""
    batch = going_on_from(tokens_of(120), 112, 111)
    check_hits(drafting(), batch, [0, 111, 0])


def test_a_part_of_the_vocabulary_that_follows_the_texts() -> None:
    """Few of the tokens written are among the lowest ids: drafts get better as they are counted."""
    core = drafting(3, draft_vocab_size=512)
    accepted = []
    for _ in range(6):
        before = core.stats().num_accepted_tokens
        assert texts(run(core, batch_of())) == expected()
        accepted.append(core.stats().num_accepted_tokens - before)
    assert accepted[-1] > 1.2 * accepted[0]


def test_a_checkpoint_that_lost_the_layer(tmp_path: Path) -> None:
    """The message names what is missing and where to get it."""
    with pytest.raises(ConfigError, match=r"missing 15 of the 15 .*mtp\.fc\.weight.*--draft-model"):
        make_core(method="mtp", model=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ],
)
def test_other_heads(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(method="mtp", model=str(hybrid_target.folder(**changes)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab_size": 100}, "multiple of 16"),
        ({"num_speculative_tokens": 16}, r"\[0, 15\]"),
        ({"acceptance": "rejection", "draft_noise": False}, "draft_noise"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(method="mtp", **settings)


def test_the_layer_that_came_with_the_model() -> None:
    """Without --draft-model; other engines' names of the method."""
    for name in ("qwen3_5_mtp", "NEXTN"):
        core = make_core(
            method=name, num_speculative_tokens=2, adaptive_speculation=False, dtype=DTYPES[0]
        )
        assert texts(run(core, batch_of())) == expected()
        assert core.stats().num_draft_tokens > 0
