"""Times ngram_lookup on CUDA: `python bench/kernels/ngram_lookup.py [--json PATH]`.

Each figure is one lookup inside a graph of many, first with the histories in L2, then with L2
flushed before each lookup (the flush's own time taken off): the state that a decode step leaves.
It does not show the launch itself: in a captured step there is none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from openspec import ops

LOOKUPS_PER_GRAPH = 50
REPEATS = 20
FLUSH_BYTES = 256 << 20  # several times L2
NUM_DRAFTS = 8


def graph_seconds(body: Callable[[], object]) -> list[float]:
    """Seconds of one `body` among LOOKUPS_PER_GRAPH in a graph, REPEATS times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LOOKUPS_PER_GRAPH):
            body()
    graph.replay()
    seconds = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / LOOKUPS_PER_GRAPH)
    return seconds


def histories(kind: str, num_seqs: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    rng = random.Random(num_seqs * 1_000_003 + num_tokens)
    if kind == "one token":  # every position matches: the most work per token
        tokens = torch.zeros(num_seqs, num_tokens, dtype=torch.int32)
    else:
        vocab_size = {"text": 3_000, "random": 150_000}[kind]
        row = [rng.randrange(vocab_size) for _ in range(num_tokens)]
        if kind == "text":  # a copied stretch at the end
            row[-20:] = row[num_tokens // 3 : num_tokens // 3 + 20]
        tokens = torch.tensor([row] * num_seqs, dtype=torch.int32)
    return tokens, torch.full((num_seqs,), num_tokens, dtype=torch.int32)


def measure(kind: str, num_seqs: int, num_tokens: int) -> dict[str, object]:
    cpu = [
        *histories(kind, num_seqs, num_tokens),
        torch.arange(num_seqs, dtype=torch.int32),
        torch.full((num_seqs,), NUM_DRAFTS, dtype=torch.int32),
    ]
    gpu = [tensor.cuda() for tensor in cpu]
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def lookup(tensors: list[Tensor] = gpu) -> tuple[Tensor, Tensor, Tensor]:
        return ops.ngram_lookup(*tensors, max_drafts=NUM_DRAFTS, max_lookback=num_tokens)

    def flush_and_lookup() -> None:
        flush.zero_()
        lookup()

    is_equal = all(torch.equal(g.cpu(), c) for g, c in zip(lookup(), lookup(cpu), strict=True))
    warm = statistics.median(graph_seconds(lookup))
    flushed = graph_seconds(flush_and_lookup)
    cold = statistics.median(flushed) - statistics.median(graph_seconds(flush.zero_))
    num_bytes = num_seqs * num_tokens * 4
    return {
        "kind": kind,
        "num_seqs": num_seqs,
        "num_tokens": num_tokens,
        "warm_us": round(warm * 1e6, 2),
        "cold_us": round(cold * 1e6, 2),
        "cold_gb_per_s": round(num_bytes / cold / 1e9, 1),
        "equal_to_cpu": is_equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    path = parser.parse_args().json
    if not ops.has_cuda():
        raise SystemExit("needs a CUDA device and the CUDA build")

    print(
        f"{'kind':>10} {'seqs':>5} {'tokens':>7} {'warm us':>8} {'cold us':>8} {'GB/s':>7}  equal"
    )
    runs = []
    for kind in ("text", "random", "one token"):
        for num_seqs, num_tokens in [(1, 1024), (1, 8192), (64, 8192), (256, 8192), (64, 131072)]:
            run = measure(kind, num_seqs, num_tokens)
            runs.append(run)
            print(
                f"{kind:>10} {num_seqs:>5} {num_tokens:>7} {run['warm_us']:>8} {run['cold_us']:>8} "
                f"{run['cold_gb_per_s']:>7}  {run['equal_to_cpu']}",
                flush=True,
            )
    if path:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "commit": commit or None,
            "command": "python bench/kernels/ngram_lookup.py",
        }
        path.write_text(json.dumps({"environment": environment, "runs": runs}, indent=1) + "\n")
    if not all(run["equal_to_cpu"] for run in runs):
        raise SystemExit("CUDA and CPU differ")


if __name__ == "__main__":
    main()
