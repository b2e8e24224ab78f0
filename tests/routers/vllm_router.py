"""vllm-router in front of servers with one engine and with two: `vllm_router.py BINARIES`."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import httpx
from tests.routers import fleet

BIN = Path(sys.argv[1])
POLICIES = (
    "random",
    "round_robin",
    "cache_aware",
    "kv_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
)


def router(urls: list[str], *arguments: str) -> tuple[str, list[str | Path]]:
    port, metrics_port = fleet.free_port(), fleet.free_port()
    return f"http://127.0.0.1:{port}", [
        *(BIN / "vllm-router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
        *("--worker-urls", *urls, *arguments),
    ]


def wait_until_up(url: str) -> None:
    def is_up() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    fleet.until(is_up, "the router is up")


def check_cache_hits(url: str, urls: list[str]) -> None:
    """Prompts that one server has cached go there, though the router did not send them."""
    chance = random.Random(4)
    prompts = [" ".join(chance.choice(fleet.WORDS) for _ in range(120)) for _ in range(24)]
    for i, prompt in enumerate(prompts):
        fleet.answer(urls[i % len(urls)], fleet.Ask("/v1/completions", asked(prompt)))
    time.sleep(1.0)
    with httpx.Client(base_url=url, timeout=fleet.PATIENCE_S) as client:
        for prompt in prompts:
            usage = client.post("/v1/completions", json=asked(prompt)).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= usage["prompt_tokens"] - 17, usage
    print(f"   kv_aware: {len(prompts)} of {len(prompts)} prompts go where they are cached")


def asked(prompt: str) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}


events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
events["replay_endpoint"] = "tcp://127.0.0.1:*"
with fleet.servers(3, "--kv-events-config", json.dumps(events)) as behind:
    urls = [server.url for server in behind]
    url, command = router(urls, "--policy", "kv_aware")
    with fleet.process(*command):
        wait_until_up(url)
        time.sleep(2.0)  # the subscriptions
        check_cache_hits(url, urls)
    url, command = router(urls, "--policy", "consistent_hash")
    with fleet.process(*command):
        wait_until_up(url)
        for session in ("s1", "s2", "s3", "s4"):
            with fleet.counted(behind) as counts:
                headers = {"X-Session-ID": session}
                asks = [fleet.Ask(one.path, one.body, headers) for one in fleet.mixed(6)]
                fleet.answers(url, asks)
            assert sorted(counts) == [0, 0, 6], counts
        print("   X-Session-ID: a session stays on its server")
    url, command = router(urls, "--policy", "power_of_two")
    with fleet.process(*command):
        wait_until_up(url)
        expected = fleet.answers(urls[0], fleet.mixed(60))
        fleet.check_texts(url, expected)
        fleet.check_passing_through(url, behind)
        fleet.check_client_that_leaves(url, behind)
        fleet.check_drain(url, behind)
        fleet.check_kill(url, behind)

with fleet.servers(2, "--replicas", "2", "--kv-events-config", json.dumps(events)) as behind:
    print("   two servers with two engines each")
    for policy in POLICIES:
        url, command = router([server.url for server in behind], "--policy", policy)
        with fleet.process(*command):
            wait_until_up(url)
            print(f"   {policy}:", end="")
            fleet.check_texts(url, expected)
    urls, by_engine = [server.url for server in behind], ("--intra-node-data-parallel-size", "2")
    url, command = router(urls, "--policy", "kv_aware", *by_engine)
    with fleet.process(*command):
        wait_until_up(url)
        time.sleep(2.0)  # the subscriptions
        print("   two workers for each server:")
        check_cache_hits(url, urls)
        fleet.check_texts(url, expected)
    url, command = router(urls, "--policy", "round_robin")
    with fleet.process(*command):
        wait_until_up(url)
        fleet.check_killed_engine(url, behind)
        fleet.check_drain(url, behind)
        fleet.check_end(url, behind)

first = fleet.free_port()
events["endpoint"] = f"tcp://127.0.0.1:{first}"
events["replay_endpoint"] = f"tcp://127.0.0.1:{first + 100}"
with fleet.servers(1, "--replicas", "2", "--kv-events-config", json.dumps(events)) as behind:
    urls = [server.url for server in behind]
    url, command = router(urls, "--policy", "kv_aware", *by_engine)
    with fleet.process(*command):
        wait_until_up(url)
        time.sleep(2.0)  # the subscriptions
        check_cache_hits(url, urls)
        fleet.check_killed_engine(url, behind)
        print("   with another engine in its place:")
        check_cache_hits(url, urls)
