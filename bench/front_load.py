"""How many output tokens a second one front carries from engine processes to streaming clients.

    python -m bench.front_load --engines 8 --streams 64,128,256 --json FILE

Starts the server with engines that have no model (`bench/front_engine.py`): each gives every
sequence 5 tokens a step, in steps of `--step-ms`. Clients in processes of their own read chats as
streams. For each number of streams it tells the tokens a second that the front gave out, their
share of what the engines offer, processor time of the front in cores and for a token, the chunks a
second that clients read, and the 99th percentile of the time between two reads.

The front saturates where the share falls below one: outputs that wait are joined into larger chunks
before that, so that nothing is lost. `--profile FILE` writes a profile of the front.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.front_engine import STEP_MS, TOKENS_PER_STEP

from openspec.bench.environment import environment
from openspec.bench.server import free_port

WARM_UP_S = 2.0
MAX_TOKENS = 2000
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def run_server(arguments: list[str], profile: str | None) -> int:
    """The server with synthetic engines, in this process."""
    from openspec.serve import __main__ as command

    line = (sys.executable, "-m", "bench.front_engine")
    command.Standby = functools.partial(command.Standby, line)  # type: ignore
    if profile is None:
        return command.main(arguments)
    profiler = cProfile.Profile()
    status = profiler.runcall(command.main, arguments)
    profiler.dump_stats(profile)
    return status


@contextmanager
def started(args: argparse.Namespace, port: int) -> Iterator[int]:
    """Process id of the front."""
    line = [sys.executable, "-m", "bench.front_load", "--serve"]
    if args.profile:
        line += ["--profile", args.profile]
    line += ["--", "--port", str(port), "--replicas", str(args.engines), "--device", "cpu"]
    line += ["--max-num-seqs", "1024", "--shutdown-timeout", "1"]
    with tempfile.TemporaryFile() as log:
        environ = {**os.environ, STEP_MS: str(args.step_ms)}
        process = subprocess.Popen(line, env=environ, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 300
            while True:
                log.seek(0)
                text = log.read()
                if b"ready after" in text:
                    break
                assert process.poll() is None and time.monotonic() < deadline, text.decode()
                time.sleep(0.1)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Reader:
    """Streams of one client process."""

    def __init__(self) -> None:
        self.num_chunks = 0
        self.gaps: list[float] = []
        self.is_counting = False

    async def stream(self, port: int, number: int, until: float) -> None:
        """One request after the other on one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        messages = [{"role": "user", "content": f"request {number}"}]
        body: dict[str, object] = {"messages": messages, "max_tokens": MAX_TOKENS, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": False}
        data = json.dumps(body).encode()
        request = HEAD.encode() + b"content-length: %d\r\n\r\n" % len(data) + data
        while time.monotonic() < until:
            writer.write(request)
            last, buffer = time.monotonic(), b""
            while b"[DONE]" not in buffer:
                data_read = await reader.read(65536)
                if not data_read:
                    raise EOFError(buffer[-300:])
                now = time.monotonic()
                if self.is_counting:
                    num = data_read.count(b"data: ")
                    self.num_chunks += num
                    self.gaps.append(now - last)
                last = now
                buffer = buffer[-2000:] + data_read
        writer.close()

    async def run(self, port: int, streams: int, begin: float, end: float) -> None:
        async def count() -> None:
            await asyncio.sleep(max(0.0, begin - time.monotonic()))
            self.is_counting = True
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            self.is_counting = False

        loads = [self.stream(port, number, end) for number in range(streams)]
        await asyncio.gather(count(), *loads)


def run_client(port: int, streams: int, begin: float, end: float) -> int:
    reader = Reader()
    asyncio.run(reader.run(port, streams, begin, end))
    gaps = sorted(reader.gaps)
    p99 = gaps[int(0.99 * len(gaps))] if gaps else 0.0
    print(json.dumps({"num_chunks": reader.num_chunks, "p99_gap_s": p99}))
    return 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_tokens(port: int) -> float:
    """That the front has sent, by its own count of them."""
    import urllib.request

    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = re.findall(r"^openspec:inter_token_latency_seconds_count\S* (\S+)$", text, re.M)
    return sum(map(float, found))


def measure(args: argparse.Namespace, port: int, pid: int, streams: int) -> dict[str, object]:
    """One number of streams."""
    begin = time.monotonic() + WARM_UP_S
    end = begin + args.seconds
    line = [sys.executable, "-m", "bench.front_load", "--client", str(port)]
    shares = [len(range(n, streams, args.clients)) for n in range(args.clients)]
    clients = [
        subprocess.Popen([*line, f"{share},{begin},{end}"], stdout=subprocess.PIPE, text=True)
        for share in shares
        if share > 0
    ]
    time.sleep(max(0.0, begin - time.monotonic()))
    tokens, cpu, since = num_tokens(port), cpu_s(pid), time.monotonic()
    time.sleep(args.seconds)
    tokens, cpu, seconds = num_tokens(port) - tokens, cpu_s(pid) - cpu, time.monotonic() - since
    seen = [json.loads(client.communicate()[0]) for client in clients]
    offered = streams * TOKENS_PER_STEP / (args.step_ms / 1000)
    num_chunks = sum(one["num_chunks"] for one in seen)
    return {
        "streams": streams,
        "offered_tokens_per_s": round(offered),
        "tokens_per_s": round(tokens / seconds),
        "share": round(tokens / seconds / offered, 3),
        "front_cores": round(cpu / seconds, 3),
        "front_us_per_token": round(1e6 * cpu / tokens, 1),
        "chunks_per_s": round(num_chunks / args.seconds),
        "p99_gap_ms": round(1000 * max(one["p99_gap_s"] for one in seen), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--streams", default="64,128,256")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=max(1, (os.cpu_count() or 2) // 4))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return run_server(args.rest, args.profile)
    if args.client is not None:
        streams, begin, end = args.rest[0].split(",")
        return run_client(args.client, int(streams), float(begin), float(end))
    port = free_port()
    rows = []
    with started(args, port) as pid:
        for streams in map(int, args.streams.split(",")):
            rows.append(measure(args, port, pid, streams))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if args.json:
        config = {"engines": args.engines, "step_ms": args.step_ms, "seconds": args.seconds}
        config |= {"tokens_per_step": TOKENS_PER_STEP, "clients": args.clients}
        result = {
            "environment": environment({**vars(args), "json": None}, {}),
            "config": config,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
