"""The case of tasks: speculation against plain decoding on seven kinds of prompts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypedDict

from bench.measure import task_engine
from bench.measure.server_cases import Report, spread
from bench.measure.servers import build_at, named
from bench.measure.task_prompts import KINDS, Turns

from openspec.errors import ConfigError

Message = dict[str, str]


class Answers(TypedDict):
    """What `task_engine` says."""

    wall_s: float
    processor_s: float
    token_ids: list[list[int]]
    texts: list[str]
    steps: int
    drafted: int
    accepted: int


class Engine:
    """One build's engine, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(
        self, conversations: Sequence[Sequence[Message]], max_tokens: int, **how: bool
    ) -> Answers:
        """Greedy answers: with `drafts` or without, all conversations `at_once` or not.

        Raises:
            ConfigError: the engine did not start, or has ended.
        """
        job = {"conversations": conversations, "max_tokens": max_tokens, **how}
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(job), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("an engine ended; what it wrote before says why")
        answers: Answers = json.loads(line)
        return answers


def tasks(args: argparse.Namespace) -> Report:
    """Time of plain decoding over time with drafts, on seven kinds of prompts, of builds in turn.

    Prompts are in the prefix cache, so decoding alone is timed. Plain decoding is the last build's.
    Ratios are of processor time, which hardly depends on what else the machine does, and of wall
    time, which says more on a quiet one. Texts must be equal.
    """
    if args.data is None:
        raise ConfigError("--data: the folder with gsm8k_test.jsonl and mt_bench.jsonl")
    builds = dict(map(named, args.build)) or {"this": str(Path(__file__).parents[2])}
    report: Report = {}
    for num_threads in args.threads:
        settings = {
            "model": args.model,
            "method": args.method,
            "num_threads": num_threads,
            "max_num_seqs": max(args.concurrency),
        }
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(started(Path(place), args.python, settings))
                for name, place in builds.items()
            }
            for kind in args.only:
                for count in args.concurrency:
                    asked = list(islice(KINDS[kind](args.data), max(count, args.singles)))
                    name = f"{kind}, {count} requests, {num_threads} threads"
                    report[name] = one_task(engines, asked, count, args)
                    print(name, json.dumps(report[name]), flush=True)
    return report


def one_task(
    engines: Mapping[str, Engine],
    asked: Sequence[Turns],
    count: int,
    args: argparse.Namespace,
) -> Report:
    """All conversations at once, or one after the other for one request."""
    plain = list(engines.values())[-1]
    conversations: list[list[Message]] = [[user(turns[0])] for turns in asked]
    for turn in range(1, len(asked[0])):
        said = plain.answer(conversations, args.max_tokens, drafts=False, at_once=count > 1)
        for turns, messages, text in zip(asked, conversations, said["texts"], strict=True):
            messages += [{"role": "assistant", "content": text}, user(turns[turn])]
    for engine in engines.values():  # from here on the prompts are cached
        engine.answer(conversations, 2, drafts=True, at_once=count > 1)
    names = ("plain", *engines)
    processor: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    counts: dict[str, dict[str, int]] = {}
    for _ in range(args.turns):
        texts: list[list[list[int]]] = []
        for name, engine in {"plain": plain, **engines}.items():
            answers = engine.answer(
                conversations, args.max_tokens, drafts=name != "plain", at_once=count > 1
            )
            texts.append(answers["token_ids"])
            processor[name].append(answers["processor_s"])
            wall[name].append(answers["wall_s"])
            counts[name] = {
                "steps": answers["steps"],
                "drafted": answers["drafted"],
                "accepted": answers["accepted"],
            }
        if any(text != texts[0] for text in texts):
            raise AssertionError(f"texts differ between {', '.join(names)}")
    return {
        "ratio": {name: ratio(processor, name) for name in engines},
        "wall_ratio": {name: ratio(wall, name) for name in engines},
        "processor_s": {name: round(median(values), 3) for name, values in processor.items()},
        "tokens": sum(map(len, texts[0])),
        "last_turn": counts,
    }


def ratio(seconds: Mapping[str, Sequence[float]], name: str) -> dict[str, object]:
    """Plain decoding's time over the named engine's, turn by turn."""
    return spread([a / b for a, b in zip(seconds["plain"], seconds[name], strict=True)], 3)


def user(text: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": text}


@contextlib.contextmanager
def started(place: Path, python: str, settings: Mapping[str, object]) -> Iterator[Engine]:
    """The engine of the build at a place; its process has ended on leaving."""
    interpreter, environment = build_at(place, python)
    with subprocess.Popen(
        [interpreter, task_engine.__file__, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    ) as process:
        try:
            yield Engine(process)
        finally:
            process.terminate()
