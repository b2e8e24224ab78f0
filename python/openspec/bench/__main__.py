"""`python -m openspec.bench`: exits 0, 1 if any text differs from plain decoding's, 2 on errors."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from openspec.bench.bench_config import BenchConfig, BenchPlan, parse_arguments
from openspec.bench.client import ClientError
from openspec.bench.compare import pairs_of, render_comparison
from openspec.bench.document import Document, as_document, read_document
from openspec.bench.environment import environment
from openspec.bench.html.page import report_page
from openspec.bench.results import document_of, json_text, report_cell, total_identity
from openspec.bench.run import methods_of, run_benchmark, server_of
from openspec.bench.server import ServerUnderTest, leave_on_sigterm
from openspec.bench.table import (
    TABLE_LEGEND,
    render_identity,
    render_positions,
    render_sources,
    render_table,
)
from openspec.errors import ConfigError

_NOT_OF_THE_RESULT = ("json", "html", "compare", "api_key")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        plan = parse_arguments(argv)
        if plan.bench.compare is not None:
            return _show(plan.bench, [read_document(Path(path)) for path in plan.bench.compare])
        with server_of(plan) as server:
            return _benchmark(plan, server)
    except (ConfigError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _show(config: BenchConfig, documents: Sequence[Document]) -> int:
    """Files of earlier runs: their tables, and a report if it is asked for."""
    if config.html is not None:
        _write("html", config.html, report_page(documents))
    if len(documents) == 2 and not pairs_of(*documents):
        raise ConfigError("compare: the files have no workload at the same concurrency in common")
    for document in documents:
        print(document.name)
        print(render_table(document.runs) + "\n")
    print(TABLE_LEGEND)
    if len(documents) == 2:
        print("\n" + render_comparison(*documents))
    return 0


def _benchmark(plan: BenchPlan, server: ServerUnderTest) -> int:
    methods, is_peer = methods_of(plan, server), not server.is_openspec
    flags: dict[str, object] = {
        **dataclasses.asdict(plan.bench),
        **plan.server_settings,
        "method": methods[-1],
    }
    for name in _NOT_OF_THE_RESULT:
        flags.pop(name, None)
    where = environment(flags, server.info)
    print(_headline(where, server, plan, methods), flush=True)
    cells = run_benchmark(plan, server)
    reports = [report for cell in cells for report in report_cell(cell, methods, is_peer=is_peer)]
    identity = total_identity(reports)
    failures = [report for report in reports if report.is_gated and not report.identity.holds]
    content = document_of(where, reports)
    document = as_document(content)
    if plan.bench.json is not None:
        _write("json", plan.bench.json, json_text(content))
    if plan.bench.html is not None:
        _write("html", plan.bench.html, report_page([document]))
    print(f"{render_table(document.runs)}\n\n{TABLE_LEGEND}")
    for block in (render_sources(document.runs), render_positions(document.runs)):
        if block:
            print("\n" + block)
    print("\n" + render_identity(identity, failures, is_peer=is_peer))
    return 1 if failures else 0


def _write(setting: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from error


def _headline(
    where: dict[str, object], server: ServerUnderTest, plan: BenchPlan, methods: Sequence[str]
) -> str:
    config = plan.bench
    commit = f", commit {where['commit']}" if where["commit"] else ""
    num_workloads = len(config.workloads) + (config.dataset is not None)
    num_runs = config.repeats * (len(methods) + (config.baseline != "none"))
    return (
        f"{where['cpu']}, {where['cores']} cores{commit}\n"
        f"model {server.model}, method {methods[-1]}; at least {config.num_prompts} "
        f"prompts x {config.repeats} turns, up to {config.max_tokens} tokens, temperature "
        f"{config.temperature:g}\n"
        f"{num_workloads * len(config.concurrency)} cells of {num_runs} runs"
    )


if __name__ == "__main__":
    leave_on_sigterm()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars, where the terminal has none
    sys.exit(main())
