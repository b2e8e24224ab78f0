"""What holds up the end of the server and what does not, and clients that never come to an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from types import SimpleNamespace

import pytest

from openspec.serve.server.run import _Signals
from tests.serve.conftest import RunningServer
from tests.serve.sse import parse_events
from tests.serve.test_lifecycle import JSON, post
from tests.serve.waiting import PATIENCE_S, wait_until


class HalfSent:
    """A request of which the client has sent the head and the beginning of the body."""

    def __init__(self, server: RunningServer, body: dict) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{JSON}\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self._rest = data[5:]
        self._sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        self._sock.sendall(head.encode() + data[:5])
        wait_until(lambda: server.context.lifecycle._num_open == 1)

    def send_rest(self) -> tuple[int, dict]:
        """Sends the rest; returns status and body of the answer."""
        with self._sock:
            self._sock.sendall(self._rest)
            answer = b""
            while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                chunk = self._sock.recv(65536)
                assert chunk, answer
                answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)


def drain(server: RunningServer, timeout_s: float):
    return asyncio.run_coroutine_threadsafe(
        server.context.lifecycle.drain(0.0, timeout_s), server.loop
    )


def test_a_request_on_its_way_in_holds_up_the_end(start_server) -> None:
    server = start_server()
    request = HalfSent(server, {"prompt": "a", "max_tokens": 3})
    draining = drain(server, PATIENCE_S)
    wait_until(lambda: server.context.lifecycle.is_refusing)
    time.sleep(0.1)
    assert not draining.done()
    status, body = request.send_rest()
    assert status == 200 and body["usage"]["completion_tokens"] == 3
    draining.result(PATIENCE_S)


def test_a_request_that_comes_in_too_late_does_not_start(start_server) -> None:
    server = start_server()
    request = HalfSent(server, {"prompt": "a", "max_tokens": 3})
    draining = drain(server, 0.05)
    wait_until(lambda: server.context.lifecycle.is_ending)
    status, body = request.send_rest()
    assert status == 503 and "shutting down" in body["error"]["message"]
    assert not server.engine.requests
    draining.result(PATIENCE_S)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such clock")
def test_a_client_that_takes_nothing_is_let_go(start_server) -> None:
    server = start_server(request_timeout_s=1.0)
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "n": 16, "logprobs": 20}
    sock = post(server, "/v1/completions", body)  # more than all buffers take
    wait_until(lambda: server.context.num_sequences == 16)
    wait_until(lambda: server.engine.requests and not server.engine._running)
    wait_until(lambda: server.context.num_sequences == 0)
    assert server.client.get("/load").json() == {"server_load": 0}
    sock.close()


def test_an_error_after_a_comment_is_the_last_event(
    start_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openspec.serve.generation.answer.KEEP_ALIVE_S", 0.05)
    server = start_server({"step_s": 60.0, "max_num_seqs": 1})
    others = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 9})
    wait_until(lambda: bool(server.engine._running))
    sock = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
    answer = b""
    while b": keep-alive" not in answer:
        answer += sock.recv(65536)
    server.call(server.engine.die)
    while not answer.endswith(b"0\r\n\r\n"):
        chunk = sock.recv(65536)
        assert chunk, answer
        answer += chunk
    chunks = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    events = parse_events(b"".join(chunks))
    assert len(events) == 1 and events[0]["error"]["message"]
    sock.close()
    others.close()


def test_an_engine_that_is_ready_as_the_signal_comes_is_closed() -> None:
    closed = []

    async def close() -> None:
        closed.append("engine")

    context = SimpleNamespace(
        engine=SimpleNamespace(close=close),
        close=lambda: closed.append("processes"),
    )

    async def load() -> object:
        with contextlib.suppress(asyncio.CancelledError):  # as wait_for of Python 3.11 may do
            await asyncio.sleep(60)
        return context

    async def main() -> object:
        signals = _Signals()
        asyncio.get_running_loop().call_later(0.01, signals.first.set)
        return await signals.unless_stopped(load())

    assert asyncio.run(main()) is None
    assert closed == ["processes", "engine"]


def test_the_end_of_a_terminal_is_no_request_for_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_terminal = [True]
    monkeypatch.setattr("openspec.serve.server.run._has_terminal", lambda: has_terminal[0])

    async def main() -> None:
        signals, calls = _Signals(), []
        signals.on_hangup = lambda: calls.append("restart")
        with signals.installed():
            for is_there, expected in ((True, ["restart"]), (False, ["restart"])):
                has_terminal[0] = is_there
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(0.05)
                assert calls == expected and signals.first.is_set() == (not is_there)
        has_terminal[0] = False
        daemon = _Signals()
        daemon.on_hangup = lambda: calls.append("again")
        with daemon.installed():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert calls == ["restart", "again"] and not daemon.first.is_set()

    asyncio.run(main())
