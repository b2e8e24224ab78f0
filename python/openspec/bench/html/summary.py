"""What a report begins and ends with: heading, first figures, speed, command, environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from openspec.bench.document import Document, Run, section
from openspec.bench.html.command import command_of
from openspec.bench.html.markup import LETTERS, number, requests, speed
from openspec.bench.html.svg import Axes, Series, Value, line_chart, words


def model_of(document: Document) -> str:
    """The model's name, the last part of a path."""
    name = document.server.get("model") or document.flags.get("model") or "embedded model"
    return Path(str(name)).name or str(name)


def _method(document: Document) -> str:
    return str(document.flags.get("method") or document.runs[-1].method)


def _machine(document: Document) -> str:
    environment = document.environment
    gpus = environment.get("gpu")
    names = [str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    machine = [f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]] if names else []
    machine.append(
        f"{environment.get('cpu', 'unknown processor')}, {environment.get('cores')} cores"
    )
    versions = section(environment, "versions")
    version = f"openspec {versions.get('openspec', '?')}"
    if "owned_by" in document.server:  # another engine's server; the client's machine and version
        version = f"{document.server['owned_by'] or 'unknown server'}, measured by {version}"
    if environment.get("commit"):
        version += f" at {environment['commit']}"
    date = [str(environment["date"])] if environment.get("date") else []
    return " · ".join([*machine, version, *date])


def heading(documents: Sequence[Document]) -> tuple[str, list[str]]:
    """Title and the lines below it."""
    if len(documents) == 2:
        names = [document.name for document in documents]
        lines = [
            f"{letter}: {document.name} · {model_of(document)} · {_machine(document)}"
            for letter, document in zip(LETTERS, documents, strict=True)
        ]
        return f"{names[0]} and {names[1]}", lines
    document = documents[0]
    flags = document.flags
    asked = (
        f"Up to {flags.get('max_tokens', '?')} tokens an answer, temperature "
        f"{flags.get('temperature', '?')}, turns: {flags.get('repeats', '?')}"
    )
    return f"{model_of(document)}, {_method(document)}", [_machine(document), asked]


def _drafted(document: Document) -> list[tuple[int, Run]]:
    return [(at, run) for at, run in enumerate(document.runs) if run.speedup is not None]


def tiles(document: Document) -> str:
    """The figures people ask for first, and the equality line."""
    shown = [(at, run) for at, run in _drafted(document) if run.is_shown]
    cells: list[tuple[str, str]] = []
    if shown:
        ratios = {at: run.speedup or 0.0 for at, run in shown}
        for name, at in (
            ("Highest ratio", max(ratios, key=ratios.__getitem__)),
            ("Lowest ratio", min(ratios, key=ratios.__getitem__)),
        ):
            run = document.runs[at]
            what = f"{name}: {run.workload}, {requests(run.concurrency)}"
            if not run.is_clear:
                what += "; the turns lie on both sides of 1, so it may be chance"
            cells.append((number(run.speedup, f"0/runs/{at}/speedup", 2, "x"), what))
    fast = [(at, run) for at, run in enumerate(document.runs) if run.is_shown]
    if fast:
        at, run = max(fast, key=lambda pair: pair[1].output_tokens_per_s)
        what = f"Most tokens a second: {run.workload}, {requests(run.concurrency)}"
        cells.append((speed(run, at), what))
    drafts = [(at, run) for at, run in shown if run.mean_acceptance_length is not None]
    if drafts:
        at, run = max(drafts, key=lambda pair: pair[1].mean_acceptance_length or 0.0)
        place = f"0/runs/{at}/mean_acceptance_length"
        what = f"Longest mean acceptance: {run.workload}, {requests(run.concurrency)}"
        cells.append((number(run.mean_acceptance_length, place, 2), what))
    marks = "".join(
        f'<div class="tile"><b>{figure}</b><span>{words(what)}</span></div>'
        for figure, what in cells
    )
    return f'<div class="tiles">{marks}</div>\n{verdict(document)}'


def verdict(document: Document) -> str:
    """The line that makes the speeds worth reading."""
    gated = [run for run in document.runs if not run.may_differ]
    counted = [run for run in gated if run.speedup is not None] or gated or document.runs
    same = sum(run.num_identical_to_plain for run in counted)
    total = sum(run.num_requests for run in counted)
    what = "equal plain decoding's, token for token"
    if not gated:
        what = "are the same in every turn"
    hidden = "" if same == total or not gated else " No speed is shown for texts that differ."
    return (
        f'<p class="verdict{"" if same == total else " no"}"><span data-sum="same">{same}</span> '
        f'of <span data-sum="total">{total}</span> answers {what}.{hidden}</p>'
    )


def speedups(document: Document) -> str:
    """Speed against plain decoding, by requests at a time."""
    lines: dict[tuple[str, str], list[tuple[int, Run]]] = {}
    for at, run in _drafted(document):
        if run.is_shown:
            lines.setdefault((run.workload, run.method), []).append((at, run))
    if not lines:
        return ""
    has_methods = len({method for _, method in lines}) > 1
    series = [
        Series(
            f"{workload}, {method}" if has_methods else workload,
            {run.concurrency: Value(run.speedup or 0.0, f"0/runs/{at}/speedup") for at, run in of},
            {
                run.concurrency: (Value(run.speedup_range[0]), Value(run.speedup_range[1]))
                for _, run in of
                if len(run.speedup_range) == 2
            },
            colour=1 + index % 5,
        )
        for index, ((workload, method), of) in enumerate(lines.items())
    ]
    axes = Axes("Speed against plain decoding", "requests at a time", "x", one="plain decoding")
    return (
        "<h2>Speed</h2><p>Output tokens a second over those of plain decoding, in turns on the "
        "same server. Thin bars are the range of the turns.</p>"
        f'<div class="charts">{line_chart(axes, series)}</div>'
    )


def commands(documents: Sequence[Document]) -> str:
    """A section with the commands that repeat the runs."""
    lines = "\n".join(command_of(document) for document in documents)
    return f"<h2>Repeat it</h2><pre>{words(lines)}</pre>"


def environments(documents: Sequence[Document]) -> str:
    """Machine, versions, server."""
    sides = []
    for document_at, document in enumerate(documents):
        entries = "".join(
            f"<dt>{words(name)}</dt><dd>{words(value)}</dd>" for name, value in _facts(document)
        )
        title = f"<h3>{LETTERS[document_at]}: {words(document.name)}</h3>"
        sides.append(f"<div>{title if len(documents) == 2 else ''}<dl>{entries}</dl></div>")
    return f'<h2>Environment</h2><div class="sides">{"".join(sides)}</div>'


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    for name, value in document.environment.items():
        if name == "flags":
            continue
        if name == "versions":
            yield (
                name,
                ", ".join(f"{k} {v}" for k, v in section(document.environment, name).items()),
            )
        elif name == "server":
            for key, entry in document.server.items():
                if isinstance(entry, (str, int, float, bool)):
                    yield f"server: {key}", str(entry)
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "none"
        elif value is not None:
            yield name, str(value)
