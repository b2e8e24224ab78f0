"""The report on the terminal. A speed whose texts are not the plain ones is not shown."""

from __future__ import annotations

from collections.abc import Container, Sequence

from openspec.bench.document import Run
from openspec.bench.report import Identity
from openspec.bench.results import MethodReport

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


TABLE_LEGEND = (
    "vs plain: median of the turns' ratios (least-most). a / b: median / 99th percentile.\n"
    "accepted: share of the draft tokens. length: tokens of a step with drafts, on average.\n"
    "identical: answers with plain decoding's tokens."
)


def render_table(runs: Sequence[Run]) -> str:
    """One line per method and cell; `TABLE_LEGEND` says what the columns are."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    previous: tuple[str, int] | None = None
    for run in runs:
        names = (run.workload, str(run.concurrency)) if run.cell != previous else ("", "")
        rows.append((*names, run.method, *_figures(run)))
        previous = run.cell
    return aligned(rows, _LEFT)


def aligned(rows: Sequence[tuple[str, ...]], left: Container[str]) -> str:
    """Columns under the headings of the first row; those named in `left` begin at the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            text.ljust(width) if heading in left else text.rjust(width)
            for text, width, heading in zip(row, widths, rows[0], strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _figures(run: Run) -> tuple[str, ...]:
    identity = f"{run.num_identical_to_plain}/{run.num_requests}"
    if not run.is_shown:
        return ("-",) * 7 + (identity,)
    return (
        f"{run.output_tokens_per_s:.1f}",
        _speedup(run),
        _latency(run.ttft_ms, run.ttft_ms_p99),
        _latency(run.tpot_ms, run.tpot_ms_p99),
        _latency(run.chunk_gap_ms, run.chunk_gap_ms_p99),
        "" if run.acceptance_rate is None else f"{run.acceptance_rate:.1%}",
        "" if run.mean_acceptance_length is None else f"{run.mean_acceptance_length:.2f}",
        identity,
    )


def _speedup(run: Run) -> str:
    if run.speedup is None:
        return ""
    low, high = run.speedup_range
    return f"{run.speedup:.2f}x ({low:.2f}-{high:.2f})"


def _latency(p50: float | None, p99: float | None) -> str:
    if not p50 or not p99:
        return ""
    digits = 2 if p50 < 10 else 1
    return f"{p50:.{digits}f} / {p99:.{digits}f}"


def render_positions(runs: Sequence[Run]) -> str:
    """Bars: of the drafts that reached a position the share accepted there, per cell."""
    blocks = []
    for run in runs:
        if not run.num_drafts or not run.is_shown:
            continue
        reached = run.num_drafts_per_pos or [run.num_drafts] * len(run.acceptance_per_position)
        title = (
            f"Accepted by position, {run.method}, {run.workload} c={run.concurrency}, of the drafts"
            f"{' that reached it' if run.num_drafts_per_pos else ''}:"
        )
        bars = [
            f"  {at:>2} {_bar(share)} {share:6.1%} of {num_drafts}"
            for at, (share, num_drafts) in enumerate(
                zip(run.acceptance_per_position, reached, strict=True), start=1
            )
            if num_drafts
        ]
        blocks.append("\n".join((title, *bars)))
    return "\n".join(blocks)


def render_sources(runs: Sequence[Run]) -> str:
    """Where drafts came from and the share accepted, per cell that had others than the method's."""
    lines = []
    for run in runs:
        if not run.has_sources or not run.is_shown:
            continue
        forced = run.num_forced_tokens, run.num_accepted_forced_tokens
        copied = run.num_copied_tokens, run.num_accepted_copied_tokens
        own = (
            run.num_draft_tokens - forced[0] - copied[0],
            run.num_accepted_tokens - forced[1] - copied[1],
        )
        shares = [
            f"{drafted} {source} ({accepted / drafted:.1%})"
            for source, (drafted, accepted) in (
                (f"of {run.method}", own),
                ("copied from the text", copied),
                ("forced by a grammar", forced),
            )
            if drafted
        ]
        lines.append(f"  {run.workload} c={run.concurrency}: {', '.join(shares)}")
    return "\n".join(["Draft tokens by source (accepted):", *lines]) if lines else ""


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(_BAR_WIDTH)


def render_identity(
    identity: Identity, failures: Sequence[MethodReport], *, is_peer: bool = False
) -> str:
    """The line that makes the speeds worth reading, and where texts part if they do."""
    what = "the same in every turn" if is_peer else "identical to plain"
    lines = [f"{identity.num_identical}/{identity.num_requests} {what}"]
    for report in failures:
        divergence = report.identity.first_divergence
        if divergence is not None:
            lines.append(
                f"  {report.method}, {report.workload} c={report.concurrency}: request "
                f"{divergence.request} parts at {divergence.unit} {divergence.position}: expected "
                f"{divergence.expected}, found {divergence.found}"
            )
    return "\n".join(lines)
