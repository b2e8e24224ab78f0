"""Two servers in turn under the same load: what flags cost a user.

    python -m bench.compare_servers --first watchdog_timeout=60 --second watchdog_timeout=0

Both run at the same time and are asked in turns, so that whatever else slows the machine slows
both. Settings are those of `python -m openspec.serve`, as NAME=VALUE. What a second replica gives:

    python -m bench.compare_servers --both num_threads=1 --first replicas=2 --second replicas=1 \\
        --turns 5 --concurrency 16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from openspec.bench.environment import environment
from openspec.bench.load import RequestSettings, run_load
from openspec.bench.server import ServerUnderTest, started_server
from openspec.bench.workloads import Prompt, Workload
from openspec.settings import Raw

PROMPT_TOKENS = 64


def tokens_per_s(server: ServerUnderTest, concurrency: int, max_tokens: int) -> float:
    draw = random.Random(0)
    prompts = [
        Prompt(token_ids=[draw.randrange(server.vocab_size) for _ in range(PROMPT_TOKENS)])
        for _ in range(2 * concurrency)
    ]
    settings = RequestSettings(
        model=server.model, max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True
    )
    return run_load(
        server.address,
        Workload("random", prompts, ignore_eos=True),
        concurrency,
        settings,
        speculative=True,
        cache_salt=secrets.token_hex(8),
    ).tokens_per_s


def parsed(settings: Sequence[str]) -> dict[str, Raw]:
    return dict(setting.split("=", 1) for setting in settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--both", nargs="*", default=[], help="settings of both, NAME=VALUE")
    parser.add_argument("--first", nargs="*", default=[])
    parser.add_argument("--second", nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    record: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(started_server(parsed([*args.both, *own])))
            for own in (args.first, args.second)
        ]
        record["environment"] = environment(vars(args) | {"json": None}, servers[0].info)
        for concurrency in args.concurrency:
            rates: list[list[float]] = [[], []]
            for turn in range(args.turns + 1):
                for which in (0, 1) if turn % 2 else (1, 0):
                    rate = tokens_per_s(servers[which], concurrency, args.max_tokens)
                    if turn > 0:  # the first warms up
                        rates[which].append(round(rate, 1))
            ratio = median(rates[0]) / median(rates[1])
            record[f"{concurrency} requests"] = {
                "first": rates[0],
                "second": rates[1],
                "ratio_of_medians": round(ratio, 4),
            }
            print(
                f"{concurrency} requests: {median(rates[0]):.0f} and {median(rates[1]):.0f}",
                end=" ",
            )
            print(f"tokens/s, ratio {ratio:.4f}")
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
