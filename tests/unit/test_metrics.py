from __future__ import annotations

import logging

import pytest

from openspec.engine.core.engine_core import StatsLog
from openspec.messages import (
    EngineStats,
    SpecDecodeStats,
    StepCounts,
    acceptance_per_position,
    acceptance_rate,
    add_counters,
    counters_since,
    mean_acceptance_length,
    record_step,
    total_stats,
)


def test_definitions() -> None:
    stats = SpecDecodeStats()
    assert acceptance_rate(stats) == 0.0 and mean_acceptance_length(stats) == 1.0
    record_step(stats, StepCounts(4, 4, 3, 4))
    record_step(stats, StepCounts(1, 2, 0, 2))
    assert acceptance_rate(stats) == 3 / 6
    assert mean_acceptance_length(stats) == 1 + 3 / 2
    assert stats.num_drafts_per_pos == [2, 2, 1, 1]
    assert acceptance_per_position(stats) == [0.5, 0.5, 1.0, 0.0]


def test_short_drafts_are_not_wrong_ones() -> None:
    """As with a budget that grants one token at most steps: all are right, so all shares are 1."""
    stats = SpecDecodeStats()
    for length in (1, 1, 1, 1, 3):
        record_step(stats, StepCounts(length + 1, length, length, length))
    assert acceptance_rate(stats) == 1.0
    assert acceptance_per_position(stats) == [1.0, 1.0, 1.0]
    shares = zip(acceptance_per_position(stats), stats.num_drafts_per_pos, strict=True)
    assert sum(share * count for share, count in shares) == stats.num_accepted_tokens


def test_an_accepted_end_has_no_token_after_it() -> None:
    stats = SpecDecodeStats()
    record_step(stats, StepCounts(4, 4, 3, 4))
    record_step(stats, StepCounts(4, 8, 4, 8))
    assert (stats.num_accepted_tokens, mean_acceptance_length(stats)) == (7, 4.0)


def test_a_tree_has_fewer_positions_than_drafts() -> None:
    stats = SpecDecodeStats()
    record_step(stats, StepCounts(3, 15, 2, 4))
    assert (stats.num_draft_tokens, stats.num_accepted_tokens_per_pos) == (15, [1, 1, 0, 0])
    assert stats.num_drafts_per_pos == [1, 1, 1, 1]
    record_step(stats, StepCounts(7, 15, 6, 4))  # a chain where trees were expected
    assert stats.num_accepted_tokens_per_pos == [2, 2, 1, 1, 1, 1]
    assert stats.num_drafts_per_pos == [2, 2, 2, 2, 1, 1]


def test_an_engine_in_the_place_of_another_counts_on() -> None:
    past = EngineStats(num_steps=3, exchange_rounds=[6, 6], exchange_wait_seconds=[0.5, 1.0])
    now = EngineStats(num_steps=1, exchange_rounds=[2, 2], exchange_wait_seconds=[0.25, 0.25])
    past.experts_of_drafts, now.experts_of_drafts = 0.9, 0.6
    total = total_stats([past, now])
    assert (total.experts_of_drafts, total.experts_of_sequences) == (0.6, 1.0)
    assert (total.num_steps, total.exchange_rounds) == (4, [8, 8])
    assert total.exchange_wait_seconds == [0.75, 1.25]
    assert total_stats([past, EngineStats()]).exchange_rounds == past.exchange_rounds == [6, 6]


def test_add_counters() -> None:
    total, one, two = SpecDecodeStats(), SpecDecodeStats(), SpecDecodeStats()
    record_step(one, StepCounts(2, 1, 1, 1))
    record_step(two, StepCounts(3, 3, 2, 3))
    add_counters(total, [one, two])
    assert total == SpecDecodeStats(
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=3,
        num_accepted_tokens_per_pos=[2, 1, 0],
        num_drafts_per_pos=[2, 1, 1],
    )
    since = counters_since(one, total)
    assert (since.num_accepted_tokens_per_pos, since.num_drafts_per_pos) == ([1, 1, 0], [1, 1, 1])


def test_stats_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    log = StatsLog(10.0)
    stats = EngineStats(num_generation_tokens=50, num_pages=10, num_free_pages=5)
    record_step(stats, StepCounts(3, 4, 2, 4))
    with caplog.at_level(logging.INFO):
        for _ in range(9):
            now += 1.0
            log.tick(lambda: stats)
        now += 1000.0  # idle
        assert not caplog.records
        log.tick(lambda: stats)
    assert caplog.messages == [
        "prompt 0.0 tok/s, generation 5.0 tok/s, running 0, waiting 0, KV pages 50.0%, "
        "prefix hits 0.0%, acceptance length 3.00, acceptance rate 50.0%"
    ]
    stats = EngineStats(num_expert_layers=20, num_distinct_experts=310, num_expert_rows=620)
    with caplog.at_level(logging.INFO):
        for _ in range(10):
            now += 1.0
            log.tick(lambda: stats)
    assert caplog.messages[-1].endswith(", 15.5 experts of a layer in a step, 2.0 rows each")
