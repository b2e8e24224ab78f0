"""All figures of a benchmark, and two benchmarks cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openspec.bench.compare import differences, pairs_of
from openspec.bench.document import Document, Run
from openspec.bench.html.markup import LETTERS, number, row, speed, table, td
from openspec.bench.html.summary import verdict
from openspec.bench.html.svg import Axes, Series, Value, line_chart, words

_HEADINGS = (
    *("workload", "requests", "method", "tokens/s", "vs plain"),
    *("first token ms", "99th", "ms/token", "99th", "accepted", "length", "equal"),
)


def tables(documents: Sequence[Document]) -> str:
    """All figures of each document."""
    parts = ["<h2>All figures</h2>"]
    for document_at, document in enumerate(documents):
        if len(documents) == 2:
            parts.append(f"<h3>{LETTERS[document_at]}: {words(document.name)}</h3>")
        parts.append(table(_HEADINGS, list(_run_rows(document_at, document)), num_words=3))
        if len(documents) == 2:
            parts.append(verdict(document))
    parts.append(
        '<p class="quiet">Medians and 99th percentiles in milliseconds. <i>First token</i> counts '
        "from sending the request, <i>ms/token</i> from the first chunk to the last. "
        "<i>Accepted</i> is the share of draft tokens, <i>length</i> the mean number of tokens "
        "of a step with drafts. A ratio is pale where its turns lie on both sides of 1: it may be "
        "chance.</p>"
    )
    return "\n".join(parts)


_SOURCES = (
    *("num_draft_tokens", "num_accepted_tokens", "num_copied_tokens"),
    *("num_accepted_copied_tokens", "num_forced_tokens", "num_accepted_forced_tokens"),
)
_SOURCE_HEADINGS = (
    *("workload", "requests", "method", "drafted", "accepted"),
    *("copied", "accepted", "forced", "accepted"),
)


def sources(documents: Sequence[Document]) -> str:
    """Where draft tokens came from, if not all are the method's."""
    letters = [f"{letter}: " if len(documents) == 2 else "" for letter in LETTERS]
    rows = [
        row(
            [
                td(f"{letters[document_at]}<bdi>{words(run.workload)}</bdi>", "w"),
                td(number(run.concurrency, f"{document_at}/runs/{at}/concurrency", 0), "w"),
                td(f"<bdi>{words(run.method)}</bdi>", "w"),
                *(
                    td(number(getattr(run, key), f"{document_at}/runs/{at}/{key}", 0))
                    for key in _SOURCES
                ),
            ]
        )
        for document_at, document in enumerate(documents)
        for at, run in enumerate(document.runs)
        if run.has_sources and run.is_shown
    ]
    if not rows:
        return ""
    return "\n".join(
        [
            "<h2>Draft tokens by source</h2>",
            table(_SOURCE_HEADINGS, rows, num_words=3),
            '<p class="quiet"><i>Copied</i> from the text so far, <i>forced</i> by a grammar; the '
            "rest of those drafted are the method's.</p>",
        ]
    )


def _run_rows(document_at: int, document: Document) -> Iterator[str]:
    previous: Run | None = None
    for at, run in enumerate(document.runs):
        place = f"{document_at}/runs/{at}"
        is_new = previous is None or previous.workload != run.workload
        is_new_cell = previous is None or previous.cell != run.cell
        previous = run
        names = [
            td(f"<bdi>{words(run.workload)}</bdi>" if is_new else "", "w"),
            td(number(run.concurrency, f"{place}/concurrency", 0) if is_new_cell else "", "w"),
            td(f"<bdi>{words(run.method)}</bdi>", "w"),
        ]
        equal = (
            number(run.num_identical_to_plain, f"{place}/num_identical_to_plain", 0)
            + "/"
            + number(run.num_requests, f"{place}/num_requests", 0)
        )
        if not run.is_shown:
            yield row([*names, *[td("-")] * 8, td(equal)], is_first=is_new)
            continue
        spread = ""
        if len(set(run.speedup_range)) == 2:
            low, high = (
                number(value, f"{place}/speedup_range/{side}", 2)
                for side, value in enumerate(run.speedup_range)
            )
            spread = f' <span class="quiet">{low}-{high}</span>'
        yield row(
            [
                *names,
                td(speed(run, at, document_at)),
                td(
                    number(run.speedup, f"{place}/speedup", 2, "x") + spread,
                    "strong" if run.is_clear else "quiet",
                ),
                td(number(run.ttft_ms or None, f"{place}/ttft_ms", 1)),
                td(number(run.ttft_ms_p99 or None, f"{place}/ttft_ms_p99", 1)),
                td(number(run.tpot_ms or None, f"{place}/tpot_ms", 2)),
                td(number(run.tpot_ms_p99 or None, f"{place}/tpot_ms_p99", 2)),
                td(number(run.acceptance_rate, f"{place}/acceptance_rate", 1, "%")),
                td(number(run.mean_acceptance_length, f"{place}/mean_acceptance_length", 2)),
                td(equal),
            ],
            is_first=is_new,
        )


def comparison(first: Document, second: Document) -> str:
    """Two documents, cell by cell."""
    pairs = pairs_of(first, second)
    lines: dict[tuple[str, str], dict[int, Value]] = {}
    rows: list[str] = []
    previous = ""
    for pair in pairs:
        one, other = f"0/runs/{pair.first_at}", f"1/runs/{pair.second_at}"
        is_new, previous = pair.first.workload != previous, pair.first.workload
        cells = [
            td(f"<bdi>{words(pair.first.workload)}</bdi>" if is_new else "", "w"),
            td(number(pair.first.concurrency, f"{one}/concurrency", 0), "w"),
            td(f"<bdi>{words(pair.name)}</bdi>", "w"),
        ]
        if pair.ratio is None:
            cells += [td("-")] * 9
        else:
            line = lines.setdefault((pair.first.workload, pair.name), {})
            line[pair.first.concurrency] = Value(pair.ratio)
            cells += [
                td(speed(pair.first, pair.first_at)),
                td(speed(pair.second, pair.second_at, 1)),
                td(pair.ratio_text, "strong"),
            ]
            for key, digits in (("ttft_ms", 1), ("tpot_ms", 2), ("mean_acceptance_length", 2)):
                cells += [
                    td(number(getattr(run, key), f"{place}/{key}", digits))
                    for run, place in ((pair.first, one), (pair.second, other))
                ]
        same = "" if pair.num_same is None else f"{pair.num_same}/{pair.first.num_requests}"
        rows.append(row([*cells, td(same)], is_first=is_new))
    headings = (
        *("workload", "requests", "method", "A tokens/s", "B tokens/s", "B/A"),
        *("A first token ms", "B", "A ms/token", "B", "A length", "B", "same text"),
    )
    series = [
        Series(f"{workload}, {name}", points, colour=1 + index % 5)
        for index, ((workload, name), points) in enumerate(lines.items())
    ]
    axes = Axes("Tokens a second, B over A", "requests at a time", "x", one="as fast as A")
    chart = f'<div class="charts">{line_chart(axes, series)}</div>' if series else ""
    unlike = differences(first, second)
    warning = (
        f'<p class="verdict no">Not asked alike: {words("; ".join(unlike))}.</p>' if unlike else ""
    )
    figures = table(headings, rows, num_words=3)
    return f'<h2>B over A</h2>{warning}{chart}<div class="dense">{figures}</div>'
