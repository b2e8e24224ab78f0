"""`--scheduling-policy priority`: who comes first in the queue takes the place of who runs."""

from __future__ import annotations

import pytest

from openspec.messages import EngineRequest
from tests.unit.both_depths import both_depths
from tests.unit.fake_core import Seen, expected, make_core, make_request
from tests.unit.fake_runner import FakeRunner


def run_late(
    runner: FakeRunner, running: list[EngineRequest], late: EngineRequest, *, displaces: bool = True
) -> tuple[int, int]:
    """Steps from a late request's arrival to its first token, and preemptions; texts are right."""
    core = make_core(runner, displaces=displaces)
    seen: dict[str, Seen] = {}
    for request in running:
        core.add_request(request)
    step, started = 0, None
    while core.has_work:
        if step == 10:
            assert core.stats().num_running == len(running)
            core.add_request(late)
        for output in core.step():
            if output.request_id == late.request_id and started is None:
                started = step - 10
            seen.setdefault(output.request_id, Seen()).take(output)
        core.check_integrity()
        step += 1
    for request in [*running, late]:
        one = seen[request.request_id]
        assert (one.token_ids, one.finish_reason) == expected(request, runner.max_model_len)
    assert started is not None
    return started, core.stats().num_preemptions


def request(name: str, priority: int, num_prompt: int = 8, max_tokens: int = 100) -> EngineRequest:
    tokens = [(ord(name[-1]) + index) % 50 for index in range(num_prompt)]
    return make_request(name, tokens, priority=priority, max_tokens=max_tokens)


@both_depths
@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_pages": 64}], ids=["slots", "pages"])
def test_priority_takes_a_place(num_steps_ahead: int, scarce: dict[str, int]) -> None:
    sizes = {"num_pages": 256, "max_model_len": 200, "max_draft_tokens": 0, **scarce}
    late = request("late", -10, 100 if "num_pages" in scarce else 8, max_tokens=10)

    def run(priorities: tuple[int, int], displaces: bool) -> tuple[int, int]:
        running = [request(f"r{n}", one, 80) for n, one in enumerate(priorities)]
        runner = FakeRunner(num_steps_ahead=num_steps_ahead, **sizes)
        return run_late(runner, running, late, displaces=displaces)

    started, num_preemptions = run((0, 0), displaces=True)
    assert started <= 8 + 2 * num_steps_ahead and num_preemptions >= 1
    started, _ = run((0, 0), displaces=False)
    assert started > 10
    started, _ = run((-10, -10), displaces=True)
    assert started > 10, "arrival displaces nobody"


@both_depths
def test_only_who_must_steps_aside(num_steps_ahead: int) -> None:
    """Of the lower priorities the lowest; nobody where there is room, or where it would not do."""
    runner = FakeRunner(
        num_pages=256, max_num_seqs=3, max_model_len=200, num_steps_ahead=num_steps_ahead
    )
    running = [request("a", 1), request("b", 3), request("c", 2)]
    started, num_preemptions = run_late(runner, running, request("late", 0))
    assert started <= 2 + num_steps_ahead and num_preemptions == 1
    runner = FakeRunner(num_pages=256, max_model_len=200, num_steps_ahead=num_steps_ahead)
    started, num_preemptions = run_late(runner, running, request("late", 0))
    assert started <= 2 + num_steps_ahead and num_preemptions == 0
    runner = FakeRunner(
        num_pages=48, max_model_len=200, max_draft_tokens=0, num_steps_ahead=num_steps_ahead
    )
    first, low = request("first", -1, 80, max_tokens=30), request("low", 5, 8, max_tokens=40)
    _, num_preemptions = run_late(runner, [first, low], request("late", 0, 120, max_tokens=5))
    assert num_preemptions == 0, "the pages of `low` would not have been enough"
