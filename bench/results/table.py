"""Markdown tables of recorded results.

python bench/results/table.py FILE...                   # a table each
python bench/results/table.py --by-concurrency FILE...  # one of all methods
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEADINGS = (
    "workload",
    "requests at a time",
    "plain tok/s",
    "method",
    "tok/s",
    "vs plain (range)",
    "acceptance rate",
    "mean length",
    "identical",
)


def rows(runs: list[dict]) -> list[tuple[str, ...]]:
    """One row per method and cell; plain decoding is a column."""
    plain = {
        (run["workload"], run["concurrency"]): run["output_tokens_per_s"]
        for run in runs
        if "speedup" not in run
    }
    found = []
    for run in runs:
        if "speedup" not in run:
            continue
        low, high = run["speedup_range"]
        rate, length = run["acceptance_rate"], run["mean_acceptance_length"]
        found.append(
            (
                run["workload"],
                str(run["concurrency"]),
                f"{plain[run['workload'], run['concurrency']]:.0f}",
                run["method"],
                f"{run['output_tokens_per_s']:.0f}",
                f"**{run['speedup']:.2f}x** ({low:.2f}-{high:.2f})",
                "" if rate is None else f"{rate:.0%}",
                "" if length is None else f"{length:.2f}",
                f"{run['num_identical_to_plain']}/{run['num_requests']}",
            )
        )
    return found


def name_of(environment: dict) -> str:
    """A method with what its drafts look like."""
    server, flags = environment["server"], environment["flags"]
    drafts = f"{server['method']}, {server['num_speculative_tokens']} drafts"
    top_k = int(flags.get("draft_top_k", 1))
    return drafts if top_k == 1 else f"{drafts} deep, tree, top {top_k}"


def by_concurrency(documents: list[dict]) -> list[tuple[str, ...]]:
    """Headings, then a row per workload and method: output tokens per second and the ratio."""
    runs = [run for document in documents for run in document["runs"]]
    numbers = sorted({run["concurrency"] for run in runs})
    table: list[tuple[str, ...]] = [
        ("workload", "method", "length", *map(str, numbers), "identical"),
        ("---",) * (len(numbers) + 4),
    ]
    for workload in dict.fromkeys(run["workload"] for run in runs):
        for document in documents:
            cells = {
                run["concurrency"]: run
                for run in document["runs"]
                if run["workload"] == workload and "speedup" in run
            }
            if not cells:
                continue
            length = cells[min(cells)]["mean_acceptance_length"]
            same, count = (
                sum(run[key] for run in cells.values())
                for key in ("num_identical_to_plain", "num_requests")
            )
            table.append(
                (
                    workload,
                    name_of(document["environment"]),
                    "" if length is None else f"{length:.2f}",
                    *(
                        f"{cells[n]['output_tokens_per_s']:.0f} (**{cells[n]['speedup']:.2f}x**)"
                        if n in cells
                        else ""
                        for n in numbers
                    ),
                    f"{same}/{count}",
                )
            )
    return table


def conditions(environment: dict) -> str:
    """Where and with what, in one line."""
    flags, server = environment["flags"], environment["server"]
    return (
        f"{environment['cpu']}, {environment['cores']} cores; model {server.get('model')}, "
        f"{server.get('dtype')}; commit {environment['commit']}; {flags['num_prompts']} prompts, "
        f"{flags['repeats']} turns, up to {flags['max_tokens']} tokens, temperature "
        f"{flags['temperature']:g}."
    )


def main() -> None:
    """Command line."""
    names = [name for name in sys.argv[1:] if name != "--by-concurrency"]
    documents = [json.loads(Path(name).read_text()) for name in names]
    if "--by-concurrency" in sys.argv:
        for cells in by_concurrency(documents):
            print("| " + " | ".join(cells) + " |")
        return
    for name, document in zip(names, documents, strict=True):
        print(f"{conditions(document['environment'])} (`{Path(name).name}`)\n")
        for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows(document["runs"])):
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
