"""Hostile and unlucky clients against the real engine; `--full` sends as many as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.serve.mutants import check_answers
from tests.serve.real_server import TIMED, RealServer, real_server
from tests.serve.sse import parse_events
from tests.serve.waiting import PATIENCE_S, wait_until

METHODS = {
    "ngram": [],
    "eagle3": ["--num-speculative-tokens", "5", "--method-option", "draft_top_k=4"],
    "dflash": [],
    "dspark": ["--method-option", "draft_top_k=8"],
}
"""Chains and trees."""
SHORT_KEEP_ALIVE = {"openspec.serve.server.run.KEEP_ALIVE_TIMEOUT_S": 1}
POOL = {"ngram": "5MiB", "eagle3": "6MiB", "dflash": "7MiB", "dspark": "7MiB"}
"""About 64 pages."""


@pytest.fixture(scope="module")
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    methods = list(METHODS) if metafunc.config.getoption("--full") else ["eagle3"]
    metafunc.parametrize("real", methods, indirect=True, scope="module")


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    method = request.param
    flags = ["--method", method, *METHODS[method], "--kv-cache-memory", POOL[method]]
    flags += ["--num-threads", "1", "--max-num-queued-reqs", "4000"]
    with real_server(*flags, constants=SHORT_KEEP_ALIVE, **TIMED) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


@pytest.fixture(autouse=True)
def leaves_nothing_behind(real: RealServer) -> Iterator[None]:
    files = num_files(real)
    yield
    gauges = ("num_requests_running", "num_requests_waiting", "server_load")
    wait_until(lambda: not any(real.metric(f"openspec:{name}") for name in gauges))
    real.client.post("/flush_cache").raise_for_status()
    wait_until(lambda: real.metric("openspec:kv_cache_usage_perc") == 0)
    wait_until(lambda: num_files(real) <= files + 2)  # of connections that end just now
    assert real.metric("openspec:engine_step_failures_total") == 0


def num_files(server: RealServer) -> int:
    pids = (server.process.pid, server.engine_pid)
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)


def port_of(server: RealServer) -> int:
    return int(server.url.rpartition(":")[2])


def post(server: RealServer, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port_of(server)), timeout=PATIENCE_S)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def answers(server: RealServer, bodies: list[dict]) -> list[httpx.Response]:
    """All at once."""

    async def run() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=600) as client:
            return await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )

    return asyncio.run(run())


def test_broken_bodies(real: RealServer, is_full: bool) -> None:
    check_answers(port_of(real), 10_000 if is_full else 250)


def test_cases_of_the_schema(real: RealServer, is_full: bool) -> None:
    schema = schemathesis.openapi.from_url(f"{real.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    num_cases = -(-(10_000 if is_full else 150) // len(operations))
    statuses = set()
    for operation in operations:

        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):  # long answers are no part of this
                case.body["max_tokens"] = 1
            response = case.call(timeout=PATIENCE_S)
            statuses.add(response.status_code)
            assert response.status_code < 500, (response.status_code, response.text[:500])

        check()
    assert {200, 400} <= statuses


def test_killed_clients(real: RealServer, is_full: bool) -> None:
    draw = random.Random(5)
    for _ in range(300 if is_full else 30):
        body = {
            "prompt": [[draw.randrange(4000)] * draw.randint(1, 400) for _ in range(2)],
            "n": draw.randint(1, 3),
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": draw.random() < 0.5,
        }
        sock = post(real, body)
        sock.settimeout(draw.uniform(0.001, 0.1))
        with contextlib.suppress(TimeoutError):
            sock.recv(draw.randint(1, 4000))
        if draw.random() < 0.5:  # a reset in place of an orderly end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()


def test_more_requests_than_the_pages_hold(real: RealServer, is_full: bool) -> None:
    bodies = [
        {
            "prompt": [(7 * number + i) % 4000 for i in range(150)],
            "max_tokens": 60,
            "ignore_eos": True,
            "seed": number,
        }
        for number in range(200 if is_full else 16)
    ]
    alone = [real.client.post("/v1/completions", json=body).json() for body in bodies[:4]]
    together = answers(real, bodies)
    assert [one.status_code for one in together] == [200] * len(bodies)
    texts = [one.json()["choices"][0]["text"] for one in together]
    assert texts[:4] == [one["choices"][0]["text"] for one in alone]
    assert all(one.json()["usage"]["completion_tokens"] == 60 for one in together)
    assert real.metric("openspec:num_preemptions_total") > 0


def test_many_streams(real: RealServer, is_full: bool) -> None:
    num_streams = 1000 if is_full else 100
    bodies = [
        {"prompt": f"{i} bottles", "max_tokens": 4, "stream": True, "ignore_eos": True, "seed": i}
        for i in range(num_streams)
    ]
    for one in answers(real, bodies):
        assert one.status_code == 200 and parse_events(one.content)


def test_slow_readers_stall_nobody(real: RealServer) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 5}
    sleepers = [post(real, body) for _ in range(8)]  # which read nothing
    try:
        answer = real.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 4})
        assert answer.status_code == 200
    finally:
        for sleeper in sleepers:
            sleeper.close()
