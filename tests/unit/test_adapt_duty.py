"""Work beside a server: none of it between the steps of running requests, unless asked for."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from openspec import LLM, SamplingParams
from openspec.adapt.cycle import duty
from openspec.adapt.cycle.duty import BesideConfig, Duty
from openspec.adapt.cycle.server import Server
from openspec.adapt.replay import Replay
from openspec.adapt.target import answering_config
from openspec.config import config_from_settings
from openspec.settings.setting import Raw


class Clock:
    """Time that passes only while someone sleeps or works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.passes)

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_share_of_the_time_while_there_are_requests(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with requests until second 10, and pieces of 30 ms."""
    clock = Clock(monkeypatch)
    beside = Duty(share, lambda: int(clock.now < 110.0))
    worked = 0.0
    while clock.now < 110.0:
        beside()
        worked += 0.03 if clock.now < 110.0 else 0.0
        clock.passes(0.03)
    assert worked == pytest.approx(10.0 * share, rel=0.25)
    if share == 0.0:
        assert clock.now == pytest.approx(110.0 + duty.IDLE_S + 0.03, abs=0.02)
    begin = clock.now
    for _ in range(10):  # nobody is there
        beside()
        clock.passes(0.03)
    assert clock.now - begin < 0.3 + duty.IDLE_S


def test_steps_of_an_engine_are_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    beside = Duty(0.25, lambda: 1)
    begin = clock.now
    for _ in range(20):
        beside(8)  # as `EngineCore.on_launch`
        clock.passes(0.02)
    assert clock.now - begin == pytest.approx(20 * 0.02 / 0.25, rel=0.2)


def test_without_a_server_nobody_is_asked() -> None:
    asked = BesideConfig(duty=0.0).beside()
    asked()
    assert Server("http://127.0.0.1:9", None).num_requests() == 0  # nor where nobody answers


class Served:
    """A server in this process: its engine steps in a thread, and tells of every step."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.running, self.steps = llm, 0, list[str]()

    def serve(self, prompts: list[list[int]]) -> None:
        self.llm.engine.on_launch = lambda _: self.steps.append("served")
        params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
        self.llm.generate(prompts, params, use_tqdm=False)
        self.running = 0


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_replay_beside_running_requests(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At duty 0 no step of a replay begins between two steps of running requests."""
    monkeypatch.setattr(duty, "IDLE_S", 0.02)
    small: dict[str, Raw] = {"num_threads": 1, "max_num_seqs": 4, "max_model_len": 160}
    config = config_from_settings({**small, "max_num_batched_tokens": 20}).with_folders()
    with LLM(**small) as llm:
        served = Served(llm)
        with LLM(**dataclasses.asdict(answering_config(config))) as own:
            beside = Duty(share, lambda: served.running)

            def wait(_: int) -> None:
                beside()
                served.steps.append("replayed")

            replay = Replay(own, [0])
            own.engine.on_launch = wait
            served.running = 1
            thread = threading.Thread(target=served.serve, args=([[5, 6, 7, 8]] * 3,))
            thread.start()
            states = replay.texts([list(range(10, 90))])
            thread.join()
    assert states[0].shape[0] == 80 and served.steps.count("replayed") == 4
    first = served.steps.index("replayed")
    assert ("served" in served.steps[first:]) == (share > 0)
