"""Requests wait for their grammar while others run."""

from __future__ import annotations

import threading

import pytest

from openspec.errors import RequestError
from openspec.messages import EngineRequest, SamplingParams
from tests.unit.fake_core import make_core
from tests.unit.fake_runner import FakeRunner


def request(name: str, grammar: str = "", min_tokens: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=4, seed=0, min_tokens=min_tokens),
        grammar=grammar,
    )


def wait_for(event: threading.Event) -> None:
    assert event.wait(30)


def test_others_run_while_a_grammar_is_read() -> None:
    may_load = threading.Event()
    runner = FakeRunner()
    runner.on_load_grammar = lambda: wait_for(may_load)
    core = make_core(runner)
    core.grammars.set_vocabulary([b"a"], 1, [0])
    core.grammars.load_grammar("g", b"data")
    for name in ("waits", "is aborted"):
        core.add_request(request(name, "g"))
    core.add_request(request("runs"))
    core.abort("is aborted")
    ended = []
    for _ in range(50):
        ended += [one.request_id for one in core.step() if one.finish_reason]
    assert ended == ["is aborted", "runs"]
    assert core.has_work
    assert core.stats().num_waiting == 1
    may_load.set()
    while core.has_work:
        ended += [one.request_id for one in core.step() if one.finish_reason]
    assert ended == ["is aborted", "runs", "waits"]


def test_an_unknown_grammar_is_refused() -> None:
    core = make_core(FakeRunner())
    with pytest.raises(RequestError, match="grammar 'g' is not loaded"):
        core.add_request(request("r", "g"))
    assert not core.has_work


def test_a_sequence_sits_steps_out_while_its_mask_is_made() -> None:
    runner = FakeRunner()
    runner.looks_away = lambda: 3
    core = make_core(runner)
    core.grammars.set_vocabulary([b"a"], 1, [0])
    core.grammars.load_grammar("g", b"data")
    core.add_request(request("held", "g"))
    assert not any(core.step() for _ in range(20))
    assert core.has_work
    # Nothing to do is waited for, and not looked for all the time.
    assert runner.num_waits > 10
    core.add_request(request("runs"))
    ended = [one.request_id for _ in range(30) for one in core.step() if one.finish_reason]
    assert ended == ["runs"]
    runner.looks_away = lambda: 0
    while core.has_work:
        ended += [one.request_id for one in core.step() if one.finish_reason]
    assert ended == ["runs", "held"]
    core.check_integrity()


def test_grammars_that_cannot_be_loaded_end_their_requests_only() -> None:
    def fail() -> None:
        raise ValueError("not a compiled grammar")

    runner = FakeRunner()
    runner.on_load_grammar = fail
    core = make_core(runner)
    core.grammars.set_vocabulary([b"a"], 1, [0])
    core.grammars.load_grammar("g", b"data")
    for index in range(10):
        core.add_request(request(f"bad {index}", "g"))
    core.add_request(request("good"))
    seen = {}
    while core.has_work:
        seen |= {one.request_id: one for one in core.step() if one.finish_reason}
    assert seen.pop("good").finish_reason == "length"
    assert len(seen) == 10
    assert all(one.finish_reason == "error" for one in seen.values())
    assert all("not a compiled grammar" in (one.error or "") for one in seen.values())
    assert core.stats().num_admission_failures == 0


def test_min_tokens_beside_a_grammar_are_refused() -> None:
    core = make_core(FakeRunner())
    core.grammars.set_vocabulary([b"a"], 1, [0])
    core.grammars.load_grammar("g", b"data")
    with pytest.raises(RequestError, match="min_tokens cannot stand beside a grammar"):
        core.add_request(request("r", "g", min_tokens=2))
