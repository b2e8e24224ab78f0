"""Step times of two builds on one GPU, in turn: what a change costs.

    python -m bench.compare_steps OLD NEW [--method none ...] [--rounds 2] [--json FILE]

OLD and NEW are `bench_cuda_step` programs. Each round runs OLD, then NEW; the median of a figure
over the rounds is compared. A ratio above 1 means that NEW is slower.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

Figures = dict[str, list[float]]


def step_times(program: str, methods: list[str], into: Figures) -> None:
    """Appends the milliseconds of every figure that one run of the program reports."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        flags = [word for method in methods for word in ("--method", method)]
        command = [program, "--json", str(path), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(path.read_text())
    for method in methods:
        for kind in ("graph_ms", "proposing_graph_ms"):
            for rows, value in report[method].get(kind, {}).items():
                into.setdefault(f"{method} {kind} {rows}", []).append(value)
        for requests in (1, 4, 16, 64):
            value = report[method][f"c{requests}"]["step_ms"]
            into.setdefault(f"{method} step_ms at {requests} requests", []).append(value)
        for tokens in (2048, 8192):
            value = report[method][f"prompt{tokens}_first_token_ms"]
            into.setdefault(f"{method} prompt of {tokens} tokens", []).append(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare_steps", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--method", action="append", dest="methods")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    methods = args.methods or ["none"]
    old: Figures = {}
    new: Figures = {}
    for _ in range(args.rounds):
        step_times(args.old, methods, old)
        step_times(args.new, methods, new)
    # A figure that one build alone has, such as a shape that the other does not record, stays out.
    names = [name for name in old if name in new]
    rows = {name: (median(old[name]), median(new[name])) for name in names}
    for name, (before, after) in rows.items():
        print(f"{name}: {before:.3f} -> {after:.3f} ms, {after / before:.4f}")
    ratios = [after / before for before, after in rows.values()]
    print(f"median {median(ratios):.4f}, worst {max(ratios):.4f}")
    if args.json:
        report = {"old": old, "new": new, "median_ratio": median(ratios), "worst": max(ratios)}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
