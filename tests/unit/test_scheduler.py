from __future__ import annotations

import pytest

from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.request import Request
from openspec.engine.core.scheduler import Scheduler
from openspec.errors import EngineError, RequestError
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions
from tests.unit.both_depths import both_depths
from tests.unit.fake_core import expected, make_core, make_request, run, runner_config
from tests.unit.fake_runner import (
    VOCAB,
    FakeRunner,
    FakeSpanResult,
    logprobs_of,
)


@both_depths
def test_one_request(num_steps_ahead: int) -> None:
    core = make_core(FakeRunner(num_steps_ahead=num_steps_ahead))
    request = make_request(max_tokens=20)
    seen = run(core, [request])["r"]
    assert (seen.token_ids, seen.finish_reason) == expected(request, 64)
    assert seen.last is not None and seen.last.spec_decode is not None
    stats = seen.last.spec_decode
    assert stats.num_accepted_tokens + stats.num_steps == 20
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens > 0
    assert core.stats().num_generation_tokens == 20
    assert core.stats().num_free_pages == core.stats().num_pages


@both_depths
def test_prompt_in_chunks_beside_decodes(num_steps_ahead: int) -> None:
    runner = FakeRunner(max_num_batched_tokens=16, num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    spans: list[list[tuple[int, int, int]]] = []
    reserve = runner.reserve
    runner.reserve = lambda given: (spans.append(list(given)), reserve(given))[1]  # type: ignore
    short = make_request("short", [5], max_tokens=30)
    long = make_request("long", list(range(40)), max_tokens=5)
    seen = run(core, [short, long])
    for request in (short, long):
        assert (seen[request.request_id].token_ids, "length") == expected(request, 64)
    mixed = [plan for plan in spans if len(plan) == 2]
    assert len(mixed) >= 3, "decode goes on while the prompt is computed"
    chunks = [new for plan in mixed for _, new, _ in plan if new > 1]
    assert all(new % runner.page_size == 0 for new in chunks[:-1])
    assert chunks[0] == 12, "both are prompts"
    assert max(chunks[1:]) == 8, "half of a step, as someone decodes"


def test_refuses_what_can_never_run() -> None:
    core = make_core(FakeRunner(num_pages=8))
    for prompt, message in (
        ([], "empty"),
        ([1] * 64, "64 tokens.*maximum is 63"),
        ([VOCAB], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([1] * 30, r"30 prompt tokens and up to 16 more need 12 KV pages of 4 tokens; there are 8"),
    ):
        with pytest.raises(RequestError, match=message):
            core.add_request(
                EngineRequest(
                    request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(seed=1)
                )
            )
    core.add_request(make_request())
    with pytest.raises(RequestError, match="in use"):
        core.add_request(make_request())


def test_refuses_limits_that_leave_no_first_token() -> None:
    core = make_core(FakeRunner())
    limits = {"allowed_token_ids": [4], "stop_token_ids": [4, 5], "max_tokens": 5}
    for more, message, param in (
        ({"min_tokens": 3}, "only tokens that end the answer.*set min_tokens to 0", "min_tokens"),
        ({"bad_word_ids": [[9], [4]]}, "bad_words forbids every token", "bad_words"),
        (
            {"allowed_token_ids": [4, 6], "min_tokens": 1, "bad_word_ids": [[6]]},
            "bad_words forbids every token",
            "bad_words",
        ),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            core.add_request(make_request(**{**limits, **more}))  # type: ignore[arg-type]
        assert caught.value.param == param
    core.add_request(make_request(**limits))  # type: ignore[arg-type]
    core.add_request(make_request("b", **limits, bad_word_ids=[[9, 4]]))  # type: ignore[arg-type]


@both_depths
@pytest.mark.parametrize("num_kept", [0, 1, 4, 7])
def test_an_answer_ends_where_nothing_is_left_to_say(num_steps_ahead: int, num_kept: int) -> None:
    """The core then chooses a token that is not allowed: neither it nor later ones count."""
    whole = make_request(max_tokens=12, logprobs=0)
    tokens, _ = expected(whole, 64)
    assert tokens[num_kept] not in tokens[:num_kept]
    core = make_core(FakeRunner(num_steps_ahead=num_steps_ahead))
    request = make_request(
        max_tokens=12, logprobs=0, allowed_token_ids=sorted({*tokens[:num_kept], VOCAB - 1})
    )
    seen = run(core, [request])["r"]
    assert (seen.token_ids, seen.finish_reason) == (tokens[:num_kept], "error")
    assert len(seen.logprobs) == num_kept
    assert seen.last is not None and seen.last.is_refused
    assert "leave no token that may follow" in (seen.last.error or "")


@both_depths
def test_max_tokens_is_clamped_to_the_model(num_steps_ahead: int) -> None:
    request = make_request(prompt=[1] * 60, max_tokens=1000)
    seen = run(make_core(FakeRunner(num_steps_ahead=num_steps_ahead)), [request])["r"]
    assert len(seen.token_ids) == 4 and seen.finish_reason == "length"


@both_depths
def test_no_output_wanted(num_steps_ahead: int) -> None:
    core = make_core(FakeRunner(num_steps_ahead=num_steps_ahead))
    seen = run(core, [make_request(max_tokens=0)])["r"]
    assert seen.token_ids == [] and seen.finish_reason == "length"
    assert core.stats().num_steps == 0
    prompt = list(range(1, 30))
    seen = run(core, [make_request(prompt=prompt, max_tokens=0, prompt_logprobs=2)])["r"]
    assert seen.token_ids == [] and seen.finish_reason == "length"
    assert seen.prompt_logprobs == [
        logprobs_of(prompt[:i], prompt[i], 2)[1][0] for i in range(1, 29)
    ]


@both_depths
def test_request_limits_drafts(num_steps_ahead: int) -> None:
    runner = FakeRunner(num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    off = make_request("off", speculative=SpeculativeOptions(enabled=False))
    one = make_request("one", speculative=SpeculativeOptions(num_speculative_tokens=1))
    seen = run(core, [off, one])
    off_stats, one_stats = (seen[name].last.spec_decode for name in ("off", "one"))  # type: ignore
    assert off_stats.num_drafts == 0 and off_stats.num_steps == 16
    assert one_stats.num_draft_tokens == one_stats.num_drafts > 0
    assert seen["off"].token_ids == seen["one"].token_ids


@both_depths
def test_a_request_that_the_device_does_not_take_ends_alone(num_steps_ahead: int) -> None:
    class Full(FakeRunner):
        def add(self, request: Request) -> int:
            if request.token_ids[0] == 7:
                raise RuntimeError("out of memory")
            return super().add(request)

    runner = Full(num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    requests = [make_request("a"), make_request("b", [7, 1]), make_request("c", [2, 3])]
    seen = run(core, requests)
    assert core.stats().num_admission_failures == 1
    assert seen["b"].finish_reason == "error" and not seen["b"].token_ids
    assert seen["b"].last is not None and "out of memory" in (seen["b"].last.error or "")
    for request in (requests[0], requests[2]):
        tokens, reason = expected(request, runner.max_model_len)
        assert (seen[request.request_id].token_ids, seen[request.request_id].finish_reason) == (
            tokens,
            reason,
        )


@both_depths
def test_books_are_checked_where_nothing_is_under_way(num_steps_ahead: int) -> None:
    class Full(FakeRunner):
        is_strict = False

        def add(self, request: Request) -> int:
            if request.token_ids[0] == 7:
                self.is_strict = True
                raise RuntimeError("out of memory")
            return super().add(request)

        def check_integrity(self) -> None:
            # The core takes pages that a step under way holds for leaked.
            assert not (self.is_strict and self.open_leases)
            self.is_strict = False
            super().check_integrity()

    runner = Full(num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    request = make_request("a", max_tokens=30)

    def join(step: int) -> None:
        if step == 3:
            core.add_request(make_request("b", [7, 1]))

    seen = run(core, [request], join)
    assert seen["b"].finish_reason == "error"
    assert seen["a"].token_ids == expected(request, runner.max_model_len)[0]


@both_depths
def test_priority_overtakes_a_prompt_on_its_way(num_steps_ahead: int) -> None:
    runner = FakeRunner(max_num_batched_tokens=4, num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    long = make_request("long", list(range(40)), max_tokens=3)
    urgent = make_request("urgent", priority=-1, max_tokens=3)
    ends: list[str] = []
    core.add_request(long)
    core.step()
    core.add_request(urgent)
    while core.has_work:
        ends += [out.request_id for out in core.step() if out.token_ids]
    assert ends.index("urgent") < ends.index("long")
    assert core.stats().num_preemptions == 0


@both_depths
def test_priority_before_arrival(num_steps_ahead: int) -> None:
    core = make_core(FakeRunner(max_num_seqs=1, num_steps_ahead=num_steps_ahead), max_num_seqs=1)
    order: list[str] = []
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        core.add_request(make_request(name, priority=priority, max_tokens=3))
    while core.has_work:
        order += [out.request_id for out in core.step() if out.finish_reason]
    assert order == ["d", "b", "a", "c"]


@both_depths
def test_preemption_takes_the_lowest_rank(num_steps_ahead: int) -> None:
    runner = FakeRunner(num_pages=12, enable_prefix_caching=False, num_steps_ahead=num_steps_ahead)
    core = make_core(runner)
    requests = [
        make_request("first", [1] * 8, max_tokens=30),
        make_request("urgent", [2] * 8, priority=-1, max_tokens=30),
        make_request("late", [3] * 8, max_tokens=30),
    ]
    done: list[str] = []
    for request in requests:
        core.add_request(request)
    texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while core.has_work:
        for output in core.step():
            texts[output.request_id] += output.token_ids
            if output.finish_reason:
                done.append(output.request_id)
        core.check_integrity()
    assert core.stats().num_preemptions > 0
    assert done == ["urgent", "first", "late"]
    for request in requests:
        assert texts[request.request_id] == expected(request, 64)[0]


@both_depths
def test_a_prompt_of_higher_rank_takes_the_pages_it_was_promised(num_steps_ahead: int) -> None:
    runner = FakeRunner(
        num_steps_ahead=num_steps_ahead,
        num_pages=14,
        max_num_seqs=2,
        max_num_batched_tokens=6,
        max_draft_tokens=0,
        enable_prefix_caching=False,
    )
    core = make_core(runner, max_num_seqs=2)
    growing = make_request("growing", [1] * 4, priority=1, max_tokens=50)
    urgent = make_request("urgent", [2] * 40, max_tokens=12)
    core.add_request(growing)
    core.step()
    seen = run(core, [urgent])
    assert core.stats().num_preemptions == 1
    assert seen["urgent"].token_ids == expected(urgent, 64)[0]
    assert list(seen) == ["urgent", "growing"] and seen["growing"].finish_reason == "length"


@both_depths
def test_a_newcomer_of_higher_rank_preempts_nobody_of_the_same_step(num_steps_ahead: int) -> None:
    runner = FakeRunner(
        num_steps_ahead=num_steps_ahead,
        num_pages=16,
        max_num_batched_tokens=64,
        max_draft_tokens=0,
        enable_prefix_caching=False,
    )
    core = make_core(runner)
    # At their first decode each of these needs a page, which together are all that are left.
    requests = [make_request(f"late-{i}", [i] * 12, priority=1, max_tokens=4) for i in range(4)]
    urgent = make_request("urgent", [9])
    seen = run(
        core, requests, before_step=lambda step: core.add_request(urgent) if step == 1 else None
    )
    assert core.stats().num_step_failures == 0
    for request in (*requests, urgent):
        one = seen[request.request_id]
        assert (one.token_ids, one.finish_reason) == expected(request, 64)


@both_depths
def test_a_newcomer_whose_prefix_is_cached_takes_no_page_of_the_same_step(
    num_steps_ahead: int,
) -> None:
    cached = list(range(6))
    for num_free in range(16, 30):
        runner = FakeRunner(
            num_pages=64,
            page_size=1,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_draft_tokens=0,
            num_steps_ahead=num_steps_ahead,
        )
        core = make_core(runner, max_num_seqs=16)
        run(core, [make_request("before", cached, max_tokens=1)])
        # Each of these needs a page a step. Free pages are those of the cached prefix, too, until
        # the newcomer is given them.
        requests = [make_request(f"r{i}", [i, i], max_tokens=4) for i in range(12)]
        newcomer = make_request("newcomer", [*cached, 9], max_tokens=4)
        waiting = [newcomer]

        def add(
            _step: int,
            core: EngineCore = core,
            waiting: list[EngineRequest] = waiting,
            num_free: int = num_free,
        ) -> None:
            if waiting and core.stats().num_free_pages <= num_free:
                core.add_request(waiting.pop())

        seen = run(core, requests, before_step=add)
        assert not waiting
        assert runner.num_dry_steps == 0
        for request in (*requests, newcomer):
            assert seen[request.request_id].token_ids == expected(request, 64)[0]


@both_depths
def test_drafts_shrink_before_anyone_is_preempted(num_steps_ahead: int) -> None:
    runner = FakeRunner(
        num_pages=10, page_size=4, enable_prefix_caching=False, num_steps_ahead=num_steps_ahead
    )
    core = make_core(runner)
    # Each needs 5 pages in the end: both fit if no page is spent on drafts.
    requests = [make_request(name, [i] * 4, max_tokens=16) for i, name in enumerate("ab")]
    seen = run(core, requests)
    assert core.stats().num_preemptions == 0
    assert all(seen[r.request_id].token_ids == expected(r, 64)[0] for r in requests)


@both_depths
def test_abort_within_a_step(num_steps_ahead: int) -> None:
    runner = FakeRunner(max_num_seqs=1, num_steps_ahead=num_steps_ahead)
    core = make_core(runner, max_num_seqs=1)
    core.add_request(make_request("running", max_tokens=50))
    core.add_request(make_request("waiting"))
    core.step()
    core.abort("running")
    core.abort("waiting")
    core.abort("unknown")
    outputs = core.step()
    assert sorted((out.request_id, out.finish_reason) for out in outputs) == [
        ("running", "abort"),
        ("waiting", "abort"),
    ]
    assert not core.has_work
    assert runner.num_free_pages == runner.num_pages and runner.num_free_slots == 1


@both_depths
def test_prefix_cache_and_prompt_logprobs(num_steps_ahead: int) -> None:
    core = make_core(FakeRunner(num_steps_ahead=num_steps_ahead))
    prompt = list(range(1, 21))
    first = run(core, [make_request("a", prompt)])["a"]
    again = run(core, [make_request("b", prompt)])["b"]
    assert first.token_ids == again.token_ids
    assert first.last is not None and first.last.num_cached_tokens == 0
    assert again.last is not None and again.last.num_cached_tokens == 16
    scored = run(core, [make_request("c", prompt, prompt_logprobs=0)])["c"]
    assert scored.last is not None and scored.last.num_cached_tokens == 0
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 19


def make_scheduler() -> Scheduler:
    config = runner_config(max_draft_tokens=3)
    return Scheduler(config, FakeRunner())


def test_a_chunk_of_a_prompt_chooses_no_token() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=[1] * 40), VOCAB)
    plan = scheduler.schedule()
    slot, num_rows, num_drafts = plan.spans[0]
    assert (num_rows, num_drafts) == (32, 0)
    with pytest.raises(EngineError, match=f"slot {slot} chose tokens before its prompt"):
        scheduler.update(plan, [FakeSpanResult(slot, token_ids=[1])])


def test_results_of_another_plan_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(), VOCAB)
    plan = scheduler.schedule()
    with pytest.raises(EngineError, match="0 results"):
        scheduler.update(plan, [])
    with pytest.raises(EngineError, match="was due"):
        scheduler.update(plan, [FakeSpanResult(slot=99, token_ids=[1])])


@both_depths
def test_no_starvation_under_load(num_steps_ahead: int) -> None:
    """A long prompt advances while a full batch decodes, and the batch decodes meanwhile."""
    runner = FakeRunner(
        num_pages=256, max_num_seqs=8, max_num_batched_tokens=16, num_steps_ahead=num_steps_ahead
    )
    core = make_core(runner)
    for i in range(7):
        core.add_request(make_request(f"d{i}", [i + 1], max_tokens=60))
    core.step()
    core.add_request(make_request("long", [9] * 50, max_tokens=2))
    steps_to_first = 0
    tokens = dict.fromkeys((f"d{i}" for i in range(7)), 0)
    while True:
        steps_to_first += 1
        outputs = core.step()
        for output in outputs:
            if output.request_id in tokens:
                tokens[output.request_id] += len(output.token_ids)
        if any(output.request_id == "long" for output in outputs):
            break
        assert steps_to_first < 30
    assert all(count >= min(steps_to_first - 1, 50) for count in tokens.values())
