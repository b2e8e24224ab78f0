"""FlashInfer's paged attention beside ours: the same cases, on the same GPU.

    bench_cuda_attention --json ours.json              # built by the target bench_cuda
    pip install ".[flashinfer]"          # in the checkout
    python bench/kernels/flashinfer_attention.py ours.json [--json PATH]

The C++ benchmark times our kernels; this script times FlashInfer's on the chains of its cases and
joins both in one table. Both sides run 36 layers of Qwen3-4B's shape as one CUDA graph, each layer
with K and V of its own. "in step" is what a layer adds where 50 MB are read before and after it, as
weights are. Every FlashInfer kernel is planned for a captured graph, which lengths may outgrow
(use_cuda_graph=True), except BatchAttention and XQA, which know no such mode. Its plan() is work of
the host in every step; ours is a kernel in the graph.

"same bits" compares FlashInfer with itself: the first sequence alone with the same in its batch,
and its last row alone with the same among its rows. Ours is tested for that in
tests/cpp/cuda/span_attention_test.cpp. FlashInfer compiles each kernel on first use, which takes
minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

try:
    import flashinfer
    from flashinfer.decode import xqa_batch_decode_with_kv_cache
except ImportError as error:
    raise SystemExit(f'needs FlashInfer: pip install ".[flashinfer]" ({error})') from None

NUM_LAYERS = 36
GEOMETRY = NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
REPLAYS = 9
BETWEEN_BYTES = 50 << 20
WORKSPACE_BYTES = 256 << 20
MAX_DRAFT_ROWS = 64  # of XQA, which is no kernel for prompts

Attend = Callable[[Tensor, Tensor], Tensor]  # (q, kv of a layer) -> out


@dataclass(frozen=True)
class Step:
    """What one step attends to: as many rows of every sequence, after as many tokens."""

    num_rows: int
    kv_len: int
    page_table: Tensor  # [num_seqs, max_pages] int32, cuda

    @property
    def num_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.kv_len + self.num_rows

    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ends of each sequence's pages (host), the pages, tokens in each last page (host)."""
        num_pages = -(-self.num_tokens // PAGE_SIZE)
        ends = torch.arange(self.num_seqs + 1, dtype=torch.int32) * num_pages
        last = (self.num_tokens - 1) % PAGE_SIZE + 1
        return (
            ends,
            self.page_table[:, :num_pages].flatten(),
            torch.full((self.num_seqs,), last, dtype=torch.int32),
        )

    def row_ends(self) -> Tensor:
        return torch.arange(self.num_seqs + 1, dtype=torch.int32) * self.num_rows


def workspace() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


# Each maker returns a kernel that is planned for the step, and the plan to time.


def decode(step: Step) -> tuple[Attend, Callable[[], None]]:
    ends, pages, last = step.pages()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        "HND",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=ends.cuda(),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )

    def plan() -> None:
        wrapper.plan(ends, pages, last, *GEOMETRY, q_data_type=torch.bfloat16)

    plan()
    return wrapper.run, plan


def prefill(step: Step, backend: str) -> tuple[Attend, Callable[[], None]]:
    ends, pages, last = step.pages()
    rows = step.row_ends()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(),
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=rows.cuda(),
        paged_kv_indptr_buf=ends.cuda(),
        paged_kv_indices_buf=pages.clone(),
        paged_kv_last_page_len_buf=last.cuda(),
        backend=backend,
    )

    def plan() -> None:
        wrapper.plan(
            rows,
            ends,
            pages,
            last,
            *GEOMETRY,
            causal=True,
            q_data_type=torch.bfloat16,
            **({"uniform_q_len": step.num_rows} if backend == "fa2" else {}),
        )

    plan()
    return wrapper.run, plan


def persistent(step: Step) -> tuple[Attend, Callable[[], None]]:
    ends, pages, _ = step.pages()
    lengths = torch.full((step.num_seqs,), step.num_tokens, dtype=torch.int32)
    attention = flashinfer.BatchAttention("HND", "cuda")
    heads = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, PAGE_SIZE)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}

    def plan() -> None:
        attention.plan(step.row_ends(), ends, pages, lengths, *heads, causal=True, **types)

    plan()
    return lambda q, kv: attention.run(q, kv)[0], plan


def xqa(step: Step) -> tuple[Attend, Callable[[], None]]:
    buffer = workspace()
    lengths = torch.full((step.num_seqs,), step.num_tokens, dtype=torch.uint32, device="cuda")
    mask = None
    if step.num_rows > 1:  # which of the step's rows a row sees, in words of 16 bits
        num_words = -(-step.num_rows // 32) * 2
        words = [
            [(1 << max(0, min(16, row + 1 - 16 * word))) - 1 for word in range(num_words)]
            for row in range(step.num_rows)
        ]
        mask = torch.tensor([words] * step.num_seqs, dtype=torch.uint16, device="cuda")

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        out: Tensor = xqa_batch_decode_with_kv_cache(
            q,
            kv,
            buffer,
            step.page_table,
            lengths,
            step.num_tokens,
            bmm1_scale=HEAD_DIM**-0.5,
            kv_layout="HND",
            q_len_per_req=step.num_rows,
            mask=mask,
        )
        return out.view_as(q)

    return attend, lambda: None


KERNELS: dict[str, Callable[[Step], tuple[Attend, Callable[[], None]]]] = {
    "decode": decode,
    "fa2": lambda step: prefill(step, "fa2"),
    "fa3": lambda step: prefill(step, "fa3"),
    "persistent": persistent,
    "xqa": xqa,
}
MAX_ROWS = {"decode": 1, "xqa": MAX_DRAFT_ROWS}


def graph_us(*bodies: Callable[[int], object]) -> float:
    """Median microseconds per layer of the bodies, run for every layer in one graph."""

    def run() -> None:
        for layer in range(NUM_LAYERS):
            for body in bodies:
                body(layer)

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(2 + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / NUM_LAYERS)
    return statistics.median(times[2:])


def host_us(plan: Callable[[], None]) -> float:
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def measure(num_seqs: int, num_rows: int, kv_len: int) -> list[dict[str, str | float | bool]]:
    num_pages = -(-(kv_len + num_rows) // PAGE_SIZE)
    shuffled = torch.randperm(num_seqs * num_pages, generator=torch.Generator().manual_seed(1))
    step = Step(num_rows, kv_len, shuffled.view(num_seqs, num_pages).int().cuda())
    first_alone = Step(num_rows, kv_len, step.page_table[:1])
    row_alone = Step(1, step.num_tokens - 1, step.page_table[:1])
    torch.manual_seed(1)
    kv_shape = (NUM_LAYERS, num_seqs * num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    kv = torch.randn(kv_shape, dtype=torch.bfloat16, device="cuda")
    q_shape = (num_seqs * num_rows, NUM_Q_HEADS, HEAD_DIM)
    q = torch.randn(q_shape, dtype=torch.bfloat16, device="cuda")
    between = [torch.ones(BETWEEN_BYTES // 4, device="cuda") for _ in range(8)]

    def read_before(layer: int) -> None:
        between[layer % 4].sum()

    def read_after(layer: int) -> None:
        between[4 + layer % 4].sum()

    read_us = graph_us(read_before, read_after)
    runs: list[dict[str, str | float | bool]] = []
    for name, make in KERNELS.items():
        if num_rows > MAX_ROWS.get(name, num_rows):
            continue
        attend, plan = make(step)

        def layer(index: int, attend: Attend = attend) -> None:
            attend(q, kv[index])

        out = attend(q, kv[0])
        sequence = make(first_alone)[0](q[:num_rows], kv[0])
        row = make(row_alone)[0](q[num_rows - 1 : num_rows], kv[0])
        runs.append(
            {
                "kernel": name,
                "us_per_layer": round(graph_us(layer), 2),
                "us_in_step": round(graph_us(read_before, layer, read_after) - read_us, 2),
                "plan_us_of_host": round(host_us(plan), 1),
                "first_sequence_alone_has_same_bits": torch.equal(sequence, out[:num_rows]),
                "last_row_alone_has_same_bits": torch.equal(row[0], out[num_rows - 1]),
            }
        )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ours", type=Path, help="what bench_cuda_attention --json wrote")
    parser.add_argument("--json", type=Path, help="write both sides' figures to this file")
    arguments = parser.parse_args()
    ours = json.loads(arguments.ours.read_text())
    device = torch.cuda.get_device_name()
    if ours["device"] != device:
        raise SystemExit(f"{arguments.ours} is of an {ours['device']}, this is an {device}")
    print(f"{'case':>16} {'kernel':10} {'us/layer':>8} {'in step':>8}  same bits: sequence, row")
    cases = []
    for case in ours["cases"]:
        if not case["is_chain"]:
            continue
        shape = case["num_seqs"], case["num_rows"], case["kv_len"]
        runs = measure(*shape)
        cases.append({"openspec": case, "flashinfer": runs})
        for run in [{"kernel": "openspec", **case}, *runs]:
            print(
                f"{f'{shape[0]}x{shape[1]} at {shape[2]}':>16} {run['kernel']:10} "
                f"{run['us_per_layer']:8.2f} {run['us_in_step']:8.2f}  "
                f"{run.get('first_sequence_alone_has_same_bits', '')!s:5} "
                f"{run.get('last_row_alone_has_same_bits', '')}",
                flush=True,
            )
    if arguments.json:
        versions = {"torch": torch.__version__, "flashinfer": flashinfer.__version__}
        result = {"device": device, **versions, "cases": cases}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
