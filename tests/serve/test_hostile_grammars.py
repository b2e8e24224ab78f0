"""Bodies with random schemas, patterns, grammars and tags, on the embedded model.

`--full` sends ten thousand to each API.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

import pytest

from tests.serve.hostile_grammars import PATHS, constrained
from tests.serve.mutants import SEED, SEEDS, mutate, send_and_watch
from tests.serve.real_server import RealServer, real_server, resident_bytes
from tests.serve.waiting import PATIENCE_S, wait_until

REST_S = 60.0
"""After it resident memory is what it was, but for a tenth."""
MAX_HEALTH_S = {True: 0.5, False: 2.0}
"""Of 99 in 100 /health, by whether they are many; on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server("--num-threads", "1", "--kv-cache-memory", "8MiB") as server:
        yield server
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < PATIENCE_S / 2
        assert "Traceback" not in server.log


def body(rng: random.Random, path: str) -> bytes:
    given = constrained(rng, path) if rng.random() < 0.7 else rng.choice(SEEDS[path])
    return mutate(rng, given) if rng.random() < 0.3 else json.dumps(given).encode()


@pytest.mark.parametrize("path", PATHS)
def test_no_body_breaks_or_stalls_the_server(real: RealServer, is_full: bool, path: str) -> None:
    num_bodies = 10_000 if is_full else 40
    rng = random.Random(f"{SEED} {path}")
    cases = [(path, body(rng, path)) for _ in range(num_bodies)]
    port = int(real.url.rpartition(":")[2])
    statuses, failures, health_s = asyncio.run(send_and_watch(port, cases))
    assert not failures, failures[:5]
    assert sum(statuses.values()) == num_bodies
    assert set(statuses) <= {200, 400, 404, 413, 503}, statuses
    assert statuses[200] and statuses[400], statuses
    assert health_s[len(health_s) * 99 // 100] < MAX_HEALTH_S[is_full], health_s[-5:]
    assert real.metric("openspec:engine_step_failures_total") == 0
    wait_until(lambda: real.metric("openspec:num_requests_running") == 0)


@pytest.mark.full
def test_memory_after_them_is_what_it_was(real: RealServer) -> None:
    def batch(seed: int) -> int:
        rng = random.Random(seed)
        cases = [(path, body(rng, path)) for path in PATHS for _ in range(500)]
        _, failures, _ = asyncio.run(send_and_watch(int(real.url.rpartition(":")[2]), cases))
        assert not failures, failures[:5]
        time.sleep(REST_S)
        return resident_bytes(real.process.pid)

    before = batch(1)
    assert batch(2) < 1.1 * before
