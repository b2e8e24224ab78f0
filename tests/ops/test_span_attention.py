from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openspec import ops
from tests.ops.span_attention_cases import random_pages, reference

NUM_ROWS, KV_LEN = [1, 4, 3, 20], [0, 130, 15, 17]


def case(
    num_rows: list[int] = NUM_ROWS, kv_len: list[int] = KV_LEN
) -> tuple[Tensor, Tensor, ops.Spans]:
    rng = random.Random(1)
    kv, table = random_pages(rng, num_rows, kv_len, num_kv_heads=2, head_dim=64)
    q = torch.randn(sum(num_rows), 8, 64, generator=torch.Generator().manual_seed(2))
    return q, kv, ops.Spans.of_chains(num_rows, kv_len, table)


def attend(q: Tensor, kv: Tensor, spans: ops.Spans) -> Tensor:
    return ops.span_attention(q, kv, spans, ops.span_attention_plan(q, kv, spans))


def test_chains() -> None:
    q, kv, spans = case()
    assert torch.allclose(attend(q, kv, spans).double(), reference(q, kv, spans), atol=1e-5)


def test_bf16() -> None:
    q, kv, spans = case()
    q, kv = q.bfloat16(), kv.bfloat16()
    out = attend(q, kv, spans)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), reference(q, kv, spans), atol=2e-2)


def test_tree() -> None:
    q, kv, spans = case([1, 5], [3, 40])
    tree = replace(
        spans,
        row_parent=torch.tensor([-1, -1, 1, 1, 2, -1], dtype=torch.int32),
        row_position=torch.tensor([3, 40, 41, 41, 42, 40], dtype=torch.int32),
        may_have_trees=True,
    )
    out = attend(q, kv, tree)
    assert torch.allclose(out.double(), reference(q, kv, tree), atol=1e-5)
    assert not torch.equal(out, attend(q, kv, spans))


def test_a_row_depends_on_what_it_sees_alone() -> None:
    q, kv, spans = case()
    out = attend(q, kv, spans)
    for span, (num_rows, kv_len) in enumerate(zip(NUM_ROWS, KV_LEN, strict=True)):
        row = int(spans.span_begin[span]) + num_rows - 1
        alone = ops.Spans.of_chains([1], [kv_len + num_rows - 1], spans.page_table[span : span + 1])
        assert torch.equal(attend(q[row : row + 1], kv, alone)[0], out[row])


def test_scale() -> None:
    q, kv, spans = case()
    workspace = ops.span_attention_plan(q, kv, spans)
    out = ops.span_attention(q, kv, spans, workspace, scale=2.0)
    assert torch.allclose(out.double(), reference(q * 16, kv, spans), atol=1e-5)


def test_opcheck() -> None:
    q, kv, spans = case()
    workspace = ops.span_attention_plan(q, kv, spans)
    arguments = ops._attention_arguments(q, kv, spans, workspace)
    torch.library.opcheck(torch.ops.openspec.span_attention_plan.default, arguments)
    torch.library.opcheck(torch.ops.openspec.span_attention.default, (*arguments, 0.125))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", torch.zeros(28, 8, 64, dtype=torch.float16), TypeError, "q must be float32 or"),
        ("q", torch.zeros(28, 8, 64).bfloat16(), TypeError, "kv must be"),
        ("q", torch.zeros(28, 8), ValueError, "q must have 3 dimensions"),
        ("q", torch.zeros(28, 7, 64), ValueError, "a multiple of the 2 KV heads"),
        ("q", torch.zeros(28, 8, 32), ValueError, "head_dim of q"),
        ("q", torch.zeros(64, 8, 28).transpose(0, 2), ValueError, "contiguous"),
        ("q", torch.zeros(27, 8, 64), ValueError, "row_span must have 27 entries"),
        ("kv", torch.zeros(9, 64), ValueError, "kv must have 5 dimensions"),
        ("kv", torch.zeros(9, 3, 2, 16, 64), ValueError, "K and V in its second dimension"),
        ("kv", torch.zeros(9, 2, 2, 16, 64), ValueError, "page_table must be in"),
        ("row_span", torch.zeros(28), TypeError, "row_span must be int32"),
        ("row_span", torch.zeros(28).int(), ValueError, "row_span must be in"),
        ("row_parent", torch.arange(28).int(), ValueError, "row_parent must be in"),
        ("row_position", torch.zeros(28).int(), ValueError, "row_position must be in"),
        ("span_begin", torch.tensor([0, 1, 5, 8]).int(), ValueError, "must have 5 entries"),
        ("span_begin", torch.tensor([0, 1, 5, 8, 27]).int(), ValueError, r"span_begin\[-1\]"),
        ("span_begin", torch.tensor([0, 1, 29, 8, 28]).int(), ValueError, "span_begin must be in"),
        ("span_kv_len", torch.tensor([0, 150, 15, 17]).int(), ValueError, "span_kv_len must be"),
        ("span_seq", torch.tensor([0, 1, 2, 4]).int(), ValueError, "span_seq must be in"),
        ("page_table", torch.zeros(4).int(), ValueError, "page_table must have 2 dimensions"),
        ("workspace", torch.zeros(8), ValueError, "workspace must have"),
        ("expected_kv_len", -1, ValueError, "expected_kv_len must be in"),
    ],
)
def test_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    q, kv, spans = case()
    workspace = ops.span_attention_plan(q, kv, spans)
    given = {"q": q, "kv": kv, "workspace": workspace}
    if name in given:
        given[name] = value  # type: ignore[assignment]
    else:
        spans = replace(spans, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(error, match=message):
        ops.span_attention(given["q"], given["kv"], spans, given["workspace"])
