"""Kill engines under load: only their own requests fail, and all others get the right text.

    python -m bench.kill_replica --replicas 2 --seconds 60 --json FILE [-- --model DIR ...]

Starts `python -m openspec.serve` with the flags after `--`, keeps `--streams` streams running, and
kills one engine after the other, with SIGKILL, `--every` seconds apart. Every stream asks one of a
few questions whose answers it learned before. It must end with that answer, or with the error of a
dead engine, and the errors are no more than what the killed engines held.

`--server URL --pids A,B` asks a server or router that runs already, and kills these processes in
turn, without counting what they held.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from openspec.bench.environment import environment
from openspec.bench.server import free_port

try:
    import httpx
except ModuleNotFoundError as error:
    raise SystemExit(f"needs httpx: pip install httpx ({error})") from None

NUM_QUESTIONS = 16
PATIENCE_S = 120.0
FAILURES = {"engine_dead", "engine_restarting"}


@dataclass
class Load:
    """Streams of a server or router."""

    url: str
    max_tokens: int
    expected: dict[int, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_held: int = 0
    seconds_away: list[float] = field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient, number: int) -> tuple[str, str]:
        """How a stream ends, and its text."""
        body = {"prompt": f"{number} two three", "max_tokens": self.max_tokens, "seed": number}
        body |= {"stream": True, "ignore_eos": True, "temperature": number % 2}
        text = ""
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    error = json.loads(await response.aread()).get("error", {})
                    return str(error.get("code") or response.status_code), text
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            return str(event["error"]["code"]), text
                        text += "".join(choice["text"] for choice in event["choices"])
        except httpx.HTTPError as error:
            return type(error).__name__, text
        return "done", text

    async def learn(self, client: httpx.AsyncClient) -> None:
        for number in range(NUM_QUESTIONS):
            end, self.expected[number] = await self.ask(client, number)
            assert end == "done", end

    async def stream(self, client: httpx.AsyncClient, first: int, until: float) -> None:
        number = first
        while time.monotonic() < until:
            number = (number + 1) % NUM_QUESTIONS
            end, text = await self.ask(client, number)
            whole = self.expected[number]
            is_right = text == whole if end == "done" else whole.startswith(text)
            self.outcomes[end if is_right else "wrong text"] += 1
            if end != "done":
                await asyncio.sleep(0.2)

    async def engines(self, client: httpx.AsyncClient) -> list[dict[str, int]]:
        found: list[dict[str, int]] = (await client.get(f"{self.url}/server_info")).json()[
            "engines"
        ]
        return found

    async def kill_engine(self, client: httpx.AsyncClient) -> None:
        """One of the server's engines in turn; waits until another is in its place."""
        before = await self.engines(client)
        victim = before[self.num_kills % len(before)]
        self.num_kills += 1
        # A moment old, and it may get some more until it is killed.
        self.num_held += max(one["num_running"] + one["num_waiting"] for one in before)
        os.kill(victim["pid"], signal.SIGKILL)
        since = time.monotonic()
        num_before = sum(one["num_restarts"] for one in before)
        while True:
            await asyncio.sleep(0.1)
            now = await self.engines(client)
            num_restarts = sum(one["num_restarts"] for one in now)
            if num_restarts > num_before and all(one["is_alive"] for one in now):
                break
            assert time.monotonic() - since < PATIENCE_S, "no engine took its place"
        self.seconds_away.append(round(time.monotonic() - since, 2))

    async def run(self, args: argparse.Namespace, server: int | None) -> None:
        pids = list(map(int, args.pids.split(","))) if args.pids else []
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
            await self.learn(client)
            until = time.monotonic() + args.seconds
            streams = [
                asyncio.create_task(self.stream(client, number, until))
                for number in range(args.streams)
            ]
            while time.monotonic() + args.every < until:
                await asyncio.sleep(args.every)
                if server is not None:
                    await self.kill_engine(client)
                elif pids:
                    self.num_kills += 1
                    os.kill(pids.pop(0), signal.SIGKILL)
            await asyncio.gather(*streams)


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """Where to ask, and the server whose engines are killed."""
    if args.server:
        yield args.server.rstrip("/"), None
        return
    port = free_port()
    line = [sys.executable, "-m", "openspec.serve", "--port", str(port)]
    line += ["--replicas", str(args.replicas), *args.flags]
    process = subprocess.Popen(line)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--server", help="a server or router that runs already")
    parser.add_argument("--pids", help="with --server: processes to kill in turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    with started(args) as (url, server):
        load = Load(url, args.max_tokens)
        asyncio.run(load.run(args, server))
    num_failed = sum(count for end, count in load.outcomes.items() if end in FAILURES)
    wrong = load.outcomes["wrong text"] > 0
    if server is not None:
        others = set(load.outcomes) - FAILURES - {"done", "wrong text"}
        wrong = wrong or bool(others) or num_failed > load.num_held + load.num_kills
    result = {
        "environment": environment({**vars(args), "json": None}, {}),
        "outcomes": dict(load.outcomes),
        "num_kills": load.num_kills,
        "most_that_they_held": load.num_held,
        "seconds_away": load.seconds_away,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "environment"}))
    print("FAILED" if wrong else "passed")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
