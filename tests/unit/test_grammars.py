"""Requests wait for their grammar while others run."""

from __future__ import annotations

import threading

import pytest

from openspec.errors import RequestError
from openspec.messages import EngineRequest, SamplingParams
from tests.unit.fake_core import make_core
from tests.unit.fake_runner import FakeRunner


def request(name: str, grammar: str = "") -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=4, seed=0),
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
