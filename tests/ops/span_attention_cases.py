"""Inputs and the answer in double precision for span_attention, shared by CPU and CUDA tests."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from openspec import ops

PAGE_SIZE = 16


def random_pages(
    rng: random.Random, num_rows: list[int], kv_len: list[int], *, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """K and V in float32 and a page table: pages in any order, none shared."""
    num_pages = [-(-(n + k) // PAGE_SIZE) for n, k in zip(num_rows, kv_len, strict=True)]
    pages = list(range(sum(num_pages)))
    rng.shuffle(pages)
    table = torch.zeros(len(num_pages), max(num_pages), dtype=torch.int32)
    for span, count in enumerate(num_pages):
        table[span, :count] = torch.tensor([pages.pop() for _ in range(count)])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shape = (sum(num_pages), 2, num_kv_heads, PAGE_SIZE, head_dim)
    return torch.randn(shape, generator=generator), table


def reference(q: Tensor, kv: Tensor, spans: ops.Spans) -> Tensor:
    """Row by row: softmax over the tokens before the span and the row's ancestors."""
    q, kv = q.double(), kv.double()
    out = torch.empty_like(q)
    group = q.shape[1] // kv.shape[2]
    parent = spans.row_parent.tolist()
    for row, span in enumerate(spans.row_span.tolist()):
        begin, kv_len = int(spans.span_begin[span]), int(spans.span_kv_len[span])
        tokens, ancestor = list(range(kv_len)), row
        while ancestor >= 0:
            tokens.append(kv_len + ancestor - begin)
            ancestor = parent[ancestor]
        page = spans.page_table[spans.span_seq[span]].long()
        seen = torch.tensor(tokens)
        keys, values = (
            kv[page[seen // PAGE_SIZE], i, :, seen % PAGE_SIZE].repeat_interleave(group, dim=1)
            for i in range(2)
        )
        weights = torch.einsum("hd,thd->ht", q[row], keys) * q.shape[2] ** -0.5
        out[row] = torch.einsum("ht,thd->hd", weights.softmax(dim=1), values)
    return out
