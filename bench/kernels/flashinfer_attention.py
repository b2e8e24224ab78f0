"""Times span_attention beside FlashInfer's paged attention, in one run on one GPU.

    pip install flashinfer-python                 # no dependency of openspec
    python bench/kernels/flashinfer_attention.py [--json PATH] [--kernels fa2,xqa]

Qwen3-4B's shape in bf16, pages of 16 tokens. Both sides read the same K, V and pages, write outputs
that the allocator hands out, and run in CUDA graphs of 36 layers, each with K and V of its own. "in
step" is what a layer adds where 100 MB are read before each, as weights are: they wash K, V and the
instructions out of the caches. Figures are medians. FlashInfer is planned before its graph is
captured. Its plan() is work of the host in every step, ours a kernel in the graph: both are timed
apart. Kernels named "exact" were planned for these lengths alone, those named "graph" for any that
a captured graph may meet (use_cuda_graph=True). XQA has no plan, and is compiled for each number of
rows. FlashInfer compiles every kernel on first use, which takes minutes.

Every output is compared with ours, and within each kernel bit by bit: the first sequence alone with
the same in its batch, and its last row alone with the same among its rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openspec import ops

try:
    import flashinfer
    from flashinfer.decode import xqa_batch_decode_with_kv_cache
except ImportError as error:
    raise SystemExit(f"needs FlashInfer: pip install flashinfer-python ({error})") from None

NUM_LAYERS = 36
GEOMETRY = NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
REPLAYS = 9
BETWEEN_BYTES = 100 << 20
FLASHINFER_WORKSPACE_BYTES = 256 << 20
FIXED_SPLIT_PAGES = 16  # of FlashInfer's batch-invariant mode
MAX_DRAFT_ROWS = 64  # of kernels that are not meant for prompts

# Sequences, rows of each, tokens before them.
CASES = [
    (1, 1, 600),
    (4, 1, 600),
    (16, 1, 600),
    (64, 1, 600),
    (1, 16, 600),
    (4, 16, 600),
    (16, 5, 600),
    (1, 64, 600),
    (1, 2048, 0),
    (1, 2048, 6144),
]


@dataclass(frozen=True)
class Step:
    """What one step attends to: as many rows of every sequence, behind as many tokens."""

    num_rows: int
    kv_len: int
    page_table: Tensor  # [num_seqs, max_pages] int32, cuda

    @classmethod
    def shuffled(cls, num_seqs: int, num_rows: int, kv_len: int) -> Step:
        num_pages = -(-(kv_len + num_rows) // PAGE_SIZE)
        pages = torch.randperm(num_seqs * num_pages, generator=torch.Generator().manual_seed(1))
        return cls(num_rows, kv_len, pages.view(num_seqs, num_pages).int().cuda())

    @property
    def num_seqs(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.kv_len + self.num_rows

    def first_sequence(self) -> Step:
        return Step(self.num_rows, self.kv_len, self.page_table[:1])

    def last_row_of_first(self) -> Step:
        return Step(1, self.num_tokens - 1, self.page_table[:1])

    def num_bytes(self) -> int:
        """Read and written at least."""
        rows = 2 * self.num_seqs * self.num_rows * NUM_Q_HEADS * HEAD_DIM
        return 2 * (rows + self.num_seqs * self.num_tokens * 2 * NUM_KV_HEADS * HEAD_DIM)

    def flop(self) -> float:
        seen = self.num_rows * (self.kv_len + 0.5 * (self.num_rows + 1))
        return self.num_seqs * seen * 4 * NUM_Q_HEADS * HEAD_DIM


@dataclass(frozen=True)
class Kernel:
    """A way to attend, made for one step and ready to run."""

    attend: Callable[[Tensor, Tensor], Tensor]  # (q, kv of a layer) -> out
    plan: Callable[[], object] | None
    plans_on_device: bool = False


def make_openspec(step: Step) -> Kernel:
    spans = ops.Spans.of_chains(
        [step.num_rows] * step.num_seqs, [step.kv_len] * step.num_seqs, step.page_table
    )
    # Of these the plan looks at the shapes only.
    q = torch.empty(
        step.num_seqs * step.num_rows, NUM_Q_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
    )
    kv = torch.empty(1, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, dtype=q.dtype, device="cuda")
    workspace = ops.span_attention_plan(q, kv, spans)
    return Kernel(
        lambda q, kv: ops.span_attention(q, kv, spans, workspace),
        lambda: ops.span_attention_plan(q, kv, spans),
        plans_on_device=True,
    )


def flashinfer_workspace() -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def flashinfer_pages(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Ends of each sequence's pages (host), the pages, tokens in each last page (host)."""
    num_pages = -(-step.num_tokens // PAGE_SIZE)
    indptr = torch.arange(step.num_seqs + 1, dtype=torch.int32) * num_pages
    last = torch.full((step.num_seqs,), (step.num_tokens - 1) % PAGE_SIZE + 1, dtype=torch.int32)
    return indptr, step.page_table[:, :num_pages].flatten(), last


def make_decode(step: Step, *, is_for_graphs: bool) -> Kernel:
    """Decode without tensor cores."""
    indptr, pages, last = flashinfer_pages(step)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        flashinfer_workspace(),
        "HND",
        use_cuda_graph=is_for_graphs,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=pages.clone(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )

    def plan() -> None:
        wrapper.plan(indptr, pages, last, *GEOMETRY, q_data_type=torch.bfloat16)

    plan()
    return Kernel(wrapper.run, plan)


def make_prefill(step: Step, *, backend: str, is_for_graphs: bool, **options: Any) -> Kernel:
    """Any rows on tensor cores: what decode with use_tensor_cores=True runs too."""
    indptr, pages, last = flashinfer_pages(step)
    row_indptr = torch.arange(step.num_seqs + 1, dtype=torch.int32) * step.num_rows
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        flashinfer_workspace(),
        "HND",
        use_cuda_graph=is_for_graphs,
        qo_indptr_buf=row_indptr.cuda(),
        paged_kv_indptr_buf=indptr.cuda(),
        paged_kv_indices_buf=pages.clone(),
        paged_kv_last_page_len_buf=last.cuda(),
        backend=backend,
    )

    def plan() -> None:
        wrapper.plan(
            row_indptr,
            indptr,
            pages,
            last,
            *GEOMETRY,
            causal=True,
            q_data_type=torch.bfloat16,
            **options,
        )

    plan()
    return Kernel(wrapper.run, plan)


def make_persistent(step: Step) -> Kernel:
    """One kernel for decode and prefill, its work listed by the host."""
    indptr, pages, _ = flashinfer_pages(step)
    row_indptr = torch.arange(step.num_seqs + 1, dtype=torch.int32) * step.num_rows
    lengths = torch.full((step.num_seqs,), step.num_tokens, dtype=torch.int32)
    attention = flashinfer.BatchAttention("HND", "cuda")

    def plan() -> None:
        attention.plan(
            row_indptr,
            indptr,
            pages,
            lengths,
            NUM_Q_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            HEAD_DIM,
            PAGE_SIZE,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )

    plan()
    return Kernel(lambda q, kv: attention.run(q, kv)[0], plan)


def make_xqa(step: Step) -> Kernel:
    workspace = flashinfer_workspace()
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
            workspace,
            step.page_table,
            lengths,
            step.num_tokens,
            bmm1_scale=HEAD_DIM**-0.5,
            kv_layout="HND",
            q_len_per_req=step.num_rows,
            mask=mask,
        )
        return out.view_as(q)

    return Kernel(attend, None)


def makers(step: Step) -> Iterator[tuple[str, Callable[[Step], Kernel]]]:
    """Names and makers of the kernels that have the step, ours first."""
    yield "openspec", make_openspec
    for mode, is_for_graphs in [("graph", True), ("exact", False)]:
        if step.num_rows == 1:
            yield f"decode {mode}", lambda s, g=is_for_graphs: make_decode(s, is_for_graphs=g)
        yield (
            f"fa2 {mode}",
            lambda s, g=is_for_graphs: make_prefill(
                s, backend="fa2", is_for_graphs=g, uniform_q_len=s.num_rows
            ),
        )
        yield (
            f"fa3 {mode}",
            lambda s, g=is_for_graphs: make_prefill(s, backend="fa3", is_for_graphs=g),
        )
    yield "persistent", make_persistent
    if step.num_rows <= MAX_DRAFT_ROWS:
        yield (
            "fa2 exact, fixed split",
            lambda s: make_prefill(
                s, backend="fa2", is_for_graphs=False, fixed_split_size=FIXED_SPLIT_PAGES
            ),
        )
        yield "xqa", make_xqa


def graph_seconds(body: Callable[[], object]) -> float:
    """Median seconds of a replay of `body`, captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for _ in range(2):
        graph.replay()
    seconds = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def repeat_layers(*bodies: Callable[[int], object]) -> Callable[[], None]:
    """What runs the bodies for every layer. Outputs are dropped at once: the next layer gets their
    memory, on both sides."""

    def run() -> None:
        for layer in range(NUM_LAYERS):
            for body in bodies:
                body(layer)

    return run


def plan_seconds(kernel: Kernel) -> float:
    """Of the GPU for ours, of the host for theirs; 0: no plan."""
    if kernel.plan is None:
        return 0.0
    plan = kernel.plan
    if kernel.plans_on_device:
        return graph_seconds(repeat_layers(lambda _: plan())) / NUM_LAYERS
    seconds = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def read_bytes_per_second() -> float:
    """The best of several sums over far more than the L2 holds."""
    data = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return float(data.nbytes / min(graph_seconds(data.sum) for _ in range(5)))


@dataclass(frozen=True)
class Run:
    """One kernel's figures in one case."""

    kernel: str
    us_per_layer: float
    us_in_step: float
    tb_per_s_in_step: float
    fraction_of_read_bandwidth: float
    tflop_per_s_in_step: float
    plan_us: float  # ours on the GPU, theirs on the host
    is_close_to_openspec: bool
    max_difference: float
    first_sequence_alone_has_same_bits: bool
    last_row_alone_has_same_bits: bool


def measure(
    step: Step, between: list[Tensor], read_rate: float, is_wanted: Callable[[str], bool]
) -> Iterator[Run]:
    torch.manual_seed(1)
    num_pages = step.page_table.numel()
    shape = (NUM_LAYERS, num_pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    kv = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    shape = (step.num_seqs * step.num_rows, NUM_Q_HEADS, HEAD_DIM)
    q = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def read(layer: int) -> None:
        between[layer % len(between)].sum()

    read_seconds = graph_seconds(repeat_layers(read))
    ours = make_openspec(step).attend(q, kv[0])
    for name, make in makers(step):
        if not is_wanted(name):
            continue
        kernel = make(step)

        def attend(layer: int, kernel: Kernel = kernel) -> Tensor:
            return kernel.attend(q, kv[layer])

        out = attend(0)
        first = make(step.first_sequence()).attend(q[: step.num_rows], kv[0])
        last = make(step.last_row_of_first()).attend(q[step.num_rows - 1 : step.num_rows], kv[0])
        layers = graph_seconds(repeat_layers(attend)) / NUM_LAYERS
        in_step = (graph_seconds(repeat_layers(read, attend)) - read_seconds) / NUM_LAYERS
        rate = step.num_bytes() / in_step
        yield Run(
            kernel=name,
            us_per_layer=round(layers * 1e6, 2),
            us_in_step=round(in_step * 1e6, 2),
            tb_per_s_in_step=round(rate / 1e12, 3),
            fraction_of_read_bandwidth=round(rate / read_rate, 3),
            tflop_per_s_in_step=round(step.flop() / in_step / 1e12, 1),
            plan_us=round(plan_seconds(kernel) * 1e6, 1),
            is_close_to_openspec=torch.allclose(out, ours, atol=1e-2, rtol=2e-2),
            max_difference=round((out - ours).abs().max().item(), 5),
            first_sequence_alone_has_same_bits=torch.equal(first, out[: step.num_rows]),
            last_row_alone_has_same_bits=torch.equal(last[0], out[step.num_rows - 1]),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--kernels",
        type=lambda text: tuple(text.split(",")),
        default=("",),
        help="of FlashInfer's only those whose names begin with one of these",
    )
    arguments = parser.parse_args()
    names = ("openspec", *arguments.kernels)
    if not ops.has_cuda():
        raise SystemExit("needs a CUDA device and the CUDA build")

    read_rate = read_bytes_per_second()
    between = [torch.ones(BETWEEN_BYTES // 4, device="cuda") for _ in range(4)]
    print(f"{torch.cuda.get_device_name()}, reads {read_rate / 1e12:.2f} TB/s")
    print(
        f"{'seqs x rows':>11} {'behind':>6}  {'kernel':22} {'us/layer':>8} {'in step':>8} "
        f"{'of read':>7} {'TFLOP/s':>7} {'plan us':>8}  close  same bits: sequence, row alone"
    )
    cases = []
    num_different = 0
    for num_seqs, num_rows, kv_len in CASES:
        step = Step.shuffled(num_seqs, num_rows, kv_len)
        case = {"num_seqs": num_seqs, "num_rows": num_rows, "kv_len": kv_len}
        runs = []
        for run in measure(step, between, read_rate, lambda name: name.startswith(names)):
            runs.append(asdict(run))
            num_different += not run.is_close_to_openspec
            print(
                f"{f'{num_seqs} x {num_rows}':>11} {kv_len:>6}  {run.kernel:22} "
                f"{run.us_per_layer:>8} {run.us_in_step:>8} {run.fraction_of_read_bandwidth:>7} "
                f"{run.tflop_per_s_in_step:>7} {run.plan_us:>8}  {run.is_close_to_openspec!s:5}  "
                f"{run.first_sequence_alone_has_same_bits!s:5} {run.last_row_alone_has_same_bits}",
                flush=True,
            )
        cases.append({**case, "num_bytes": step.num_bytes(), "flop": step.flop(), "runs": runs})
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "flashinfer": flashinfer.__version__,
            "commit": commit or None,
            "command": "python bench/kernels/flashinfer_attention.py",
            "num_layers": NUM_LAYERS,
            "num_q_heads": NUM_Q_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
            "page_size": PAGE_SIZE,
            "read_tb_per_s": round(read_rate / 1e12, 3),
        }
        text = json.dumps({"environment": environment, "cases": cases}, indent=1)
        arguments.json.write_text(text + "\n")
    if num_different > 0:
        raise SystemExit(f"{num_different} outputs differ from ours")


if __name__ == "__main__":
    main()
