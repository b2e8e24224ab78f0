"""Steps of one model on fewer and on more GPUs: what is left of a time, and that texts are equal.

    python -m bench.compare_ranks FILE...

The files are what `bench_cuda_step --tensor-parallel-size T --json FILE` leaves. Of each shape the
one with the fewest GPUs is the measure. Ends with status 1 where a text differs, or where no shape
ran on two numbers of GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def figures(run: Run) -> Iterator[tuple[str, float, str | None]]:
    """Of each kind of work: its name, milliseconds, and the digest of its text if it has one."""
    for method, found in run.items():
        if not isinstance(found, dict):
            continue
        for kind, value in found.items():
            if kind.startswith("prompt"):
                yield f"{method} {kind}", value, None
            elif isinstance(value, dict) and "digest" in value:
                yield f"{method} {kind} step_ms", value["step_ms"], value["digest"]
        for rows, value in found["proposing_graph_ms"].items():
            yield f"{method} drafting step of {rows} rows, ms", value, None


def compare(runs: Sequence[Run]) -> tuple[int, int]:
    """Prints a line for each kind of work; returns how many texts were compared, and differed."""
    num_texts = num_other = 0
    for shape in dict.fromkeys(run["shape"] for run in runs):
        own = [run for run in runs if run["shape"] == shape]
        base, *more = sorted(own, key=lambda run: int(run["tensor_parallel_size"]))
        before = {name: (value, digest) for name, value, digest in figures(base)}
        for run in more:
            sizes = f"{base['tensor_parallel_size']} -> {run['tensor_parallel_size']} GPUs"
            for name, value, digest in figures(run):
                if name not in before:
                    continue
                old, old_digest = before[name]
                is_other = digest != old_digest
                num_texts += digest is not None
                num_other += is_other
                ratio = f"{old:.3f} -> {value:.3f}, {value / old:.3f}"
                print(f"{shape}, {sizes}: {name} {ratio}{', OTHER TEXT' * is_other}")
    return num_texts, num_other


def main(argv: Sequence[str]) -> int:
    """Command line."""
    num_texts, num_other = compare([json.loads(Path(file).read_text()) for file in argv])
    print(f"{num_texts} texts compared, {num_other} differ")
    return int(num_other > 0 or num_texts == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
