"""Acceptance by position, distributions of latency, and the row budget's choices."""

from __future__ import annotations

from collections.abc import Sequence

from openspec.bench.document import Document
from openspec.bench.html.markup import LETTERS, number, requests, row, table, td
from openspec.bench.html.svg import (
    Axes,
    Series,
    Spread,
    Value,
    line_chart,
    position_bars,
    spread_chart,
    tint_legend,
    words,
)


def positions(documents: Sequence[Document]) -> str:
    """Acceptance by position and workload."""
    charts, rows = [], []
    for document_at, document in enumerate(documents):
        letter = f"{LETTERS[document_at]}: " if len(documents) == 2 else ""
        drawn: set[tuple[str, str]] = set()
        for at, run in enumerate(document.runs):
            if not run.num_drafts or not run.is_shown:
                continue
            place = f"{document_at}/runs/{at}/acceptance_per_position"
            name = f"{letter}{run.workload}" + (f", {run.method}" if letter else "")
            if is_first := (run.workload, run.method) not in drawn:
                drawn.add((run.workload, run.method))
                shares = [
                    Value(share, f"{place}/{position}")
                    for position, share in enumerate(run.acceptance_per_position)
                ]
                title = f"{name}, {requests(run.concurrency)}"
                width = max(460 if len(shares) > 8 else 230, 9 * len(title))
                charts.append(position_bars(title, shares, width))
            cells = [
                td(f"<bdi>{words(name)}</bdi>" if is_first else "", "w"),
                td(number(run.concurrency, f"{document_at}/runs/{at}/concurrency", 0), "w"),
            ]
            cells += [
                td(number(share, f"{place}/{position}", 1, "%"))
                for position, share in enumerate(run.acceptance_per_position)
            ]
            rows.append((cells, is_first))
    if not charts:
        return ""
    longest = max(len(cells) for cells, _ in rows)
    lines = [
        row([*cells, *[td("")] * (longest - len(cells))], is_first=is_first)
        for cells, is_first in rows
    ]
    headings = ["workload", "requests", *(str(position) for position in range(1, longest - 1))]
    return (
        "<h2>Acceptance by position</h2><p>The share of drafts whose token at a position, and all "
        f"before it, equalled the target's choice. {_base(documents)} The hues are those of the "
        f"demo and, paler, of <code>/ui</code>: {tint_legend()}</p>"
        f'<div class="charts">{"".join(charts)}</div>'
        f'<div class="dense">{table(headings, lines, num_words=2)}</div>'
    )


def _base(documents: Sequence[Document]) -> str:
    """What the shares are of."""
    drafted = [run for document in documents for run in document.runs if run.num_drafts]
    if all(run.num_drafts_per_pos for run in drafted):
        return "It is of the drafts that reached the position, which are those with a token there."
    if any(run.num_drafts_per_pos for run in drafted):
        return "One file's is of the drafts with a token there, the earlier one's of all drafts."
    return "It is of all drafts, also of those that were too short to have a token there."


def latencies(documents: Sequence[Document]) -> str:
    """Distributions of the time to the first token and of the time per token."""
    parts = []
    for key, title in (("ttft_ms", "Time to the first token"), ("tpot_ms", "Time per token")):
        charts = []
        workloads = dict.fromkeys(run.workload for document in documents for run in document.runs)
        for workload in workloads:
            if rows := _spreads(documents, workload, key):
                charts.append(spread_chart(f"{workload}", rows))
        if charts:
            parts.append(f'<h3>{title}</h3><div class="charts">{"".join(charts)}</div>')
    if not parts:
        return ""
    return (
        "<h2>Latency</h2><p>Dot: median. Box: the middle half of the requests. Line: 5th to 95th "
        "percentile; tick: 99th. Rows name the requests at a time. Files without percentiles show "
        "median and 99th.</p>" + "".join(parts)
    )


def _spreads(documents: Sequence[Document], workload: str, key: str) -> list[Spread]:
    rows = []
    cells = sorted(
        {run.concurrency for d in documents for run in d.runs if run.workload == workload}
    )
    for concurrency in cells:
        is_first = True
        for document_at, document in enumerate(documents):
            methods = list(dict.fromkeys(run.method for run in document.runs))
            for at, run in enumerate(document.runs):
                middle = getattr(run, key)
                if run.cell != (workload, concurrency) or not run.is_shown or not middle:
                    continue
                place = f"{document_at}/runs/{at}/{key}"
                found = {
                    name: Value(value, f"{place}_percentiles/{name}")
                    for name, value in getattr(run, f"{key}_percentiles").items()
                }
                found["50"] = Value(middle, place)
                found["99"] = Value(getattr(run, f"{key}_p99"), f"{place}_p99")
                letter = f"{LETTERS[document_at]} " if len(documents) == 2 else ""
                label = f"{letter}{run.method}"
                label = f"{concurrency} · {label}" if is_first else label
                colour = methods.index(run.method) + (2 * document_at if document_at else 0)
                rows.append(Spread(label, found, colour, begins_group=is_first))
                is_first = False
    return rows


def budgets(documents: Sequence[Document]) -> str:
    """Step times that the server measured at its start, and how many drafts the budget took."""
    parts = []
    for document_at, document in enumerate(documents):
        letter = f"{LETTERS[document_at]}: " if len(documents) == 2 else ""
        for proposes, what in (
            (False, "Step times"),
            (True, "Step times with the drafter at work"),
        ):
            series = _step_lines(document, document_at, proposes=proposes)
            if series:
                axes = Axes(
                    f"{letter}{what}, by rows and sequences",
                    "rows of a step (one for each sequence, and drafts)",
                    " ms",
                    digits=3,
                    is_log=True,
                )
                parts.append(f'<div class="charts">{line_chart(axes, series)}</div>')
                parts.append(_step_table(series))
        parts.append(_choices(document, document_at, letter))
    found = [part for part in parts if part]
    if not found:
        return ""
    return (
        "<h2>What the row budget chose</h2><p>openspec times its own steps when it starts, and "
        "takes as many drafts as make the most tokens a second. The last table shows the draft "
        "tokens of a sequence in a step, on average, and the share of its steps with any.</p>"
        + "".join(found)
    )


def _step_lines(document: Document, document_at: int, *, proposes: bool) -> list[Series]:
    times = document.server.get("step_times")
    lines: dict[int, dict[int, Value]] = {}
    for at, step in enumerate(times if isinstance(times, list) else []):
        if isinstance(step, dict) and step.get("proposes") is proposes:
            place = f"{document_at}/environment/server/step_times/{at}/milliseconds"
            line = lines.setdefault(int(step["num_seqs"]), {})
            line[int(step["num_rows"])] = Value(float(step["milliseconds"]), place)
    return [
        Series(f"{num} sequence{'s' * (num > 1)}", points, colour=1 + index % 5)
        for index, (num, points) in enumerate(sorted(lines.items()))
    ]


def _step_table(series: Sequence[Series]) -> str:
    columns = sorted({num_rows for line in series for num_rows in line.points})
    rows = []
    for line in series:
        cells = [td(words(line.label), "w")]
        for column in columns:
            value = line.points.get(column)
            cells.append(td("" if value is None else number(value.number, value.place, 2)))
        rows.append(row(cells))
    headings = ["ms by rows", *(str(column) for column in columns)]
    figures = table(headings, rows, num_words=1)
    return f'<details class="dense"><summary>As numbers</summary>{figures}</details>'


def _choices(document: Document, document_at: int, letter: str) -> str:
    runs = [
        (at, run)
        for at, run in enumerate(document.runs)
        if run.speedup is not None and run.draft_tokens_per_step is not None and run.is_shown
    ]
    if not runs:
        return ""
    rows = []
    previous = ("", "")
    for at, run in runs:
        place, name = f"{document_at}/runs/{at}", (run.workload, run.method)
        is_first, previous = name != previous, name
        cells = [
            td(f"<bdi>{words(f'{letter}{run.workload}')}</bdi>" if is_first else "", "w"),
            td(number(run.concurrency, f"{place}/concurrency", 0), "w"),
            td(number(run.draft_tokens_per_step, f"{place}/draft_tokens_per_step", 2)),
            td(number(run.steps_with_drafts, f"{place}/steps_with_drafts", 0, "%")),
        ]
        rows.append(row(cells, is_first=is_first))
    headings = ("workload", "requests", "draft tokens a step", "steps with drafts")
    return table(headings, rows, num_words=2)
