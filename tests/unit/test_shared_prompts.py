"""A prompt that several sequences share is computed and stored once."""

from __future__ import annotations

import msgspec
import pytest

from openspec.engine.core.engine_core import EngineCore
from openspec.messages import EngineRequest
from tests.unit.both_depths import both_depths
from tests.unit.fake_core import Seen, expected, make_core, make_request, run
from tests.unit.fake_runner import VOCAB, FakeRunner

PAGE = 4
SYSTEM = [index * index % VOCAB for index in range(42)]
"""Ten full pages and half of one."""


def make_runner(num_steps_ahead: int = 0, **sizes: int) -> FakeRunner:
    settings = {"num_pages": 256, "max_model_len": 128, "max_num_batched_tokens": 16, **sizes}
    return FakeRunner(page_size=PAGE, num_steps_ahead=num_steps_ahead, **settings)


def check(seen: dict[str, Seen], requests: list[EngineRequest]) -> None:
    for request in requests:
        one = seen[request.request_id]
        assert (one.token_ids, one.finish_reason) == expected(request, 128)


def most_pages(core: EngineCore, requests: list[EngineRequest]) -> int:
    """Pages held at a time while these run, at most."""
    most = 0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, core.stats().num_pages - core.stats().num_free_pages)

    check(run(core, requests, look), requests)
    return most


@both_depths
def test_completions_of_one_prompt(num_steps_ahead: int) -> None:
    core = make_core(make_runner(num_steps_ahead))
    seen = run(core, [make_request("r", SYSTEM, n=8, max_tokens=5)])
    for index in range(8):
        alone = make_request(f"r-{index}", SYSTEM, seed=7 + index, max_tokens=5)
        one = seen[f"r-{index}"]
        assert (one.token_ids, one.finish_reason) == expected(alone, 128)
    stats = core.stats()
    assert stats.num_prompt_tokens == 42 + 7 * 2
    assert stats.num_served_prompt_tokens == stats.prefix_cache_queries == 8 * 42
    assert stats.prefix_cache_hits == 7 * 40


@both_depths
@pytest.mark.parametrize("length", [3, 9, 42])
def test_requests_with_a_common_beginning(num_steps_ahead: int, length: int) -> None:
    runner = make_runner(num_steps_ahead, max_draft_tokens=0)
    requests = [
        make_request(f"r{index}", [*SYSTEM[:length], *[index] * 5], max_tokens=2)
        for index in range(8)
    ]
    core = make_core(runner)
    held = most_pages(core, requests)
    num_shared = length // PAGE
    num_private = length + 5 - num_shared * PAGE
    assert core.stats().num_prompt_tokens == num_shared * PAGE + 8 * num_private
    assert held <= num_shared + 8 * -(-(num_private + 2) // PAGE)


@both_depths
def test_beginnings_within_beginnings(num_steps_ahead: int) -> None:
    """Each wave waits for what it shares with the one before, and for no more."""
    trunk, branch = SYSTEM[:20], [9] * 20
    prompts = [
        [*trunk, *[1] * 30],
        [*trunk, *branch, 1],
        [*trunk, *branch, 2],
        [*trunk, *branch[:10], 3],
        [4] * 10,
    ]
    core = make_core(make_runner(num_steps_ahead))
    requests = [make_request(f"r{i}", prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
    check(run(core, requests), requests)
    assert core.stats().num_prompt_tokens == 50 + 21 + 1 + 3 + 10


@both_depths
@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_the_leader_leaves(num_steps_ahead: int, end: str) -> None:
    """What it has computed stays, the next one goes on from there, and nobody starves."""
    runner = make_runner(num_steps_ahead)
    core = make_core(runner)
    requests = [make_request(f"r{i}", [*SYSTEM, i], max_tokens=3) for i in range(4)]

    def leave(step: int) -> None:
        if step != 2:
            return
        assert core.stats().num_running == 1
        if end == "abort":
            core.abort("r0")
        elif end == "preempt":
            core._scheduler._queue.preempt(core._scheduler._queue.running[0])
        else:
            num_left = 2  # the step, and the same step again

            def hook(stage: str) -> None:
                nonlocal num_left
                if stage == "propose" and num_left > 0:
                    num_left -= 1
                    raise RuntimeError("injected")

            runner.hook = hook

    seen = run(core, requests, leave)
    assert seen["r0"].finish_reason == {"abort": "abort", "fail": "error"}.get(end, "length")
    check(seen, requests if end == "preempt" else requests[1:])
    # Of the leader's rows those are lost that were not in full pages yet, or in flight.
    assert core.stats().num_prompt_tokens <= 43 + 3 * 3 + 16


@both_depths
def test_a_leader_of_lower_rank_steps_aside(num_steps_ahead: int) -> None:
    core = make_core(make_runner(num_steps_ahead))
    late = make_request("late", [*SYSTEM, 1], priority=1, max_tokens=3)
    first = make_request("first", [*SYSTEM, 2], max_tokens=3)
    order: list[str] = []
    core.add_request(late)
    core.step()
    core.add_request(first)
    while core.has_work:
        order += [output.request_id for output in core.step() if output.finish_reason]
    assert order == ["first", "late"]
    assert core.stats().num_prompt_tokens <= 43 + 3 + 16 * num_steps_ahead
    assert core.stats().prefix_cache_queries == 2 * 43, "once each, whoever stepped aside"


@both_depths
def test_who_shares_nothing_waits_for_nobody(num_steps_ahead: int) -> None:
    """Other salts, log-probabilities of the prompt, no cache."""
    plain = [make_request(f"r{i}", SYSTEM, max_tokens=20) for i in range(2)]
    scored = [make_request(f"r{i}", SYSTEM, prompt_logprobs=0, max_tokens=20) for i in range(2)]
    salted = [msgspec.structs.replace(request, cache_salt=request.request_id) for request in plain]
    for requests, caches in ((salted, True), (scored, True), (plain, False)):
        runner = make_runner(num_steps_ahead, max_num_batched_tokens=100)
        runner.enable_prefix_caching = caches
        core = make_core(runner)
        for request in requests:
            core.add_request(request)
        core.step()
        assert core.stats().num_running == 2
        run(core, [])
        assert core.stats().num_prompt_tokens == 2 * 42


@both_depths
def test_counters_count_a_prompt_once(num_steps_ahead: int) -> None:
    """Few pages: prompts are turned away again and again, and preempted."""
    runner = make_runner(num_steps_ahead, num_pages=24, max_draft_tokens=0)
    core = make_core(runner)
    requests = [make_request(f"r{i}", [i] * 20, max_tokens=40, ignore_eos=True) for i in range(8)]
    check(run(core, requests), requests)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 * 20, 0)
    assert stats.num_served_prompt_tokens == 8 * 20 < stats.num_prompt_tokens
