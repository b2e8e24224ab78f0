"""Clients that end their side, leave, or are too many; memory that comes back. On the real engine."""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.serve.real_server import RealServer, real_server, resident_bytes
from tests.serve.waiting import PATIENCE_S, wait_until

MAX_CONNECTIONS = 40
BODY_BYTES = 4 << 20
MAX_KEPT_BYTES = 40e6


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    flags = ("--kv-cache-memory", "32MiB", "--num-threads", "1")
    constants = {"openspec.serve.server.connection.MAX_CONNECTIONS": MAX_CONNECTIONS}
    with real_server(*flags, constants=constants) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def connect(server: RealServer) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_S
    )


def post(server: RealServer, body: dict, version: str = "1.1") -> socket.socket:
    data = json.dumps(body).encode()
    sock = connect(server)
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while piece := sock.recv(65536):
        data += piece
    return data


def num_running(server: RealServer) -> float:
    return server.metric("openspec:num_requests_running")


def test_the_end_waits_for_no_client_that_takes_nothing() -> None:
    with real_server("--num-threads", "1") as server, contextlib.closing(connect(server)) as sock:
        sock.settimeout(1)
        with pytest.raises(TimeoutError):  # nothing goes in any more: the answers fill all buffers
            while True:
                sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 100)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < server.end_s
        assert "Traceback" not in server.log and ": ERROR" not in server.log


def test_the_values_of_large_bodies_leave_little_behind(real: RealServer) -> None:
    texts = [str(number) for number in range(200_000)]
    bodies = [
        {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [5] * 250_000},
        {"prompt": "a", "max_tokens": 1, "metadata": texts},
        {"prompt": "a", "max_tokens": 1, "metadata": [{"a": one} for one in texts[:15_000]]},
    ]
    for body in bodies:
        body_of_one = {**body, "metadata": [], "allowed_token_ids": [5]}
        real.client.post("/v1/completions", json=body_of_one).raise_for_status()
    before = resident_bytes(real.process.pid)
    for _ in range(2):
        socks = [post(real, body) for body in bodies * 4]
        for sock in socks:
            with contextlib.closing(sock):
                assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    wait_until(lambda: resident_bytes(real.process.pid) < before + MAX_KEPT_BYTES)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_gets_its_answer(real: RealServer, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": stream, "seed": 1}
    with contextlib.closing(post(real, body)) as sock:
        sock.shutdown(socket.SHUT_WR)
        data = read_all(sock)  # up to the end of the connection
    answers = data.split(b"HTTP/1.1 ")[1:]
    assert all(answer.startswith(b"100 Continue\r\n\r\n") for answer in answers[:-1])
    assert answers[-1].startswith(b"200 OK")
    if stream:
        assert answers[-1].rstrip().endswith((b"data: [DONE]", b"0"))
    else:
        answer = json.loads(answers[-1].partition(b"\r\n\r\n")[2])
        assert answer["usage"]["completion_tokens"] == 400


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_is_gone(real: RealServer, stream: bool, version: str) -> None:
    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    sock = post(real, body, version)
    wait_until(lambda: num_running(real) == 1)
    before = real.metric("openspec:engine_steps_total")
    sock.close()
    wait_until(lambda: num_running(real) == 0)
    assert real.metric("openspec:engine_steps_total") - before < 1000  # of at least 1,500 / 5
    assert real.metric("openspec:server_load") == 0


def test_too_many_connections_are_refused(real: RealServer) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(real)) for _ in range(MAX_CONNECTIONS + 3)]
        refused = read_all(socks[-1])
        assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in refused
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
            f"This server takes up to {MAX_CONNECTIONS} connections"
        )
    wait_until(lambda: real.client.get("/health").status_code == 200)


def test_memory_of_large_bodies_comes_back(real: RealServer) -> None:
    before = resident_bytes(real.process.pid)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % (BODY_BYTES + 1)
    )
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(connect(real))
            sock.sendall(head + b'{"prompt": "' + b"x" * (BODY_BYTES - 12))
        wait_until(lambda: resident_bytes(real.process.pid) > before + 10 * BODY_BYTES)
    deadline = time.monotonic() + 10
    while resident_bytes(real.process.pid) > before + MAX_KEPT_BYTES:
        assert time.monotonic() < deadline, resident_bytes(real.process.pid) - before
        time.sleep(0.1)
