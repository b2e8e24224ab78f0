"""An engine that hangs or dies under a real server, and the one that takes its place."""

from __future__ import annotations

import os
import signal

from tests.serve.real_server import RealServer, children_of, is_running, real_server
from tests.serve.sse import parse_events
from tests.serve.waiting import wait_until


def health(server: RealServer) -> str:
    response = server.client.get("/health")
    if response.status_code == 200:
        return "alive"
    assert response.status_code == 503 and "retry-after" in response.headers
    return str(response.json()["error"]["code"])


def test_an_engine_that_hangs_is_ended_and_started_again() -> None:
    flags = ("--kv-cache-memory", "32MiB", "--num-threads", "1", "--watchdog-timeout", "1")
    with real_server(*flags, "--restart-engine", "1") as server:
        body = {"prompt": "one two three", "max_tokens": 8, "seed": 3}
        answer = server.client.post("/v1/completions", json=body).json()["choices"]
        # Else the next engine is there before anyone can look.
        wait_until(
            lambda: len(children_of(server.process.pid, "openspec.engine.processes.process")) == 2
        )
        first, standby = children_of(server.process.pid, "openspec.engine.processes.process")
        os.kill(standby, signal.SIGSTOP)

        long = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=long) as response:
            chunks = response.iter_bytes()
            received = next(chunks)
            os.kill(first, signal.SIGSTOP)
            received += b"".join(chunks)
        assert parse_events(received)[-1]["error"]["code"] == "engine_hung"
        assert health(server) in ("engine_hung", "engine_restarting")
        assert server.client.get("/ready").status_code == 503
        assert server.client.post("/v1/completions", json=body).status_code == 503
        assert "sequences fail: cmpl-" in server.log

        os.kill(standby, signal.SIGCONT)
        wait_until(lambda: health(server) == "alive")
        assert not is_running(first) and server.engine_pid == standby
        assert server.client.post("/v1/completions", json=body).json()["choices"] == answer
        assert server.metric("openspec:engine_restarts") == 1

        # No more than one restart was asked for.
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: health(server) == "engine_dead")
        assert server.client.post("/v1/completions", json=body).status_code == 503
        assert server.stop() == 0
