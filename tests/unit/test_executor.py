from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from openspec.engine.core import executor
from openspec.engine.core.request import Span
from openspec.errors import EngineError, OutOfPages
from tests.unit.both_depths import both_depths
from tests.unit.fake_core import expected, make_core, make_request, run
from tests.unit.fake_runner import FakeParams, FakeRunner

if TYPE_CHECKING:
    from openspec._C import SpanResult

STAGES = ("reserve", "propose", "layout", "score", "choose", "accept", "commit")


def step(runner: FakeRunner, *spans: Span) -> Sequence[SpanResult]:
    lease = executor.launch(runner, spans)
    try:
        return executor.finish(lease)
    except BaseException:
        lease.close()
        raise


@pytest.mark.parametrize("stage", STAGES)
@both_depths
def test_a_failed_step_changes_nothing(stage: str, num_steps_ahead: int) -> None:
    runner = FakeRunner(max_num_batched_tokens=64, num_steps_ahead=num_steps_ahead)
    slot = runner.add_sequence(list(range(30)), 30, FakeParams(max_draft_tokens=3))

    def fail(at: str) -> None:
        if at == stage:
            raise KeyboardInterrupt

    runner.hook = fail
    num_free = runner.num_free_pages
    with pytest.raises(KeyboardInterrupt):
        step(runner, (slot, 30, 3))
    assert runner.num_free_pages == num_free
    assert runner.kv_len(slot) == 0 and len(runner.token_ids(slot)) == 30
    runner.check_integrity()
    runner.hook = lambda at: None
    results = step(runner, (slot, 30, 3))
    assert results[0].token_ids
    runner.check_integrity()


def test_out_of_pages() -> None:
    runner = FakeRunner(num_pages=2)
    slot = runner.add_sequence(list(range(12)), 12, FakeParams())
    with pytest.raises(OutOfPages):
        executor.launch(runner, [(slot, 12, 0)])
    assert runner.num_free_pages == 2


@pytest.mark.parametrize("stage", STAGES)
@both_depths
def test_one_failure_costs_only_the_drafts(stage: str, num_steps_ahead: int) -> None:
    runner = FakeRunner(num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    failed = False

    def fail_once(at: str) -> None:
        nonlocal failed
        if at == stage and runner.stats.num_steps == 2 and not failed:
            failed = True
            raise RuntimeError("injected")

    runner.hook = fail_once
    requests = [make_request(f"r{i}", [i, i]) for i in range(4)]
    seen = run(core, requests)
    for request in requests:
        one = seen[request.request_id]
        assert (one.token_ids, one.finish_reason) == expected(request, 64)
    assert core.stats().num_step_failures == 1


@both_depths
def test_two_failures_end_the_requests_of_the_step(
    caplog: pytest.LogCaptureFixture, num_steps_ahead: int
) -> None:
    runner = FakeRunner(max_num_seqs=2, num_steps_ahead=num_steps_ahead)
    core = make_core(runner, max_num_seqs=2)
    num_failures = 0

    def fail_twice(at: str) -> None:
        nonlocal num_failures
        if at == "score" and runner.stats.num_steps == 3 and num_failures < 2:
            num_failures += 1
            raise RuntimeError("injected")

    runner.hook = fail_twice
    requests = [make_request(f"r{i}", [i, i], max_tokens=30) for i in range(4)]
    with caplog.at_level(logging.ERROR):
        seen = run(core, requests)
    for name in ("r0", "r1"):
        assert seen[name].finish_reason == "error"
        assert seen[name].last is not None
        assert seen[name].last.error == "the step failed: RuntimeError: injected"  # type: ignore
    for request in requests[2:]:
        assert seen[request.request_id].token_ids == expected(request, 64)[0]
    assert core.stats().num_step_failures == 2
    assert len(caplog.records) == 1, "logged once per kind"
    assert runner.num_free_pages == runner.num_pages


@both_depths
@pytest.mark.parametrize("most_failures", [1, 2])
def test_out_of_pages_preempts_and_plans_anew(num_steps_ahead: int, most_failures: int) -> None:
    runner = FakeRunner(num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    num_failures = 0

    def fail(at: str) -> None:
        nonlocal num_failures
        if at == "reserve" and runner.stats.num_steps == 3 and num_failures < most_failures:
            num_failures += 1
            raise OutOfPages("somebody else took them")

    runner.hook = fail
    requests = [make_request(f"r{i}", [i, i]) for i in range(3)]
    seen = run(core, requests)
    assert core.stats().num_preemptions == most_failures
    assert core.stats().num_step_failures == 0
    for request in requests:
        assert seen[request.request_id].token_ids == expected(request, 64)[0]


def test_a_broken_invariant_ends_the_engine() -> None:
    runner = FakeRunner()
    core = make_core(runner)
    core.add_request(make_request())
    core.step()

    def fail(at: str) -> None:
        raise RuntimeError("injected")

    def broken() -> None:
        raise EngineError("page 1 is in 2 places")

    runner.hook = fail
    runner.check_integrity = broken  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="page 1"):
        core.step()


@both_depths
def test_a_failing_drafter_is_reported_once(
    caplog: pytest.LogCaptureFixture, num_steps_ahead: int
) -> None:
    runner = FakeRunner(max_model_len=1024, num_pages=512, num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    runner.stats.num_drafter_failures = 3
    runner.stats.last_drafter_failure = "out of ideas"
    with caplog.at_level(logging.ERROR):
        run(core, [make_request(max_tokens=900)])
    assert [message for message in caplog.messages if "out of ideas" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert core.stats().num_drafter_failures == 3
