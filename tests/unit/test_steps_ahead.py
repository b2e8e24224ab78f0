"""The host one step ahead of the device: what it plans without results, and what it then ignores.

That no schedule shows in the text is checked in test_schedules.py, for both depths.
"""

from __future__ import annotations

import pytest

from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.request import Request, Span, StepPlan
from openspec.engine.core.scheduler import Scheduler
from openspec.errors import OutOfPages
from openspec.messages import EngineOutput
from tests.unit.fake_core import Seen, expected, make_core, make_request, run, runner_config
from tests.unit.fake_runner import VOCAB, FakeLease, FakeRunner, FakeSpanResult

LAUNCH_STAGES = ("reserve", "propose", "layout")
FINISH_STAGES = ("score", "choose", "accept", "commit")


class Watched(FakeRunner):
    """Keeps the order of calls and the spans."""

    def __init__(self, **settings: int) -> None:
        super().__init__(**{"num_steps_ahead": 1, **settings})  # type: ignore[arg-type]
        self.calls: list[str] = []
        self.spans: list[list[Span]] = []

    def launch(self, lease: FakeLease) -> None:
        self.calls.append(f"launch {len(self.spans)}")
        self.spans.append(lease.spans)
        super().launch(lease)

    def collect(self, lease: FakeLease) -> list[FakeSpanResult]:
        index = next(i for i, spans in enumerate(self.spans) if spans is lease.spans)
        self.calls.append(f"collect {index}")
        return super().collect(lease)


def check_empty(core: EngineCore, runner: FakeRunner) -> None:
    core.check_integrity()
    assert not core.has_work and not runner.open_leases
    assert runner.num_free_pages == runner.num_pages
    assert runner.num_free_slots == 8


# ---- Planning ahead -----------------------------------------------------------------------------


def test_a_step_is_launched_before_the_one_before_it_is_collected() -> None:
    runner = Watched(max_draft_tokens=0)
    core = make_core(runner)
    core.add_request(make_request(max_tokens=3))
    seen = Seen()
    num_tokens = []
    while core.has_work:
        for output in core.step():
            seen.take(output)
        num_tokens.append(len(seen.token_ids))
    assert runner.calls[:3] == ["launch 0", "launch 1", "collect 0"]
    assert runner.calls[3:] == ["launch 2", "collect 1", "collect 2"]
    assert runner.spans == [[(7, 3, 0)], [(7, 1, 0)], [(7, 1, 0)]]
    assert num_tokens == [0, 1, 2, 3]
    check_empty(core, runner)


def test_nothing_is_launched_that_can_bring_nothing() -> None:
    runner = Watched()
    core = make_core(runner)
    run(core, [make_request("one", max_tokens=1), make_request("none", [4] * 6, max_tokens=0)])
    assert runner.calls == ["launch 0", "collect 0"]
    check_empty(core, runner)
    # Two tokens wanted, one in flight: the other comes without drafts.
    run(core, [make_request("two", max_tokens=2)])
    assert [spans[0][1:] for spans in runner.spans[1:]] in ([(3, 1), (1, 0)], [(3, 1)])
    check_empty(core, runner)


def test_drafts_stay_within_what_is_sure_to_be_left() -> None:
    runner = Watched(max_draft_tokens=6)
    core = make_core(runner)
    request = make_request(max_tokens=8)
    assert run(core, [request])["r"].token_ids == expected(request, 64)[0]
    # 8 wanted; one is sure to come from the first step: 7 left, the last of them a bonus.
    assert [spans[0][2] for spans in runner.spans[:2]] == [6, 6]
    assert all(spans[0][2] <= 6 - index for index, spans in enumerate(runner.spans[1:]))
    check_empty(core, runner)


def test_chunks_of_one_prompt_follow_each_other_in_flight() -> None:
    runner = Watched(max_num_batched_tokens=12, max_draft_tokens=0)
    core = make_core(runner)
    prompt = list(range(30))
    request = make_request(prompt=prompt, max_tokens=2, prompt_logprobs=0)
    core.add_request(request)
    core.step()
    assert core.stats().num_prompt_tokens == 0, "planned, not computed"
    core.step()
    assert core.stats().num_prompt_tokens == 12
    seen = run(core, [])["r"]
    assert runner.spans == [[(7, 12, 0)], [(7, 12, 0)], [(7, 6, 0)], [(7, 1, 0)]]
    assert runner.calls[:4] == ["launch 0", "launch 1", "collect 0", "launch 2"]
    assert core.stats().num_prompt_tokens == 30
    assert seen.token_ids == expected(request, 64)[0]
    assert seen.prompt_logprobs is not None and len(seen.prompt_logprobs) == 29
    check_empty(core, runner)


def test_a_sequence_that_ended_is_ignored_in_the_step_behind() -> None:
    runner = Watched(max_draft_tokens=0)
    core = make_core(runner)
    text = expected(make_request(max_tokens=9), 64)[0]
    request = make_request(max_tokens=9, stop_token_ids=[text[1]])
    seen = run(core, [request])["r"]
    assert (seen.token_ids, seen.finish_reason) == expected(request, 64)
    assert len(runner.spans) == len(seen.token_ids) + 1, "one step too many was in flight"
    assert core.stats().num_generation_tokens == len(seen.token_ids)
    check_empty(core, runner)


def test_short_of_pages_a_sequence_first_waits_for_its_own_step() -> None:
    """Drafts in flight may be rejected: their pages are no reason to preempt anyone."""
    runner = Watched(num_pages=7)
    core = make_core(runner)
    requests = [make_request(name, [i] * 4, max_tokens=12) for i, name in enumerate("ab")]
    seen = run(core, requests)
    assert all(seen[r.request_id].token_ids == expected(r, 64)[0] for r in requests)
    assert core.stats().num_preemptions == 0
    check_empty(core, runner)


def test_alone_in_a_pool_of_just_its_size() -> None:
    for num_drafts in range(7):
        runner = Watched(num_pages=5, max_draft_tokens=num_drafts)
        core = make_core(runner)
        request = make_request(prompt=[1] * 4, max_tokens=16)
        assert run(core, [request])["r"].token_ids == expected(request, 64)[0]
        assert core.stats().num_preemptions == 0
        check_empty(core, runner)


# ---- Leaving while in flight --------------------------------------------------------------------


def test_abort_in_flight() -> None:
    runner = Watched()
    core = make_core(runner)
    gone, stays = make_request("gone", max_tokens=50), make_request("stays", [5], max_tokens=20)
    outputs: list[list[EngineOutput]] = [[], []]  # before and after the abort
    core.add_request(gone)
    core.add_request(stays)
    outputs[0] += core.step() + core.step()
    assert runner.open_leases
    core.abort("gone")
    assert runner.num_free_slots == 7, "at once"
    # The same id and the same slot again, while the old one's step is in flight.
    again = make_request("gone", [6, 6], max_tokens=5)
    core.add_request(again)
    while core.has_work:
        outputs[1] += core.step()
    seen = {name: Seen() for name in ("stays", "gone", "again")}
    for output in outputs[0]:
        seen[output.request_id].take(output)
    for output in outputs[1]:
        is_again = output.request_id == "gone" and seen["gone"].finish_reason is not None
        seen["again" if is_again else output.request_id].take(output)
    assert seen["gone"].finish_reason == "abort"
    assert seen["gone"].token_ids == expected(gone, 64)[0][: len(seen["gone"].token_ids)]
    assert seen["again"].token_ids == expected(again, 64)[0]
    assert seen["stays"].token_ids == expected(stays, 64)[0]
    check_empty(core, runner)


def test_only_what_is_in_flight_is_work() -> None:
    runner = Watched()
    core = make_core(runner)
    core.add_request(make_request(max_tokens=50))
    core.step()
    core.abort("r")
    assert core.has_work
    assert [output.finish_reason for output in core.step()] == ["abort"]
    check_empty(core, runner)


class Table:
    """Slots without a runner, given out again at once."""

    num_pages = num_free_pages = 100
    num_free_slots = 1
    num_rows_ahead = num_base_pages = 0

    def num_pages_needed(self, slot: int, num_rows: int, /) -> int:
        return 1

    def kv_len(self, slot: int, /) -> int:
        return 0

    def wanted_end(self, slot: int, /) -> int:
        return 0

    def add(self, request: Request, /) -> int:
        self.num_free_slots -= 1
        return self.num_free_slots

    def remove_sequence(self, slot: int, /) -> None:
        self.num_free_slots += 1


def make_scheduler(table: Table, num_slots: int = 1) -> Scheduler:
    config = runner_config(max_draft_tokens=0)
    table.num_free_slots = num_slots
    return Scheduler(config, table)


def results(plan: StepPlan, *tokens: list[int]) -> list[FakeSpanResult]:
    return [FakeSpanResult(span[0], token) for span, token in zip(plan.spans, tokens, strict=True)]


def token_ids(outputs: list[EngineOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_results_of_an_earlier_stay_are_never_credited() -> None:
    """Whatever a runner says about a slot, it is not the request's that came there later."""
    scheduler = make_scheduler(Table(), num_slots=2)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2]), VOCAB)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.spans == [(1, 2, 0), (0, 2, 0)] and second.spans == [(1, 1, 0), (0, 1, 0)]
    assert token_ids(scheduler.update(first, results(first, [10], [11]))) == [[10], [11]]
    assert scheduler.preempt_last()  # "b", which waits with one token of output
    third = scheduler.schedule()
    assert third.spans == [(1, 1, 0), (0, 3, 0)], "the same slot, everything anew"
    assert token_ids(scheduler.update(second, results(second, [20], [21]))) == [[20]]
    assert token_ids(scheduler.update(third, results(third, [30], [31]))) == [[30], [31]]
    assert scheduler.stats.num_generation_tokens == 5
    # Waiting and finished requests are no better.
    fourth = scheduler.schedule()
    assert scheduler.preempt_last() and scheduler.abort("a") is not None
    assert scheduler.update(fourth, results(fourth, [40], [41])) == []
    assert scheduler.abort("b") is not None
    assert not scheduler.has_work


def test_the_first_in_rank_waits_for_pages_rather_than_give_up_its_own() -> None:
    """Those of a preempted sequence come back when its step in flight lands."""
    table = Table()
    scheduler = make_scheduler(table, num_slots=2)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2]), VOCAB)
    first = scheduler.schedule()
    scheduler.update(first, results(first, [10], [11]))
    table.num_free_pages = 0
    assert scheduler.schedule().spans == []
    assert (scheduler.stats.num_running, scheduler.stats.num_preemptions) == (1, 1)
    table.num_free_pages = 100
    assert scheduler.schedule().spans == [(1, 1, 0), (0, 3, 0)]


def test_given_up_steps_are_planned_anew() -> None:
    scheduler = make_scheduler(Table())
    scheduler.add(make_request("a", list(range(40)), max_tokens=5), VOCAB)
    plans = [scheduler.schedule() for _ in range(3)]
    assert [plan.spans for plan in plans] == [[(0, 32, 0)], [(0, 8, 0)], [(0, 1, 0)]]
    assert scheduler.update(plans[0], results(plans[0], [])) == []
    scheduler.fall_back()
    assert scheduler.schedule_again(plans[1]).spans == [(0, 8, 0)]
    assert scheduler.schedule().spans == [(0, 1, 0)]
    scheduler.fall_back()
    assert scheduler.schedule().spans == [(0, 8, 0)]
    scheduler.fall_back()
    scheduler.abort("a")
    assert scheduler.schedule_again(plans[1]).spans == []


# ---- Failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", LAUNCH_STAGES + FINISH_STAGES)
@pytest.mark.parametrize("num_times", [1, 2])
@pytest.mark.parametrize("num_steps", range(9))
def test_a_failure_with_two_steps_in_flight(stage: str, num_times: int, num_steps: int) -> None:
    """Prompts in chunks, a first token, plain decoding: whatever was in flight is there again."""
    runner = Watched(max_num_batched_tokens=16)
    core = make_core(runner)
    num_left = num_times

    def fail(at: str) -> None:
        nonlocal num_left
        if at == stage and runner.stats.num_steps == num_steps and num_left > 0:
            if num_left == num_times and num_steps > 0 and at in FINISH_STAGES:
                assert len(runner.open_leases) == 2
            num_left -= 1
            raise RuntimeError("injected")

    runner.hook = fail
    requests = [make_request("long", list(range(1, 41)), max_tokens=9, prompt_logprobs=1)]
    requests += [make_request(f"r{i}", [i, i], max_tokens=20) for i in range(3)]
    seen = run(core, requests)
    assert num_left == 0
    assert core.stats().num_step_failures == num_times
    for request in requests:
        one = seen[request.request_id]
        text, reason = expected(request, 64)
        if one.finish_reason == "error":
            assert num_times == 2
            assert one.token_ids == text[: len(one.token_ids)]
        else:
            assert (one.token_ids, one.finish_reason) == (text, reason)
    failed = [name for name, one in seen.items() if one.finish_reason == "error"]
    assert bool(failed) == (num_times == 2)
    assert len(seen["long"].prompt_logprobs or []) == (39 if seen["long"].token_ids else 0)
    check_empty(core, runner)


@pytest.mark.parametrize("num_steps", range(5))
def test_out_of_pages_with_a_step_in_flight(num_steps: int) -> None:
    runner = Watched()
    core = make_core(runner)
    num_failures = 0

    def fail(at: str) -> None:
        nonlocal num_failures
        if at == "reserve" and runner.stats.num_steps == num_steps and num_failures == 0:
            num_failures += 1
            raise OutOfPages("somebody else took them")

    runner.hook = fail
    requests = [make_request(f"r{i}", [i, i]) for i in range(3)]
    seen = run(core, requests)
    assert core.stats().num_preemptions == 1 and core.stats().num_step_failures == 0
    for request in requests:
        assert seen[request.request_id].token_ids == expected(request, 64)[0]
    check_empty(core, runner)


@pytest.mark.parametrize("stage", LAUNCH_STAGES + FINISH_STAGES)
def test_an_interrupt_loses_nothing(stage: str) -> None:
    runner = Watched(max_num_batched_tokens=16)
    core = make_core(runner)
    requests = [make_request("long", list(range(1, 41))), make_request("short")]
    seen = {request.request_id: Seen() for request in requests}
    for request in requests:
        core.add_request(request)
    num_interrupts = 0
    is_due = False

    def interrupt(at: str) -> None:
        nonlocal num_interrupts, is_due
        if at == stage and is_due:
            num_interrupts += 1
            is_due = False
            raise KeyboardInterrupt

    runner.hook = interrupt
    num_steps = 0
    while core.has_work:
        num_steps += 1
        is_due = num_steps % 3 == 0
        try:
            outputs = core.step()
        except KeyboardInterrupt:
            assert not runner.open_leases
            core.check_integrity()
            continue
        for output in outputs:
            seen[output.request_id].take(output)
    assert num_interrupts > 2
    for request in requests:
        assert seen[request.request_id].token_ids == expected(request, 64)[0]
    check_empty(core, runner)
