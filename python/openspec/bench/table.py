"""The report on the terminal. A speed whose texts are not the plain ones is not shown."""

from __future__ import annotations

from collections.abc import Sequence

from openspec.bench.report import Identity, Latency, Speedup
from openspec.bench.results import MethodReport
from openspec.messages import (
    SpecDecodeStats,
    acceptance_per_position,
    acceptance_rate,
    mean_acceptance_length,
)

_HEADINGS = (
    "workload",
    "conc",
    "method",
    "tok/s",
    "vs plain",
    "TTFT ms",
    "ms/token",
    "gap ms",
    "accepted",
    "length",
    "identical",
)
_LEFT = {"workload", "method"}
_BAR_WIDTH = 20
_BLOCKS = " ▏▎▍▌▋▊▉█"


def render_table(reports: Sequence[MethodReport]) -> str:
    """One line per method and cell; latencies are median / 99th percentile."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    previous: tuple[str, int] | None = None
    for report in reports:
        cell = (report.workload, report.concurrency)
        names = (report.workload, str(report.concurrency)) if cell != previous else ("", "")
        rows.append((*names, report.method, *_figures(report)))
        previous = cell
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = []
    for row in rows:
        cells = (
            text.ljust(width) if heading in _LEFT else text.rjust(width)
            for text, width, heading in zip(row, widths, _HEADINGS, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _figures(report: MethodReport) -> tuple[str, ...]:
    identity = f"{report.identity.num_identical}/{report.identity.num_requests}"
    if not report.is_shown:
        return ("-",) * 7 + (identity,)
    figures = report.figures
    return (
        f"{figures.tokens_per_s:.1f}",
        _speedup(report.speedup),
        _latency(figures.ttft),
        _latency(figures.tpot),
        _latency(figures.gap),
        *_acceptance(figures.speculation),
        identity,
    )


def _speedup(speedup: Speedup | None) -> str:
    if speedup is None:
        return ""
    return f"{speedup.median:.2f}x ({speedup.low:.2f}-{speedup.high:.2f})"


def _latency(latency: Latency) -> str:
    if latency.p99 == 0:
        return ""
    digits = 2 if latency.p50 < 10 else 1
    return f"{latency.p50:.{digits}f} / {latency.p99:.{digits}f}"


def _acceptance(speculation: SpecDecodeStats) -> tuple[str, str]:
    if not speculation.num_drafts:
        return "", ""
    return f"{acceptance_rate(speculation):.1%}", f"{mean_acceptance_length(speculation):.2f}"


def render_positions(reports: Sequence[MethodReport]) -> str:
    """Bars: the share of drafts whose token at each position was accepted, per cell."""
    blocks = []
    for report in reports:
        per_position = acceptance_per_position(report.figures.speculation)
        if not per_position:
            continue
        title = f"Accepted by position, {report.method}, {report.workload} c={report.concurrency}:"
        bars = [f"  {at:>2} {_bar(share)} {share:6.1%}" for at, share in enumerate(per_position)]
        blocks.append("\n".join((title, *bars)))
    return "\n".join(blocks)


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(_BAR_WIDTH)


def render_identity(identity: Identity, failures: Sequence[MethodReport]) -> str:
    """The line that makes the speeds worth reading, and where texts part if they do."""
    lines = [f"{identity.num_identical}/{identity.num_requests} identical to plain"]
    for report in failures:
        divergence = report.identity.first_divergence
        if divergence is not None:
            lines.append(
                f"  {report.method}, {report.workload} c={report.concurrency}: request "
                f"{divergence.request} parts at token {divergence.position}: expected "
                f"{divergence.expected}, found {divergence.found}"
            )
    return "\n".join(lines)
