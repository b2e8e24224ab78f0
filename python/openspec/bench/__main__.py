"""`python -m openspec.bench`: exits 0, 1 if any text differs from plain decoding's, 2 on errors."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from openspec.bench.bench_config import BenchPlan, parse_arguments
from openspec.bench.client import ClientError
from openspec.bench.environment import environment
from openspec.bench.results import report_cell, total_identity, write_json
from openspec.bench.run import run_benchmark, server_of
from openspec.bench.server import ServerUnderTest, leave_on_sigterm
from openspec.bench.table import render_identity, render_positions, render_table
from openspec.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        plan = parse_arguments(argv)
        with server_of(plan) as server:
            return _benchmark(plan, server)
    except (ConfigError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _benchmark(plan: BenchPlan, server: ServerUnderTest) -> int:
    flags: dict[str, object] = {
        **dataclasses.asdict(plan.bench),
        **plan.server_settings,
        "method": plan.engine.method,
    }
    del flags["json"]
    where = environment(flags, server.info)
    print(_headline(where, server, plan), flush=True)
    cells = run_benchmark(plan, server)
    reports = [report for cell in cells for report in report_cell(cell, plan.methods)]
    identity = total_identity(reports)
    failures = [report for report in reports if report.is_gated and not report.identity.holds]
    if plan.bench.json is not None:
        try:
            write_json(Path(plan.bench.json), where, reports)
        except OSError as error:
            raise ConfigError(f"json: {error}") from error
    print(render_table(reports))
    positions = render_positions([report for report in reports if report.is_shown])
    if positions:
        print("\n" + positions)
    print("\n" + render_identity(identity, failures))
    return 1 if failures else 0


def _headline(where: dict[str, object], server: ServerUnderTest, plan: BenchPlan) -> str:
    config = plan.bench
    commit = f", commit {where['commit']}" if where["commit"] else ""
    return (
        f"{where['cpu']}, {where['cores']} cores{commit}\n"
        f"model {server.model}, method {plan.engine.method}; at least {config.num_prompts} "
        f"prompts x {config.repeats} turns, up to {config.max_tokens} tokens, temperature "
        f"{config.temperature:g}"
    )


if __name__ == "__main__":
    leave_on_sigterm()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars, where the terminal has none
    sys.exit(main())
