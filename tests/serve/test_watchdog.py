"""An engine that hangs or dies under a real server, and what becomes of the server then."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.serve.real_server import RealServer, children_of, is_running, real_server
from tests.serve.sse import parse_events
from tests.serve.waiting import PATIENCE_S, wait_until

FLAGS = ("--kv-cache-memory", "32MiB", "--num-threads", "1")
ENGINE = "openspec.engine.processes.process"
BODY = {"prompt": "one two three", "max_tokens": 8, "seed": 3}
LONG = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def health(server: RealServer) -> str:
    response = server.client.get("/health")
    if response.status_code == 200:
        return "alive"
    assert response.status_code == 503 and "retry-after" in response.headers
    return str(response.json()["error"]["code"])


def answer(server: RealServer) -> object:
    return server.client.post("/v1/completions", json=BODY).json()["choices"]


def end_of_stream(server: RealServer, number: int) -> dict:
    """The last event of a stream whose engine gets a signal after the first."""
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        chunks = response.iter_bytes()
        received = next(chunks)
        os.kill(server.engine_pid, number)
        received += b"".join(chunks)
    assert received.endswith(b"data: [DONE]\n\n")
    return dict(parse_events(received)[-1])


def engines_of(server: RealServer) -> list[int]:
    return children_of(server.process.pid, ENGINE)


def test_an_engine_that_hangs_is_ended_and_started_again() -> None:
    with real_server(*FLAGS, "--watchdog-timeout", "1", "--restart-engine", "1") as server:
        expected, first = answer(server), server.engine_pid
        assert end_of_stream(server, signal.SIGSTOP)["error"]["code"] == "engine_hung"
        wait_until(lambda: engines_of(server) not in ([], [first]))
        [second] = engines_of(server)
        os.kill(second, signal.SIGSTOP)  # else it may be there before anyone can look
        assert health(server) == "engine_restarting"
        assert server.client.get("/ready").status_code == 503
        refusal = server.client.post("/v1/completions", json=BODY)
        assert refusal.status_code == 503 and "retry-after" in refusal.headers
        assert "sequences fail: cmpl-" in server.log
        os.kill(second, signal.SIGCONT)
        wait_until(lambda: health(server) == "alive")
        assert not is_running(first) and server.engine_pid == second
        assert answer(server) == expected
        assert server.metric("openspec:engine_restarts") == 1
        assert server.metric("openspec:engine_failures_total") == 1
        time.sleep(1.2)
        assert engines_of(server) == [second], "no process waits beside a single engine"

        # No more than one restart was asked for.
        assert end_of_stream(server, signal.SIGKILL)["error"]["code"] == "engine_dead"
        assert server.process.wait(PATIENCE_S) == 1
        last = server.log.strip().splitlines()[-1]
        assert last.startswith("openspec.serve: the engine ended too often")
        assert "Traceback" not in server.log


@pytest.mark.full
def test_five_restarts_without_a_flag() -> None:
    constants = {"openspec.engine.processes.replica.FIRST_PAUSE_S": 0}
    with real_server(*FLAGS, constants=constants) as server:
        for number in range(6):
            wait_until(lambda: health(server) == "alive")
            assert server.metric("openspec:engine_restarts") == number
            assert end_of_stream(server, signal.SIGKILL)["error"]["code"] == "engine_dead"
        assert server.process.wait(PATIENCE_S) == 1


def test_a_hung_engine_does_not_hold_up_the_end() -> None:
    with real_server(*FLAGS, "--shutdown-timeout", "0") as server:
        engine = server.engine_pid
        with server.client.stream("POST", "/v1/completions", json=LONG) as response:
            chunks = response.iter_raw()
            next(chunks)
            os.kill(engine, signal.SIGSTOP)
            wait_until(lambda: server.client.get("/ready").status_code == 503)
            assert health(server) == "alive", "it may go on"
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < 7 + server.end_s
        assert not is_running(engine)


@pytest.mark.parametrize("is_starting", [False, True])
def test_the_end_does_not_wait_for_a_restart(is_starting: bool) -> None:
    pause_s = 0 if is_starting else 600
    constants = {"openspec.engine.processes.replica.FIRST_PAUSE_S": pause_s}
    with real_server(*FLAGS, constants=constants) as server:
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)  # the first restart is at once
        wait_until(lambda: engines_of(server) not in ([], [first]))
        [second] = engines_of(server)
        if is_starting:
            os.kill(second, signal.SIGSTOP)
        else:
            os.kill(second, signal.SIGKILL)
            wait_until(lambda: "starting the engine again in" in server.log)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < server.end_s
        assert not is_running(second)
