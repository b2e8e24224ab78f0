"""Several engines behind one front: scripted ones, which die and restart at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

import httpx
import msgspec
import pytest

from openspec.config import EngineConfig
from openspec.engine.devices import Share
from openspec.engine.processes import replica
from openspec.engine.processes.child import EngineChild
from openspec.engine.processes.replicas import Replicas
from openspec.engine.processes.standby import Standby
from openspec.errors import ConfigError, EngineError
from openspec.messages import StepTime
from openspec.serve.config import ServeConfig
from openspec.serve.server import engines
from tests.serve.conftest import RunningServer
from tests.serve.sse import parse_events
from tests.serve.waiting import PATIENCE_S, wait_until

SLOW = {"step_s": 0.01}
LONG = {"max_tokens": 600, "ignore_eos": True}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.05)


def samples(server: RunningServer, name: str) -> dict[str, float]:
    """By engine."""
    found: dict[str, float] = {}
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            engine = line.partition('engine="')[2].partition('"')[0]
            found[engine] = found.get(engine, 0) + float(line.rpartition(" ")[2])
    return found


def in_threads(*functions: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def seen_by(server: RunningServer) -> list[int]:
    return [len(engine.requests) for engine in server.engines]


def test_one_engine_is_asked_directly(start_server) -> None:
    """The job reads the stream that the engine's client made: no layer between the two."""
    server = start_server(SLOW)
    given = []
    submit = server.engine.submit
    server.engine.submit = lambda *requests: given.append(submit(*requests)) or given[0]
    jobs = server.context.lifecycle._jobs
    threads = in_threads(lambda: server.complete(prompt="a", **LONG))
    wait_until(lambda: jobs)
    assert next(iter(jobs.values()))._stream is given[0]
    server.client.post("/abort_request", json={"abort_all": True})
    threads[0].join()


def test_requests_spread_and_everything_is_told_by_engine(start_server) -> None:
    server = start_server(SLOW, num_engines=3)
    prompts = [f"{name} {'x' * 40}" for name in "abcdefghi"]
    answer = server.complete(prompt=prompts, max_tokens=40)
    alone = start_server().complete(prompt=prompts, max_tokens=40)
    texts = [[choice["text"] for choice in one["choices"]] for one in (answer, alone)]
    assert texts[0] == texts[1] and answer["usage"] == alone["usage"]
    assert seen_by(server) == [3, 3, 3]
    assert samples(server, "vllm:request_success_total") == {"0": 3, "1": 3, "2": 3}
    assert samples(server, "vllm:time_to_first_token_seconds_count") == {"0": 3, "1": 3, "2": 3}
    tokens = samples(server, "vllm:generation_tokens_total")
    assert tokens == {"0": 120, "1": 120, "2": 120}
    assert samples(server, "openspec:engine_alive") == {"0": 1, "1": 1, "2": 1}
    info = server.client.get("/server_info").json()
    assert info["num_replicas"] == 3 and len(info["internal_states"]) == 3
    assert [one["engine"] for one in info["engines"]] == [0, 1, 2]
    assert sum(one["num_generation_tokens"] for one in info["engines"]) == 360
    assert info["max_running_requests"] == 3 * 16
    loads = server.client.get("/v1/loads").json()
    assert loads["dp_rank_count"] == 3 and [one["dp_rank"] for one in loads["loads"]] == [0, 1, 2]


def test_a_prefix_finds_its_engine_until_the_cache_is_flushed(start_server) -> None:
    server = start_server(num_engines=2)
    texts = [f"{name} {'the quick brown fox ' * 8}" for name in "ab"]
    for text in texts:
        server.complete(prompt=text, max_tokens=1)
    assert seen_by(server) == [1, 1]
    for _ in range(3):
        server.complete(prompt=texts[1] + "jumps", max_tokens=1)
    assert seen_by(server) == [1, 4]
    server.complete(prompt=texts[1], max_tokens=1, cache_salt="mine")
    assert seen_by(server) == [2, 4], "under another salt nothing is known"
    assert server.client.post("/flush_cache").status_code == 200
    assert [engine.num_resets for engine in server.engines] == [1, 1]
    server.complete(prompt=texts[1], max_tokens=1)
    assert seen_by(server) == [3, 4]


def test_a_request_may_name_its_engine(start_server) -> None:
    server = start_server(num_engines=2)
    body = {"prompt": ["a", "b"], "max_tokens": 1}

    def ask(rank: str) -> httpx.Response:
        headers = {"x-data-parallel-rank": rank}
        return server.client.post("/v1/completions", json=body, headers=headers)

    assert ask("1").status_code == ask("1").status_code == 200
    assert seen_by(server) == [0, 4]
    for rank in ("2", "-1", "", "one", "9" * 40):
        response = ask(rank)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "X-Data-Parallel-Rank")
        assert "0 to 1" in error["message"]
    server.call(server.engines[1].die)
    assert (ask("1").status_code, ask("1").json()["error"]["code"]) == (503, "engine_dead")
    assert ask("0").status_code == 200
    assert seen_by(server) == [2, 4]
    single = start_server()
    headers = {"x-data-parallel-rank": "0"}
    assert single.client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_aborts_reach_the_engine(start_server) -> None:
    server = start_server(SLOW, num_engines=2)
    threads = in_threads(lambda: server.complete(prompt=["a", "b"], request_id="mine", **LONG))
    wait_until(lambda: seen_by(server) == [1, 1])
    assert server.client.post("/abort_request", json={"request_id": "mine"}).json() == {
        "num_aborted": 1
    }
    threads[0].join()
    assert [len(engine.aborted) for engine in server.engines] == [1, 1]


def test_a_dead_engine_fails_its_own_requests_and_comes_back(
    start_server, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server(SLOW, num_engines=2, max_restarts=5)
    ends: list[dict] = []

    def run(number: int) -> None:
        body = {"prompt": f"{number} {'x' * 40}", **LONG, "stream": True}
        response = server.client.post("/v1/completions", json=body)
        # Before the first event it is a refusal, later the last event.
        is_stream = response.status_code == 200
        ends.append(parse_events(response.content)[-1] if is_stream else response.json())

    threads = in_threads(*(lambda number=number: run(number) for number in range(6)))
    wait_until(lambda: seen_by(server) == [3, 3])
    server.call(server.engines[1].die)
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200
    for thread in threads:
        thread.join()
    assert [one["error"]["type"] for one in ends if "error" in one] == ["server_error"] * 3
    reasons = [one["choices"][0]["finish_reason"] for one in ends if "choices" in one]
    assert reasons == ["length"] * 3
    assert samples(server, "openspec:request_success_total") == {"0": 3, "1": 3}
    wait_until(lambda: samples(server, "openspec:engine_restarts") == {"0": 0, "1": 1})
    wait_until(lambda: server.context.engine.num_accepting == 2)
    server.complete(prompt=["c", "d"], max_tokens=1)
    assert seen_by(server) == [4, 3, 1]
    assert "starting engine 1 again at once, 1 of 5 times within 10 minutes" in caplog.text
    server.call(server.engines[2].die)
    wait_until(lambda: server.context.engine.num_accepting == 2 and len(server.engines) == 4)
    assert "starting engine 1 again in 0.05 s, 2 of 5 times within 10 minutes" in caplog.text


def test_grammars_reach_the_engine_that_needs_them(start_server) -> None:
    server = start_server(num_engines=2, max_restarts=5)

    def loaded() -> list[int]:
        assert all(bool(engine.vocabulary) == bool(engine.grammars) for engine in server.engines)
        return [len(engine.grammars) for engine in server.engines]

    first = {"prompt": "a" * 40, "max_tokens": 1, "guided_choice": ["yes"]}
    server.complete(**first)
    server.complete(**{**first, "guided_choice": ["no"]})
    server.complete(**first)
    assert (seen_by(server), loaded()) == ([3, 0], [2, 0])
    server.complete(prompt=["c" * 40, "d" * 40], max_tokens=1, n=2, guided_choice=["no"])
    assert loaded() == [2, 1]
    server.call(server.engines[0].die)
    wait_until(lambda: server.context.engine.num_accepting == 2)
    assert loaded() == [2, 1, 0]
    server.complete(prompt=["e" * 40, "f" * 40], max_tokens=1, guided_choice=["yes"])
    assert loaded() == [2, 2, 1]
    server.call(lambda: server.context.engine.roll(30.0))
    wait_until(lambda: len(server.engines) == 5 and server.context.engine.num_accepting == 2)
    server.complete(prompt=["g" * 40, "h" * 40], max_tokens=1, guided_choice=["yes"])
    assert loaded() == [2, 2, 1, 1, 1]


def test_the_last_engine(start_server) -> None:
    server = start_server(num_engines=2)
    server.call(server.engines[0].die)
    assert server.complete(prompt="a", max_tokens=1)
    assert samples(server, "openspec:engine_alive") == {"0": 0, "1": 1}
    server.call(server.engines[1].die)
    for path in ("/health", "/ready"):
        assert server.client.get(path).status_code == 503
    assert server.client.get("/health").json()["error"]["code"] == "engine_dead"
    error = server.error("/v1/completions", 503, prompt="a")
    assert error["code"] == "engine_dead"


def test_a_late_engine_gets_nothing_until_it_is_heard_of(start_server) -> None:
    server = start_server(num_engines=2, min_replicas=2)
    server.engines[1].is_late = True
    for name in "abcdefgh":
        server.complete(prompt=name * 40, max_tokens=1)
    assert seen_by(server) == [8, 0]
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    named = {"headers": {"x-data-parallel-rank": "1"}, "json": {"prompt": "a"}}
    assert server.client.post("/v1/completions", **named).json()["error"]["code"] == "engine_late"
    server.engines[1].is_late = False
    server.complete(prompt="i" * 40, max_tokens=1)
    assert seen_by(server) == [8, 1]
    assert server.client.get("/ready").status_code == 200


def test_a_single_engine_that_is_late(start_server) -> None:
    server = start_server(SLOW)
    answers: list[dict] = []
    threads = in_threads(lambda: answers.append(server.complete(prompt="a", **LONG)))
    wait_until(lambda: server.engine._running)
    server.engine.is_late = True
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    response = server.client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "engine_late"
    threads[0].join()  # what it has goes on
    assert answers[0]["choices"][0]["finish_reason"] == "length"
    server.engine.is_late = False
    assert server.complete(prompt="a", max_tokens=1)


def test_counters_outlive_their_engine(start_server) -> None:
    server = start_server(max_restarts=1)
    server.complete(prompt="a", max_tokens=40)
    assert samples(server, "openspec:generation_tokens_total") == {"0": 40}
    server.complete(prompt="a", max_tokens=2)
    last = msgspec.structs.replace(server.engine._stats, num_step_failures=3, num_running=5)
    server.engine.last_stats = last
    server.call(server.engine.die)
    failed = {"openspec:engine_step_failures_total": 3, "openspec:generation_tokens_total": 42}
    failed |= {"openspec:num_requests_running": 0, "openspec:engine_failures_total": 1}
    wait_until(lambda: samples(server, "openspec:engine_failures_total") == {"0": 1})
    assert {name: samples(server, name)["0"] for name in failed} == failed
    wait_until(lambda: server.context.engine.num_accepting == 1)
    server.complete(prompt="a", max_tokens=8)
    failed["openspec:generation_tokens_total"] = 50
    wait_until(lambda: {name: samples(server, name)["0"] for name in failed} == failed)
    server.call(lambda: server.context.engine.roll(30.0))
    wait_until(lambda: len(server.engines) == 3 and server.context.engine.num_accepting == 1)
    assert {name: samples(server, name)["0"] for name in failed} == failed


def test_an_engine_that_ends_too_often_is_given_up(
    start_server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica, "FIRST_PAUSE_S", 0.01)
    server = start_server(num_engines=2, max_restarts=2)

    def end(index: int) -> None:
        engine = server.context.engine.all[index]
        wait_until(lambda: engine.is_alive)
        server.call(engine.engine.die)

    for _ in range(3):
        end(1)
    wait_until(lambda: "engine 1 is given up: it was started again 2 times" in caplog.text)
    assert server.client.get("/health").status_code == 200
    assert server.complete(prompt="a", max_tokens=1)
    given_up = asyncio.run_coroutine_threadsafe(server.context.engine.given_up(), server.loop)
    server.call(lambda: server.context.engine.roll(30.0))
    wait_until(lambda: server.context.engine.num_accepting == 2)  # it gets another chance
    monkeypatch.setattr(replica, "RESTART_WINDOW_S", 0.0)
    for _ in range(4):
        end(1)  # each is the first within the window
    wait_until(lambda: server.context.engine.num_accepting == 2)
    monkeypatch.setattr(replica, "RESTART_WINDOW_S", 600.0)
    for _ in range(2):
        end(0)
    assert not given_up.done()
    wait_until(lambda: server.context.engine.num_accepting == 2)
    end(0)
    for _ in range(2):
        end(1)
    given_up.result(PATIENCE_S)


def test_the_end_waits_for_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the pause before it, nor for an engine that is starting."""

    async def main() -> None:
        given = Started(None, None, None)
        given.gates[0].set()
        replicas = Replicas([given.start], 5)
        await replicas.start()
        replicas.all[0].engine.ended_.set()  # type: ignore[attr-defined]
        while given.num_starts < 2:
            await asyncio.sleep(0.01)
        assert replicas.failure == "engine_restarting"
        await asyncio.wait_for(replicas.close(), 1.0)

        given = Started(None, EngineError("no memory"), None)
        for gate in given.gates:
            gate.set()
        monkeypatch.setattr(replica, "FIRST_PAUSE_S", 60.0)
        replicas = Replicas([given.start], 5)
        await replicas.start()
        replicas.all[0].engine.ended_.set()  # type: ignore[attr-defined]
        while given.num_starts < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert replicas.failure == "engine_restarting"
        await asyncio.wait_for(replicas.close(), 1.0)
        assert given.num_starts == 2

    asyncio.run(main())


@pytest.mark.parametrize("error", [OSError("no descriptors"), RuntimeError("a mistake")])
def test_whatever_keeps_an_engine_from_starting_is_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        given = Started(None, error, None)
        for gate in given.gates:
            gate.set()
        replicas = Replicas([given.start], 5)
        await replicas.start()
        replicas.all[0].engine.ended_.set()  # type: ignore[attr-defined]
        while given.num_starts < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert replicas.num_accepting == 1 and str(error) in caplog.text
        await replicas.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_ready_only_with_enough_engines(start_server) -> None:
    server = start_server(num_engines=2, min_replicas=2)
    assert server.client.get("/ready").status_code == 200
    server.call(server.engines[0].die)
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    assert server.complete(prompt="a", max_tokens=1)


def test_a_rolling_restart_loses_nothing(start_server) -> None:
    server = start_server(SLOW, num_engines=2)
    before = list(server.engines)
    ends: list[str] = []

    def run(number: int) -> None:
        answer = server.complete(prompt=f"{number}", max_tokens=100, ignore_eos=True)
        ends.append(answer["choices"][0]["finish_reason"])

    threads = in_threads(*(lambda number=number: run(number) for number in range(6)))
    wait_until(lambda: sum(seen_by(server)) == 6)
    server.call(lambda: server.context.engine.roll(30.0))
    server.call(lambda: server.context.engine.roll(30.0))  # changes nothing
    while len(server.engines) < 4:
        threads += in_threads(lambda: run(9))
        threads[-1].join()
        assert server.client.get("/ready").status_code == 200
    for thread in threads:
        thread.join()
    assert set(ends) == {"length"} and len(ends) == len(threads) > 6
    assert not any(engine.is_alive or engine.aborted for engine in before)
    assert samples(server, "openspec:engine_restarts") == {"0": 0, "1": 0}, "planned ones"


def test_a_rolling_restart_cuts_off_what_does_not_end(start_server) -> None:
    server = start_server(SLOW)
    answers: list[dict] = []
    threads = in_threads(lambda: answers.append(server.complete(prompt="a", **LONG)))
    wait_until(lambda: server.engine._running)
    server.call(lambda: server.context.engine.roll(0.1))
    assert server.error("/v1/completions", 503, prompt="b")["code"] == "engine_restarting"
    threads[0].join()
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    wait_until(lambda: len(server.engines) == 2 and server.context.is_ready)
    assert server.complete(prompt="b", max_tokens=1)


class Started:
    """Engines that start when they are told to."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes, self.num_starts = outcomes, 0
        self.gates = [asyncio.Event() for _ in outcomes]

    async def start(self) -> object:
        number, self.num_starts = self.num_starts, self.num_starts + 1
        await self.gates[number].wait()
        if error := self.outcomes[number]:
            raise error
        return make_engine()


def make_engine() -> object:
    from types import SimpleNamespace

    from tests.unit.fake_core import make_core
    from tests.unit.fake_runner import FakeRunner

    async def close() -> None:
        engine.is_alive = False

    ended = asyncio.Event()
    engine = SimpleNamespace(
        is_alive=True,
        is_late=False,
        failure="engine_dead",
        last_stats=None,
        info=make_core(FakeRunner()).info,
        close=close,
        ended=ended.wait,
        ended_=ended,
    )
    return engine


def test_the_start_waits_for_all_or_for_some() -> None:
    async def main(min_replicas: int | None, num_needed: int) -> None:
        given = Started(None, None, None)
        replicas = Replicas([given.start] * 3)
        starting = asyncio.create_task(replicas.start(min_replicas))
        for number in range(3):
            await asyncio.sleep(0.01)
            assert starting.done() == (number >= num_needed)
            given.gates[number].set()
        await starting
        await asyncio.sleep(0.01)
        assert replicas.num_accepting == 3
        await replicas.close()
        assert not replicas.is_alive

    asyncio.run(main(None, 3))
    asyncio.run(main(1, 1))


def test_what_does_not_start_ends_the_others_or_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refused() -> None:
        given = Started(None, ConfigError("no such GPU"))
        for gate in given.gates:
            gate.set()
        replicas = Replicas([given.start] * 2)
        with pytest.raises(ConfigError, match="no such GPU"):
            await replicas.start()
        assert not replicas.is_alive

    async def late() -> None:
        given = Started(None, EngineError("not ready after 1 s"), None)
        given.gates[0].set()
        replicas = Replicas([given.start] * 2, 5)
        await replicas.start(1)
        assert replicas.num_accepting == 1 and replicas.all[1].failure == "engine_restarting"
        given.gates[1].set()
        given.gates[2].set()
        for _ in range(100):
            await asyncio.sleep(0.01)
        assert replicas.num_accepting == 2 and "not ready after 1 s" in caplog.text
        await replicas.close()

    asyncio.run(refused())
    asyncio.run(late())


class Starts:
    """Stands for `EngineClient.start`: which engines were told to load, and with which times."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.shares: list[Share] = []
        self.gate = asyncio.Semaphore(0)

    async def start(self, *_: object, share: Share, child: EngineChild, **__: object) -> object:
        self.shares.append(share)
        await self.gate.acquire()
        child.close()
        if error := self.outcomes.pop(0):
            raise error
        engine = make_engine()
        times = [StepTime(num_seqs=1, num_rows=1, proposes=False, milliseconds=len(self.shares))]
        engine.info = msgspec.structs.replace(engine.info, step_times=times)  # type: ignore
        return engine


def test_one_engine_measures_its_steps_and_the_others_start_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusal = EngineError("out of memory")

    async def main() -> None:
        starts = Starts(refusal, None, None, None, None)
        monkeypatch.setattr(engines.EngineClient, "start", starts.start)
        config = ServeConfig(replicas=4, min_replicas=3)
        command = (sys.executable, "-c", "import time; time.sleep(600)")
        task = asyncio.create_task(
            engines.start_engines(EngineConfig(device="cpu"), config, Standby(command))
        )

        async def told(number: int) -> None:
            while len(starts.shares) < number:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(starts.shares) == number

        await told(1)
        starts.gate.release()  # it does not start: the next one measures
        with pytest.raises(EngineError, match="engine 0: out of memory"):
            await task

        starts = Starts(None, None, None, None, None)
        monkeypatch.setattr(engines.EngineClient, "start", starts.start)
        task = asyncio.create_task(
            engines.start_engines(EngineConfig(device="cpu"), config, Standby(command))
        )
        await told(1)
        starts.gate.release()
        await told(4)
        for _ in range(3):
            starts.gate.release()
        replicas = await task  # for which three are enough
        while replicas.num_accepting < 4:
            await asyncio.sleep(0.01)
        times = [share.step_times for share in starts.shares]
        assert times[0] is None and times[1:] == [replicas.all[0].engine.info.step_times] * 3
        assert [share.replica for share in starts.shares] == [0, 1, 2, 3]
        # What takes the place of an engine does not measure either.
        replicas.all[2].engine.ended_.set()  # type: ignore[attr-defined]
        await told(5)
        assert starts.shares[4].step_times == times[1]
        starts.gate.release()
        await replicas.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
