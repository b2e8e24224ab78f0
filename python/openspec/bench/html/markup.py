"""Small pieces of the page: numbers that name their place in the JSON, cells, tables."""

from __future__ import annotations

from collections.abc import Sequence

from openspec.bench.document import Run
from openspec.bench.html.svg import words

LETTERS = ("A", "B")
"""What two documents are called, in their order."""


def number(value: float | None, place: str, digits: int, unit: str = "") -> str:
    """A number with its place in the JSON; nothing for None."""
    if value is None:
        return ""
    scaled = 100 * value if unit == "%" else value
    return f'<span data-v="{place}">{scaled:.{digits}f}{unit}</span>'


def td(content: str, kind: str = "") -> str:
    """A table's cell around `content`, which is finished markup; `kind` is its class."""
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def table(headings: Sequence[str], rows: Sequence[str], num_words: int) -> str:
    """A table; the first `num_words` columns hold words."""
    head = "".join(
        f'<th scope="col"{" class=w" if at < num_words else ""}>{words(heading)}</th>'
        for at, heading in enumerate(headings)
    )
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def row(cells: Sequence[str], *, is_first: bool = False) -> str:
    """A row of finished cells; the first of a group has a line above."""
    return f"<tr{' class=first' if is_first else ''}>{''.join(cells)}</tr>"


def requests(count: int) -> str:
    """A number of requests at a time, in words."""
    return "1 request" if count == 1 else f"{count} requests"


def speed(run: Run, at: int, document_at: int = 0) -> str:
    """Tokens a second of a run, with its place."""
    place = f"{document_at}/runs/{at}/output_tokens_per_s"
    return number(run.output_tokens_per_s, place, 0 if run.output_tokens_per_s >= 1000 else 1)
