"""Cases that compare servers: time to ready, prompts, and the same requests to each in turn."""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

from bench.measure.servers import Running, Side, processor_s, started

from openspec.bench.load import LoadResult, RequestSettings, run_load
from openspec.bench.server import get
from openspec.bench.workloads import (
    Prompt,
    Workload,
    build_workload,
    load_dataset,
    random_prompts,
)

Report = dict[str, object]


def ready(sides: Sequence[Side], args: argparse.Namespace) -> Report:
    """Seconds from starting the process to the first 200 of /ready.

    The first turn reads the files into the page cache and does not count.
    """
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(args.turns + 1):
        for side in sides:
            with started(side) as server:
                print(
                    f"{side.name}: {server.ready_s:.2f} s{' (warms up)' * (turn == 0)}", flush=True
                )
                if turn:
                    times[side.name].append(server.ready_s)
    return {"ready_s": compared(times)}


def prompts(sides: Sequence[Side], args: argparse.Namespace) -> Report:
    """Milliseconds to the first token of random prompts, one request at a time."""
    report: Report = {}
    with all_started(sides) as servers:
        for length in args.lengths:
            times: dict[str, list[float]] = {name: [] for name in servers}
            for turn in range(args.turns + 2):
                for name, server in servers.items():
                    sent = random_prompts(1, turn, server.about.vocab_size, length)
                    work = Workload("random", sent, ignore_eos=True)
                    [answer] = load(server, work, 1, 2, speculative=False).completions
                    if turn >= 2:  # the others warm up
                        times[name].append(1e3 * (answer.chunk_s[0] - answer.sent_s))
            report[f"{length} tokens, first_token_ms"] = compared(times)
    return report


def agents(sides: Sequence[Side], args: argparse.Namespace) -> Report:
    """Milliseconds until all agents that start together have a token, and until one alone has.

    Their prompts begin with one system prompt, which is in no prefix cache, and end differently.
    """
    report: Report = {}
    with all_started(sides) as servers:
        for name, server in servers.items():
            times: dict[str, list[float]] = {"one": [], "all": []}
            for turn in range(args.turns + 1):
                size = server.about.vocab_size
                [system] = random_prompts(1, 2 * turn, size, args.system)
                ends = random_prompts(args.agents, 2 * turn + 1, size, args.own)
                begin = system.token_ids or []
                sent = [Prompt(token_ids=[*begin, *(end.token_ids or [])]) for end in ends]
                for of, some in (("one", sent[:1]), ("all", sent)):
                    work = Workload("agents", some, ignore_eos=True)
                    result = load(server, work, len(some), 2, speculative=args.drafts)
                    waits = [answer.chunk_s[0] - answer.sent_s for answer in result.completions]
                    if turn:  # the first one warms up
                        times[of].append(1e3 * max(waits))
            ratios = [a / b for a, b in zip(times["all"], times["one"], strict=True)]
            report[name] = {
                "one_ms": spread(times["one"], 1),
                "all_ms": spread(times["all"], 1),
                "ratio": spread(ratios, 3),
            }
    return report


def turns(sides: Sequence[Side], args: argparse.Namespace) -> Report:
    """Tokens per second and a step, and processor time, of the same requests to each side in turn.

    Processor time is the server's and hardly depends on what else the machine does. All servers
    run at once, so on a GPU their flags have to share its memory.
    """
    report: Report = {}
    with all_started(sides) as servers:
        for name, count in product(args.workload, args.concurrency):
            report[f"{Path(name).stem}, {count} requests"] = in_turn(servers, name, count, args)
    return report


def in_turn(
    servers: Mapping[str, Running], workload: str, count: int, args: argparse.Namespace
) -> Report:
    """`turns` of one workload, so many requests at a time."""
    size = min(server.about.vocab_size for server in servers.values())
    num_prompts = args.num_prompts or max(8, 2 * count)
    if workload.endswith(".jsonl"):
        work = load_dataset(Path(workload), num_prompts, 0)
    else:
        work = build_workload(workload, num_prompts, 0, vocab_size=size, input_len=64)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    used: dict[str, list[float]] = {name: [] for name in servers}
    lengths: dict[str, list[float]] = {name: [] for name in servers}
    said: dict[str, list[list[int]]] = {}
    how = {"temperature": args.temperature, "ignore_eos": args.ignore_eos or work.ignore_eos}
    for turn in range(args.turns + 1):
        for name, server in servers.items():
            before_s, before = processor_s(server.pid), engine_steps(server)
            result = load(server, work, count, args.max_tokens, **how)
            said[name] = [answer.token_ids for answer in result.completions]
            if turn:  # the first one warms up
                rates[name].append(result.tokens_per_s)
                each_s = (processor_s(server.pid) - before_s) / result.output_tokens
                used[name].append(1e6 * each_s)
                lengths[name].append(result.output_tokens / (engine_steps(server) - before))
    first = next(iter(said.values()))
    return {
        "tokens_per_s": compared(rates),
        "processor_us_per_token": compared(used),
        "tokens_per_step": compared(lengths),
        "answers_equal_to_the_first_sides": {
            name: sum(a == b for a, b in zip(own, first, strict=True)) for name, own in said.items()
        },
        "answers": len(first),
    }


def engine_steps(server: Running) -> float:
    """So far, of all its engines; prompts' steps among them."""
    lines = get(server.about.address, "/metrics").decode().splitlines()
    steps = [line for line in lines if line.startswith("openspec:engine_steps_total")]
    return sum(float(line.split()[-1]) for line in steps)


@contextlib.contextmanager
def all_started(sides: Sequence[Side]) -> Iterator[dict[str, Running]]:
    """Servers of all sides, by name."""
    with contextlib.ExitStack() as stack:
        yield {side.name: stack.enter_context(started(side)) for side in sides}


def load(
    server: Running,
    work: Workload,
    concurrency: int,
    max_tokens: int,
    speculative: bool = True,
    temperature: float = 0.0,
    ignore_eos: bool = True,
) -> LoadResult:
    """Answers to prompts that are in no prefix cache."""
    settings = RequestSettings(
        model=server.about.model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=0,
        ignore_eos=ignore_eos,
    )
    salt = secrets.token_hex(8)
    address = server.about.address
    return run_load(address, work, concurrency, settings, speculative=speculative, cache_salt=salt)


def compared(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, object]]:
    """The median and range of each side, and of its ratio to the first side within a turn."""
    first = next(iter(values.values()))
    report: dict[str, dict[str, object]] = {}
    for name, own in values.items():
        report[name] = spread(own, 3) | {"all": [round(value, 3) for value in own]}
        if own is not first:
            report[name]["ratio"] = spread([a / b for a, b in zip(own, first, strict=True)], 4)
    return report


def spread(values: Sequence[float], digits: int) -> dict[str, object]:
    """Median, least and most."""
    figures = {"median": median(values), "least": min(values), "most": max(values)}
    return {name: round(value, digits) for name, value in figures.items()}
