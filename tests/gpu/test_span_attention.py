"""The op on CUDA against the answer in double precision; a row alone and the same in a step."""

from __future__ import annotations

import random

import pytest
import torch

from openspec import ops
from tests.ops.span_attention_cases import random_pages, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.has_cuda(), reason="needs a CUDA device and the CUDA build"),
]


@pytest.mark.parametrize(
    ("num_rows", "kv_len"),
    [
        ([1], [600]),
        ([16], [600]),
        ([1] * 16, [600 - 7 * i for i in range(16)]),
        ([5, 1, 16, 2], [0, 1, 129, 3000]),
        ([150, 3], [70, 20]),
    ],
)
def test_chains(num_rows: list[int], kv_len: list[int]) -> None:
    rng = random.Random(len(num_rows))
    kv, table = random_pages(rng, num_rows, kv_len, num_kv_heads=8, head_dim=128)
    kv = kv.bfloat16()
    q = torch.randn(sum(num_rows), 32, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = reference(q, kv, ops.Spans.of_chains(num_rows, kv_len, table))
    q, kv, table = q.cuda(), kv.cuda(), table.cuda()
    spans = ops.Spans.of_chains(num_rows, kv_len, table)
    out = ops.span_attention(q, kv, spans, ops.span_attention_plan(q, kv, spans))
    assert torch.allclose(out.cpu().double(), expected, atol=2e-2)
    row = num_rows[0] - 1
    alone = ops.Spans.of_chains([1], [kv_len[0] + row], table[:1])
    q_alone = q[row : row + 1]
    plan = ops.span_attention_plan(q_alone, kv, alone)
    assert torch.equal(ops.span_attention(q_alone, kv, alone, plan)[0], out[row])


def test_refuses_what_cuda_has_no_kernel_for() -> None:
    kv, table = random_pages(random.Random(1), [1], [40], num_kv_heads=8, head_dim=64)
    spans = ops.Spans.of_chains([1], [40], table.cuda())
    q = torch.zeros(1, 32, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="head_dim 128"):
        ops.span_attention_plan(q, kv.bfloat16().cuda(), spans)
