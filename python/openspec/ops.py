"""The kernels as functions on torch tensors: for tests, benchmarks and research code.

The engine calls the same kernels from C++ and never goes through here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openspec import _C  # noqa: F401  (loading it registers torch.ops.openspec)


def has_cuda() -> bool:
    """Whether the CUDA kernels were built and a CUDA device is there to run them."""
    built: bool = torch._C._dispatch_has_kernel_for_dispatch_key("openspec::ngram_lookup", "CUDA")
    return built and torch.cuda.is_available()


def ngram_lookup(
    tokens: Tensor,  # [max_num_seqs, max_len] int32: token history by slot
    num_tokens: Tensor,  # [max_num_seqs] int32: history length by slot
    seq: Tensor,  # [num_seqs] int32: slots to look up
    num_wanted: Tensor,  # [num_seqs] int32: drafts wanted, at most max_drafts; 0 skips
    *,
    max_drafts: int,
    ngram_min: int = 1,
    ngram_max: int = 4,
    max_lookback: int = 4096,
    earliest: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts by prompt lookup: what followed the longest earlier occurrence of the last tokens.

    The longest suffix of at least ngram_min tokens wins (lengths beyond ngram_max count as
    ngram_max); among equal lengths the most recent occurrence, or the earliest. Where the copy runs
    past the end of the history it goes on through the draft itself. Only the last max_lookback
    tokens count.

    Shapes: drafts [num_seqs, max_drafts] int32 (-1 past num_drafts), num_drafts [num_seqs] int32,
        match_len [num_seqs] int32 (0: no match).

    Raises: ValueError, TypeError for what does not fit. On CUDA the values inside the tensors are
        the caller's promise: reading them would stall the stream.

    Source: prompt lookup decoding; csrc/kernels/ngram_lookup.h.
    """
    drafts, num_drafts, match_len = torch.ops.openspec.ngram_lookup(
        tokens,
        num_tokens,
        seq,
        num_wanted,
        max_drafts,
        ngram_min,
        ngram_max,
        max_lookback,
        earliest,
    )
    return drafts, num_drafts, match_len


@dataclass(frozen=True)
class Spans:
    """The rows of one step, ragged over sequences: csrc/kernels/steps/rows.h says more.

    A span is the run of rows of one sequence. A row sees the span_kv_len tokens before the span,
    and of the span its ancestors and itself. All tensors are int32 and on one device.
    """

    row_span: Tensor  # [num_rows] index of the span
    row_parent: Tensor  # [num_rows] row this one follows; -1: the tokens before the span
    row_position: Tensor  # [num_rows] span_kv_len + depth of the row in its span
    span_begin: Tensor  # [num_spans + 1] first row of each span
    span_kv_len: Tensor  # [num_spans] tokens before the span
    span_seq: Tensor  # [num_spans] row of the page table
    page_table: Tensor  # [num_seqs, max_pages] page ids
    expected_kv_len: int = 0  # about the largest span_kv_len, 0: unknown; never changes a result
    may_have_trees: bool = True  # False promises that each row of a span follows the one before

    @classmethod
    def of_chains(cls, num_rows: Sequence[int], kv_len: Sequence[int], page_table: Tensor) -> Spans:
        """Spans of num_rows[i] rows after kv_len[i] tokens, with row i of the page table."""
        spans = [span for span, rows in enumerate(num_rows) for _ in range(rows)]
        depths = [depth for rows in num_rows for depth in range(rows)]
        begin = [sum(num_rows[:span]) for span in range(len(num_rows) + 1)]

        def tensor(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=page_table.device)

        return cls(
            row_span=tensor(spans),
            row_parent=tensor([row - 1 if depth else -1 for row, depth in enumerate(depths)]),
            row_position=tensor([kv_len[s] + d for s, d in zip(spans, depths, strict=True)]),
            span_begin=tensor(begin),
            span_kv_len=tensor(kv_len),
            span_seq=tensor(range(len(num_rows))),
            page_table=page_table,
            expected_kv_len=max(kv_len, default=0),
            may_have_trees=False,
        )


def span_attention_plan(q: Tensor, kv: Tensor, spans: Spans) -> Tensor:
    """What span_attention needs besides its inputs: once per step, before the first layer.

    Lists the step's work from the lengths on the device, so it belongs into a captured graph. Of q
    and kv only shapes count.

    Shapes: workspace, as many float32 as the step needs.

    Raises: as span_attention.
    """
    num_rows, num_q_heads, head_dim = q.shape
    num_bytes: int = torch.ops.openspec.span_attention_workspace_bytes(
        q.device,
        num_rows,
        spans.span_kv_len.shape[0],
        num_q_heads,
        head_dim,
        spans.page_table.shape[1] * kv.shape[3],
    )
    workspace = torch.empty((num_bytes + 3) // 4, dtype=torch.float32, device=q.device)
    torch.ops.openspec.span_attention_plan(*_attention_arguments(q, kv, spans, workspace))
    return workspace


def span_attention(
    q: Tensor,  # [num_rows, num_q_heads, head_dim] float32 (CPU) or bfloat16
    kv: Tensor,  # [num_pages, 2 (K, V), num_kv_heads, page_size, head_dim], as q
    spans: Spans,
    workspace: Tensor,  # of span_attention_plan, for the same spans
    *,
    scale: float | None = None,  # default: 1 / sqrt(head_dim)
) -> Tensor:
    """Grouped-query attention of every row over what its sequence holds in the pages up to it.

    The keys and values of the span's own rows are already in the pages: row i of a span at token
    span_kv_len + i. A row's bits depend on what it sees alone, not on the other rows of the step.

    Shapes: out, as q.

    Raises: ValueError, TypeError for what does not fit. On CUDA the values inside the tensors are
        the caller's promise: reading them would stall the stream.

    Source: csrc/kernels/span_attention.h.
    """
    out: Tensor = torch.ops.openspec.span_attention(
        *_attention_arguments(q, kv, spans, workspace),
        q.shape[-1] ** -0.5 if scale is None else scale,
    )
    return out


def _attention_arguments(
    q: Tensor, kv: Tensor, spans: Spans, workspace: Tensor
) -> tuple[Tensor | int | bool, ...]:
    return (
        q,
        kv,
        spans.row_span,
        spans.row_parent,
        spans.row_position,
        spans.span_begin,
        spans.span_kv_len,
        spans.span_seq,
        spans.page_table,
        workspace,
        spans.expected_kv_len,
        spans.may_have_trees,
    )
