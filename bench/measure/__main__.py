"""Measures one thing on the machine at hand; `python -m bench.measure CASE --help` has the flags.

    python -m bench.measure ready --build old=OLD/site --build new=build/gpu/site \\
        --with "plain=--model M" --with "dflash=--model M --method dflash --draft-model H"

    python -m bench.measure tasks --model M --data DATA --build old=OLD --build new=. --turns 3

`ready`, `prompts`, `turns` and `agents` take any number of servers: each --build with each --with,
and each --command. A build is a checkout with its own .venv, a virtual environment, or a folder
for PYTHONPATH. A command may begin with variables: --command "old=NAME=1 python -m openspec.serve".
--host and --port are added to every command. Ratios are to the first server.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.measure.grammar_cases import forced, masks
from bench.measure.server_cases import agents, prompts, ready, turns
from bench.measure.servers import sides_of
from bench.measure.task_cases import tasks
from bench.measure.task_prompts import KINDS

from openspec.bench.environment import environment
from openspec.bench.server import leave_on_sigterm
from openspec.bench.workloads import workload_names
from openspec.errors import ConfigError

OF_SERVERS = {case.__name__: case for case in (ready, prompts, turns, agents)}
WITHOUT_SERVERS = {case.__name__: case for case in (masks, forced, tasks)}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = whole.add_subparsers(dest="case", required=True)
    parts = {}
    for name, case in (OF_SERVERS | WITHOUT_SERVERS).items():
        line = (case.__doc__ or "").split("\n\n")[0]
        part = parts[name] = cases.add_parser(name, help=line, description=case.__doc__)
        part.add_argument("--turns", type=int, default=5, help="that count, of each side")
        part.add_argument("--json", type=Path, help="where to record the figures")
        if name in OF_SERVERS:
            part.add_argument("--with", action="append", default=[], metavar="NAME=FLAGS")
            part.add_argument("--command", action="append", default=[], metavar="NAME=COMMAND")
        if name in OF_SERVERS or name == "tasks":
            part.add_argument("--build", action="append", default=[], metavar="NAME=PLACE")
            part.add_argument(
                "--python", default=sys.executable, help="of builds without their own"
            )
    parts["prompts"].add_argument("--lengths", type=int, nargs="+", default=[16, 550, 2048])
    parts["agents"].add_argument("--agents", type=int, default=8)
    parts["agents"].add_argument("--system", type=int, default=4000, help="tokens they share")
    parts["agents"].add_argument("--own", type=int, default=60, help="tokens of each")
    parts["agents"].add_argument("--drafts", action=argparse.BooleanOptionalAction, default=True)
    parts["masks"].add_argument("--vocabulary", type=Path, help="checkpoint, or file of tiktoken's")
    parts["masks"].add_argument("--vocab-size", type=int, default=151936)
    parts["forced"].add_argument("--model")
    parts["forced"].add_argument(
        "--runs", nargs="+", default=["none", "ngram"], metavar="METHOD[:DRAFT_MODEL]"
    )
    parts["tasks"].add_argument("--model")
    parts["tasks"].add_argument("--method", default="ngram")
    parts["tasks"].add_argument("--data", type=Path, help="folder of GSM8K's and MT-bench's files")
    parts["tasks"].add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parts["tasks"].add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parts["tasks"].add_argument("--singles", type=int, default=3, help="prompts for one request")
    for name, counts in (("turns", [1, 16]), ("forced", [1, 16]), ("tasks", [1, 8])):
        parts[name].add_argument("--concurrency", type=int, nargs="+", default=counts)
        parts[name].add_argument("--max-tokens", type=int, default=128)
    parts["turns"].add_argument(
        "--num-prompts", type=int, help="default: two of each request, at least 8"
    )
    parts["turns"].add_argument("--temperature", type=float, default=0.0)
    parts["turns"].add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="full lengths"
    )
    parts["turns"].add_argument(
        "--workload",
        nargs="+",
        default=["mixed"],
        help=f"of {', '.join(workload_names())}, or files of JSON lines, .jsonl",
    )
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 where a server does not come up or a flag is wrong."""
    args = parser().parse_args(argv)
    leave_on_sigterm()
    try:
        if args.case in OF_SERVERS:
            sides = sides_of(args.build, vars(args)["with"], args.command, args.python)
            report = OF_SERVERS[args.case](sides, args)
        else:
            report = WITHOUT_SERVERS[args.case](args)
    except ConfigError as error:
        print(f"bench.measure: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1))
    if args.json is not None:
        flags = {name: value for name, value in vars(args).items() if name != "json"}
        whole = {"environment": environment(flags, {}), **report}
        args.json.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
