"""A server beside its steps: time to ready, memory, first tokens, and what a long prompt does to
streams that are running.

    python -m bench.server_behaviour --model DIR --json FILE

Starts `python -m openspec.serve` twice, the second time from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from openspec.bench.environment import environment
from openspec.bench.load import LoadResult, RequestSettings, run_load
from openspec.bench.server import ServerUnderTest, started_server
from openspec.bench.workloads import Prompt, Workload
from openspec.settings import Raw

SHORT_PROMPT, LONG_PROMPT = 550, 4096
NUM_STREAMS, STREAM_TOKENS = 8, 512


def random_prompts(vocab_size: int, length: int, count: int) -> Workload:
    """Prompts that are in no prefix cache."""
    draw = random.Random(secrets.randbits(64))
    return Workload(
        "random",
        [
            Prompt(token_ids=[draw.randrange(vocab_size) for _ in range(length)])
            for _ in range(count)
        ],
        ignore_eos=True,
    )


def load(server: ServerUnderTest, work: Workload, concurrency: int, max_tokens: int) -> LoadResult:
    """Plain decoding, so that a chunk is a token."""
    settings = RequestSettings(
        model=server.model, max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True
    )
    return run_load(
        server.address,
        work,
        concurrency,
        settings,
        speculative=False,
        cache_salt=secrets.token_hex(8),
    )


def first_token_ms(server: ServerUnderTest, length: int, count: int) -> dict[str, float]:
    """One request at a time."""
    result = load(server, random_prompts(server.vocab_size, length, count), 1, 2)
    times = sorted(1e3 * (one.chunk_s[0] - one.sent_s) for one in result.completions)
    return {"median": round(median(times), 2), "longest": round(times[-1], 2)}


def gaps_ms(result: LoadResult, begin: float, end: float) -> list[float]:
    """Times between two chunks of a stream that both came in [begin, end]."""
    return [
        1e3 * (after - before)
        for one in result.completions
        for before, after in zip(one.chunk_s, one.chunk_s[1:], strict=False)
        if begin <= before and after <= end
    ]


def arrival(server: ServerUnderTest, turns: int) -> dict[str, float]:
    """The longest gap of running streams without a newcomer, and while a long prompt computes."""
    calm: list[float] = []
    disturbed: list[float] = []
    first_token: list[float] = []
    for _ in range(turns):
        streams: list[LoadResult] = []

        def run_streams(into: list[LoadResult] = streams) -> None:
            work = random_prompts(server.vocab_size, 64, NUM_STREAMS)
            into.append(load(server, work, NUM_STREAMS, STREAM_TOKENS))

        thread = threading.Thread(target=run_streams)
        thread.start()
        time.sleep(0.5)
        newcomer = load(server, random_prompts(server.vocab_size, LONG_PROMPT, 1), 1, 2)
        thread.join()
        (result,) = streams
        sent = newcomer.completions[0].sent_s
        answered = newcomer.completions[0].chunk_s[0]
        started = max(one.chunk_s[0] for one in result.completions)
        ended = min(one.chunk_s[-1] for one in result.completions)
        if not started < sent < answered < ended:
            raise RuntimeError("the long prompt did not arrive while all streams were running")
        first_token.append(1e3 * (answered - sent))
        disturbed += gaps_ms(result, sent - 0.01, answered + 0.05)
        calm += gaps_ms(result, started + 0.05, sent)
    return {
        "streams": NUM_STREAMS,
        "prompt_tokens": LONG_PROMPT,
        "first_token_ms": round(median(first_token), 1),
        "median_gap_ms": round(median(calm), 2),
        "longest_gap_without_ms": round(max(calm), 2),
        "longest_gap_with_ms": round(max(disturbed), 2),
        "longest_delay_ms": round(max(disturbed) - median(calm), 2),
    }


def descendants(parent: int) -> list[int]:
    """Process ids below a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    for pid in parents:
        at = pid
        while at in parents and at != parent:
            at = parents[at]
        if at == parent and pid != parent:
            found.append(pid)
    return found


def memory_mb() -> dict[str, float]:
    """Resident memory of all processes below this one: in all, and what no file backs."""
    total = anonymous = 0.0
    for pid in descendants(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        values = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
        total += int(values.get("VmRSS", 0)) / 1024
        anonymous += int(values.get("RssAnon", 0)) / 1024
    return {"resident": round(total, 1), "anonymous": round(anonymous, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", help="checkpoint folder; default: the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args(argv)
    settings: dict[str, Raw] = {"device": args.device, "max_model_len": 8192}
    if args.model is not None:
        settings["model"] = args.model

    ready_s: list[float] = []
    record: dict[str, object] = {}
    for is_last in (False, True):
        start = time.monotonic()
        with started_server(settings) as server:
            ready_s.append(round(time.monotonic() - start, 2))
            if not is_last:
                continue
            record["environment"] = environment(vars(args) | {"json": None}, server.info)
            record["memory_mb"] = memory_mb()
            load(server, random_prompts(server.vocab_size, SHORT_PROMPT, 2), 1, 8)
            record["first_token_ms"] = {
                str(length): first_token_ms(server, length, 20) for length in (16, SHORT_PROMPT)
            }
            record["long_prompt"] = arrival(server, args.turns)
    record["ready_s"] = ready_s
    print(json.dumps({name: record[name] for name in record if name != "environment"}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
