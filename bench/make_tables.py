"""The pages' tables and charts, from the results in bench/results and the engine's memory plan.

    python -m bench.make_tables            # after new results: rewrites what they change
    python -m bench.make_tables --check    # exit status 1 if a page differs from its results

A page marks where a table goes: `<!-- table: NAME -->` ... `<!-- /table -->`. TABLES has the names.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from openspec.bench.html.svg import (
    Axes,
    Series,
    Value,
    beside,
    line_chart,
    position_bars,
    standalone,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
REGION = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- /table -->)", re.S)

# File, and what its drafts are called.
NGRAM = ("h200-http-ngram", "n-gram, 4 drafts")
EAGLE3 = (
    ("h200-http-eagle3", "EAGLE-3, 3 drafts"),
    ("h200-http-eagle3-tree", "EAGLE-3, tree of 15"),
)
DFLASH = (
    ("h200-http-dflash", "DFlash, 15 drafts"),
    ("h200-http-dflash-tree", "DFlash, tree of 15"),
)
DSPARK = (
    ("h200-http-dspark", "DSpark, 15 drafts"),
    ("h200-http-dspark-tree", "DSpark, tree of 15"),
)
HEADS = (*EAGLE3, *DFLASH, *DSPARK)
CPU = (
    ("2-core-xeon-tiny-ngram", "n-gram, Xeon with AMX"),
    ("2-core-epyc-tiny-ngram", "n-gram, EPYC"),
    ("2-core-epyc-tiny-eagle3", "EAGLE-3, EPYC"),
    ("2-core-epyc-tiny-dflash", "DFlash, EPYC"),
    ("2-core-epyc-tiny-dspark", "DSpark, EPYC"),
)
SMOLLM2 = (
    "2-core-epyc-smollm2-1-thread",
    "2-core-epyc-smollm2-2-threads",
    "2-core-epyc-smollm2-2-threads-long",
)
TASKS = {
    "gsm8k": "GSM8K",
    "two_turns": "MT-bench, second turn",
    "edit": "rename in a function",
    "copy": "copy a passage",
    "quote": "summarise with quotes",
    "ask": "answer from a passage",
    "extract": "records as JSON",
}
WORKLOADS = {"gsm8k_test": "GSM8K"}  # names of data sets; others are their own


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def planned(kind: str) -> str:
    """What the engine's memory plan says: of `models`, of their `heads` or of their `ranks`."""
    from bench import memory_plans  # which needs the compiled core

    return rows_of(getattr(memory_plans, kind)())


def rows_of(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row holds the headings."""
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def joined(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def with_drafts(run: dict) -> str:
    return f"{run['output_tokens_per_s']:.0f} ({run['speedup']:.2f}x)"


def drafted_runs(document: dict) -> list[dict]:
    return [run for run in document["runs"] if "speedup" in run]


def conditions(documents: Sequence[dict], files: Sequence[str]) -> str:
    """What stands below a table: where, with what, how many answers were compared."""
    runs = [run for document in documents for run in drafted_runs(document)]
    slowest = min(runs, key=lambda run: run["speedup"])
    same, total = (
        sum(run[key] for run in runs) for key in ("num_identical_to_plain", "num_requests")
    )
    environments = [document["environment"] for document in documents]
    commits = list(dict.fromkeys(environment["commit"][:7] for environment in environments))
    turns = sorted({environment["flags"]["repeats"] for environment in environments})
    where = f"{WORKLOADS.get(slowest['workload'], slowest['workload'])}, "
    return (
        f"\n{same} of {total} answers equal plain decoding's. The lowest ratio is "
        f"{slowest['speedup']:.2f}x ({where}{slowest['concurrency']} requests).\n"
        f"Greedy, up to {environments[0]['flags']['max_tokens']} tokens an answer; turns: "
        f"{joined([str(number) for number in turns])}; commit: {joined(commits)}; "
        f"files: {', '.join(f'`{name}`' for name in files)}.\n"
    )


def plain_and_drafts(sources: Sequence[tuple[str, str]], workloads: Sequence[str]) -> str:
    """A row per workload and method: output tokens per second, ratio to plain decoding."""
    documents = [load(name) for name, _ in sources]
    shown = [
        {**document, "runs": [run for run in document["runs"] if run["workload"] in workloads]}
        for document in documents
    ]
    columns = sorted({run["concurrency"] for document in shown for run in document["runs"]})
    requests = [f"{n} request" if n == 1 else str(n) for n in columns]
    cells: list[list[str]] = [["workload", "drafts", "length", *requests]]
    for workload in workloads:
        for document, (_, label) in zip(shown, sources, strict=True):
            runs = {
                run["concurrency"]: run
                for run in drafted_runs(document)
                if run["workload"] == workload
            }
            if not runs:
                continue
            length = runs[min(runs)]["mean_acceptance_length"]
            cells.append(
                [
                    WORKLOADS.get(workload, workload),
                    label,
                    "" if length is None else f"{length:.2f}",
                    *(with_drafts(runs[n]) if n in runs else "" for n in columns),
                ]
            )
    return rows_of(cells) + conditions(shown, [name for name, _ in sources])


def tasks() -> str:
    """Ratio to plain decoding by processor time, and the least and most of the turns."""
    documents = [load(name) for name in SMOLLM2]
    cells = {
        (*name.split(", "), document["environment"]["flags"]["max_tokens"]): row["ratio"]["new"]
        for document in documents
        for name, row in document.items()
        if name != "environment"
    }
    columns = list(dict.fromkeys(cell[1:] for cell in cells))
    headings = [
        f"{count.split()[0]} request{'s' * (count != '1 requests')}, "
        f"{threads.split()[0]} thread{'s' * (threads != '1 threads')}, {most} tokens"
        for count, threads, most in columns
    ]
    lines = [["prompts", *headings]]
    for kind, label in TASKS.items():
        line = [label]
        for column in columns:
            ratio = cells.get((kind, *column))
            line.append(
                f"{ratio['median']:.2f}x ({ratio['least']:.2f} to {ratio['most']:.2f})"
                if ratio
                else ""
            )
        lines.append(line)
    environments = [document["environment"] for document in documents]
    commits = list(dict.fromkeys(environment["commit"][:7] for environment in environments))
    flags = environments[0]["flags"]
    return rows_of(lines) + (
        f"\nAll texts equal plain decoding's. Greedy; turns: {flags['turns']}; "
        f"commit: {joined(commits)}; files: {', '.join(f'`{name}`' for name in SMOLLM2)}.\n"
    )


def expected() -> str:
    """Ratios to plain decoding alone, of chains on one workload, and of copying at its best."""
    columns = (1, 8, 32)
    cells = [["", *(f"{n} request{'s' * (n > 1)}" for n in columns)]]
    for (name, label), workload in (
        (NGRAM, "gsm8k_test"),
        ((NGRAM[0], "n-gram where answers repeat the prompt"), "repeat"),
        (EAGLE3[0], "gsm8k_test"),
        (DFLASH[0], "gsm8k_test"),
        (DSPARK[0], "gsm8k_test"),
    ):
        runs = {
            run["concurrency"]: run
            for run in drafted_runs(load(name))
            if run["workload"] == workload
        }
        cells.append([label, *(f"{runs[n]['speedup']:.2f}x" for n in columns)])
    return rows_of(cells)


def peer() -> str:
    """The same heads, client and questions on vLLM and on openspec."""
    levels: dict[tuple[str, int], dict] = {}
    for line in (RESULTS / "h200-vllm-side-by-side.jsonl").read_text().splitlines():
        level = json.loads(line)
        if "tag" in level:
            levels[level["tag"], level["c"]] = level
    columns = sorted({concurrency for _, concurrency in levels})
    cells = [["", *(f"{n} request{'s' * (n > 1)}" for n in columns)]]
    methods = {
        "plain": "plain decoding",
        "ngram": "n-gram, 4 drafts",
        "eagle3": "EAGLE-3, 3 drafts",
        "dflash": "DFlash, 15 drafts",
    }
    for method, label in methods.items():
        row = [label]
        for n in columns:
            theirs, ours = (levels[f"{tag}/{method}", n]["tok_s"] for tag in ("vllm", "openspec"))
            row.append(f"{theirs:.0f} → **{ours:.0f}** ({ours / theirs:.2f}x)")
        cells.append(row)
    row = ["drafted answers equal to plain ones"]
    for n in columns:
        counts = []
        for tag in ("vllm", "openspec"):
            plain = {prompt[0]: prompt[2] for prompt in levels[f"{tag}/plain", n]["prompts"]}
            drafted = [
                plain[prompt[0]] == prompt[2]
                for method in methods
                if method != "plain"
                for prompt in levels[f"{tag}/{method}", n]["prompts"]
            ]
            counts.append((sum(drafted), len(drafted)))
        (theirs, total), (ours, _) = counts
        row.append(f"{theirs} → **{ours}** of {total}")
    cells.append(row)
    return rows_of(cells)


def oracles(kind: str) -> str:
    """Formats that are read or refused, and what the authors' code says of our reading."""
    rows = [row for row in load("oracles")["rows"] if row["kind"] == kind]
    cells = [[row["format"], row["reading"], row["oracle"], row["result"]] for row in rows]
    return rows_of([["format", "reading", "oracle", "result"], *cells])


TABLES: dict[str, Callable[[], str]] = {
    "peer": peer,
    "h200": partial(plain_and_drafts, (NGRAM, *HEADS), ("gsm8k_test", "chat", "repeat")),
    "cpu": partial(plain_and_drafts, CPU, ("chat", "repeat")),
    "ngram": partial(
        plain_and_drafts, (NGRAM,), ("repeat", "mixed", "random", "chat", "gsm8k_test")
    ),
    "eagle3": partial(plain_and_drafts, EAGLE3, ("gsm8k_test", "chat")),
    "dflash": partial(plain_and_drafts, DFLASH, ("gsm8k_test", "chat")),
    "dspark": partial(plain_and_drafts, DSPARK, ("gsm8k_test", "chat")),
    "oracle-targets": partial(oracles, "target"),
    "oracle-heads": partial(oracles, "head"),
    "oracle-memory": partial(oracles, "memory"),
    "expected": expected,
    "tasks": tasks,
    "memory": partial(planned, "models"),
    "memory-heads": partial(planned, "heads"),
    "memory-ranks": partial(planned, "ranks"),
}


def speedup() -> str:
    """Speed against plain decoding by requests at a time: GSM8K, and n-gram's best workload."""
    series = []
    for (name, label), workload in (
        ((NGRAM[0], "n-gram, copying"), "repeat"),
        (EAGLE3[0], "gsm8k_test"),
        (DFLASH[0], "gsm8k_test"),
        (DSPARK[1], "gsm8k_test"),
    ):
        runs = [run for run in drafted_runs(load(name)) if run["workload"] == workload]
        points = {
            run["concurrency"]: Value(run["speedup"]) for run in runs if run["concurrency"] <= 32
        }
        series.append(Series(label, points, colour=1 + len(series)))
    axes = Axes(
        "Speed against plain decoding on one H200: GSM8K, greedy, over HTTP",
        "requests at a time",
        "x",
        one="plain decoding",
    )
    return standalone(line_chart(axes, series))


def acceptance() -> str:
    """Acceptance by position at one request."""
    charts = []
    for name, label in (NGRAM, EAGLE3[0], DFLASH[0]):
        run = next(
            run
            for run in drafted_runs(load(name))
            if (run["workload"], run["concurrency"]) == ("gsm8k_test", 1)
        )
        shares = [Value(share) for share in run["acceptance_per_position"]]
        charts.append(position_bars(label, shares, 460 if len(shares) > 8 else 190))
    title = "Accepted by position, of all drafts: GSM8K, one request, one H200"
    return standalone(beside(title, charts))


CHARTS: dict[str, Callable[[], str]] = {
    "docs/images/speedup.svg": speedup,
    "docs/images/acceptance.svg": acceptance,
}


def rewritten(page: str) -> str:
    """A page's text with its tables as the results have them."""
    return REGION.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def generated() -> dict[str, str]:
    """Path from the root: what the file has to hold."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {page: page.read_text() for page in sorted(pages)}
    files = {
        page.relative_to(ROOT).as_posix(): rewritten(text)
        for page, text in found.items()
        if REGION.search(text)
    }
    return {**files, **{name: chart() for name, chart in CHARTS.items()}}


def stale() -> list[str]:
    """Files that differ from their results."""
    return [
        name
        for name, text in generated().items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text() != text
    ]


def main() -> None:
    """Command line."""
    old = stale()
    if "--check" in sys.argv[1:]:
        if old:
            sys.exit(f"older than its results: {joined(old)}; run python -m bench.make_tables")
        return
    for name, text in generated().items():
        if name in old:
            (ROOT / name).write_text(text)
            print(f"wrote {name}")


if __name__ == "__main__":
    main()
