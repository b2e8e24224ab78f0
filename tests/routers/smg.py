"""SMG in front of servers with one engine and with two: `smg.py FOLDER-OF-BINARIES`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
from tests.routers import fleet

BIN = Path(sys.argv[1])


def smg(urls: list[str], *arguments: str) -> tuple[str, list[str | Path]]:
    port, metrics_port = fleet.free_port(), fleet.free_port()
    return f"http://127.0.0.1:{port}", [
        *(BIN / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--health-check-interval-secs", "1", "--load-monitor-interval", "1"),
        *("--worker-urls", *urls, *arguments),
    ]


def workers(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/workers").json()["workers"]
    return found


def wait_for_workers(url: str, number: int) -> None:
    def are_there() -> bool:
        try:
            return sum(bool(worker["is_healthy"]) for worker in workers(url)) == number
        except httpx.HTTPError:
            return False

    fleet.until(are_there, "SMG has found its servers")


with fleet.servers(3) as behind:
    urls = [server.url for server in behind]
    url, command = smg(urls, "--policy", "consistent_hashing")
    with fleet.process(*command):
        wait_for_workers(url, 3)
        for session in ("s1", "s2", "s3", "s4"):
            with fleet.counted(behind) as counts:
                headers = {"x-smg-routing-key": session}
                asks = [fleet.Ask(one.path, one.body, headers) for one in fleet.mixed(6)]
                fleet.answers(url, asks)
            assert sorted(counts) == [0, 0, 6], counts
        print("   X-SMG-Routing-Key: a session stays on its server")
    url, command = smg(urls, "--policy", "power_of_two")
    with fleet.process(*command):
        wait_for_workers(url, 3)
        for worker in workers(url):
            assert worker["runtime_type"] == "vllm", worker
            assert worker["model_id"] == "tiny"
            assert worker["models"][0]["context_length"] == 16384
        print("   probes: SMG takes a server for vLLM's, with its model and context length")
        stream = fleet.Stream(url, 5, max_tokens=15_000)
        stream.has_begun.wait(fleet.PATIENCE_S)

        def knows_load() -> bool:
            assert not stream.error
            loads = [worker.get("engine_load") for worker in workers(url)]
            running = [load["loads"][0]["num_running_reqs"] for load in loads if load]
            return running.count(1) == 1

        fleet.until(knows_load, "SMG reads running requests from /metrics")
        stream.join(fleet.PATIENCE_S)
        print("   load: SMG reads the gauges of /metrics")
        expected = fleet.answers(urls[0], fleet.mixed(60))
        fleet.check_texts(url, expected)
        fleet.check_passing_through(url, behind)
        fleet.check_client_that_leaves(url, behind)
        assert httpx.post(f"{url}/flush_cache").status_code == 200
        flushed = "POST /flush_cache 200"
        fleet.until(lambda: all(flushed in server.log for server in behind), "all are flushed")
        print("   /flush_cache reaches all servers")
        fleet.check_drain(url, behind)
        fleet.check_kill(url, behind)

for number, policy in ((1, "cache_aware"), (2, "round_robin")):
    with fleet.servers(number, "--replicas", "2") as behind:
        print(f"   servers with two engines: {number}")
        url, command = smg([server.url for server in behind], "--policy", policy)
        with fleet.process(*command):
            wait_for_workers(url, number)
            fleet.check_texts(url, expected)
            fleet.check_passing_through(url, behind)
            fleet.check_client_that_leaves(url, behind)
            fleet.check_killed_engine(url, behind)
            if number > 1:
                fleet.check_drain(url, behind)
            fleet.check_end(url, behind)
