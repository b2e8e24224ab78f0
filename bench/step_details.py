"""What `"speculative": {"detailed": true}` costs, on and off.

    python -m bench.step_details [--settings NAME=VALUE ...] [--before TREE] [--json FILE]

One server answers the same requests with details and without, in turns whose order changes. With
`--before`, a checkout of an older commit that holds its own build, a server of that tree takes
turns with this one's, both without details. Beside tokens per second the processor time of the
server's processes is compared: other work on the machine hardly changes that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from openspec.bench.client import Address
from openspec.bench.environment import environment
from openspec.bench.load import RequestSettings, run_load
from openspec.bench.server import ServerUnderTest, describe, free_port, get
from openspec.bench.workloads import Workload, build_workload

TREE = Path(__file__).resolve().parents[1]
Turn = tuple[float, float]
"""(tokens per second, processor time per token in microseconds)."""


@contextlib.contextmanager
def server_of(tree: Path, settings: Sequence[str]) -> Iterator[tuple[ServerUnderTest, int]]:
    """A server that runs a tree's package, and its process id."""
    port = free_port()
    values = dict(setting.split("=", 1) for setting in settings)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        json.dump({**values, "port": port}, file)
    process = subprocess.Popen(
        [sys.executable, "-m", "openspec.serve", "--config", file.name],
        env={**os.environ, "PYTHONPATH": str(tree / "python")},
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                get(Address("127.0.0.1", port), "/ready")
                break
            time.sleep(0.2)
        Path(file.name).unlink()
        yield describe(Address("127.0.0.1", port)), process.pid
    finally:
        process.terminate()
        process.wait()


def processor_s(pid: int) -> float:
    """Of the threads of a process and its children, all that are alive, to the nanosecond."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    used_ns = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    return used_ns / 1e9 + sum(processor_s(int(child)) for child in children)


def measure(
    server: ServerUnderTest, pid: int, workload: Workload, requests: int, tokens: int, on: bool
) -> Turn:
    """One turn."""
    settings = RequestSettings(
        model=server.model,
        max_tokens=tokens,
        temperature=0.0,
        seed=0,
        ignore_eos=True,
        detailed=on,
    )
    before = processor_s(pid)
    result = run_load(
        server.address,
        workload,
        requests,
        settings,
        speculative=True,
        cache_salt=secrets.token_hex(8),
    )
    used = processor_s(pid) - before
    return result.tokens_per_s, used / result.output_tokens * 1e6


def compared(
    first: Callable[[], Turn], second: Callable[[], Turn], turns: int
) -> dict[str, object]:
    """Medians of both, and of the second to the first within a turn."""
    first(), second()  # warms up
    pairs: list[tuple[Turn, Turn]] = []
    for turn in range(turns):
        if turn % 2:
            other = second()
            pairs.append((first(), other))
        else:
            pairs.append((first(), second()))
    report: dict[str, object] = {}
    for index, name in enumerate(("tokens_per_s", "processor_us_per_token")):
        report[name] = [round(median(pair[side][index] for pair in pairs), 2) for side in (0, 1)]
        ratios = [pair[1][index] / pair[0][index] for pair in pairs]
        report[f"{name}_ratio"] = round(median(ratios), 4)
        report[f"{name}_ratios"] = [round(ratio, 4) for ratio in ratios]
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--settings", nargs="*", default=[], help="of the server, NAME=VALUE")
    parser.add_argument("--tree", type=Path, default=TREE, help="whose server; default: this one")
    parser.add_argument("--before", type=Path, help="an older tree with its own build")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    report: dict[str, object] = {}
    with contextlib.ExitStack() as stack:
        server, pid = stack.enter_context(server_of(args.tree, args.settings))
        workload = build_workload(
            "mixed", 2 * args.requests, seed=0, vocab_size=server.vocab_size, input_len=64
        )

        def turn(of: ServerUnderTest, at: int, on: bool) -> Callable[[], Turn]:
            return lambda: measure(of, at, workload, args.requests, args.max_tokens, on)

        off, on = turn(server, pid, False), turn(server, pid, True)
        report["on against off"] = compared(off, on, args.turns)
        if args.before is not None:
            old, old_pid = stack.enter_context(server_of(args.before, args.settings))
            report["off against before"] = compared(turn(old, old_pid, False), off, args.turns)
        flags = {name: str(value) for name, value in vars(args).items() if name != "json"}
        report["environment"] = environment(dict(flags), server.info)
    for name, part in report.items():
        if isinstance(part, dict) and name != "environment":
            print(name, {key: part[key] for key in part if not key.endswith("ratios")})
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
