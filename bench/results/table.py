"""A Markdown table of recorded results: `python bench/results/table.py FILE...`."""

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
    for name in sys.argv[1:]:
        document = json.loads(Path(name).read_text())
        print(f"{conditions(document['environment'])} (`{Path(name).name}`)\n")
        for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows(document["runs"])):
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
