"""One request as large as the limits allow, on the real engine: it stalls nobody else."""

from __future__ import annotations

import json
import random
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.serve.real_server import RealServer, real_server
from tests.serve.waiting import wait_until

NUM_PROMPTS, PROMPT_LEN, NUM_CHOICES = 8, 4000, 125
NUM_SEQUENCES = NUM_PROMPTS * NUM_CHOICES
LIMITS = ("--max-num-seqs", "16", "--max-num-queued-reqs", str(NUM_SEQUENCES))
ONE_TOKEN = {"prompt": "hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server("--num-threads", "1", "--kv-cache-memory", "128MiB", *LIMITS) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def num_unfinished(real: RealServer) -> float:
    names = ("openspec:num_requests_running", "openspec:num_requests_waiting")
    return sum(map(real.metric, names))


@contextmanager
def flood(real: RealServer) -> Iterator[socket.socket]:
    """A request of many sequences with prompts that nobody has seen; it is in hand, not done."""
    rng = random.Random(time.monotonic_ns())
    prompts = [rng.choices(range(100, 1000), k=PROMPT_LEN) for _ in range(NUM_PROMPTS)]
    content = json.dumps({"prompt": prompts, "n": NUM_CHOICES, "max_tokens": 1}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    host, port = real.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + content)
        wait_until(lambda: real.client.get("/load").json() == {"server_load": 1})
        yield sock
    wait_until(lambda: num_unfinished(real) == 0)


def test_all_of_a_flood_counts_at_once_and_priority_overtakes_it(real: RealServer) -> None:
    with flood(real):
        assert num_unfinished(real) >= NUM_SEQUENCES - 16
        body = {**ONE_TOKEN, "priority": -1000}
        assert real.client.post("/v1/completions", json=body).status_code == 200
        assert num_unfinished(real) >= 0.8 * NUM_SEQUENCES, "the flood was to come later"


def test_scrapes_do_not_wait_for_a_flood(real: RealServer) -> None:
    with flood(real):
        seconds = []
        for _ in range(7):
            started = time.monotonic()
            assert real.client.get("/health").status_code == 200
            assert real.metric("openspec:num_requests_waiting") > 0
            seconds.append(time.monotonic() - started)
    assert statistics.median(seconds) < 1.0, "0.1 on an idle machine"


def test_a_flood_whose_client_left_is_gone(real: RealServer) -> None:
    num_before = real.metric("openspec:prompt_tokens_total")
    with flood(real) as sock:
        more = {"prompt": ["hello"] * 100, "max_tokens": 1}
        answer = real.client.post("/v1/completions", json=more)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert f" of {NUM_SEQUENCES + 16} sequences" in answer.json()["error"]["message"]
        sock.close()
        wait_until(lambda: real.client.get("/load").json() == {"server_load": 0})
        assert real.client.post("/v1/completions", json=more).status_code == 200
    num_computed = real.metric("openspec:prompt_tokens_total") - num_before
    assert num_computed < 0.5 * NUM_PROMPTS * PROMPT_LEN, "it was computed for nobody"


def test_a_request_larger_than_the_queue_is_refused(real: RealServer) -> None:
    body = {"prompt": ["hello"] * 8, "n": 128, "max_tokens": 1}
    answer = real.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "1024 sequences" in message and f"up to {NUM_SEQUENCES + 16}" in message
    assert num_unfinished(real) == 0
