"""Mixtures of experts against transformers' block, and its router's decisions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from openspec import ops

modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")

HIDDEN, INNER, NUM_ROWS = 96, 40, 400
SHAPES = [(8, 2, True), (8, 2, False), (128, 8, True), (5, 5, False), (64, 1, True)]


def block_of(num_experts: int, top_k: int, norm_top_k: bool) -> nn.Module:
    """A block with random weights of bfloat16, in float32."""
    torch.manual_seed(3)
    config = modeling.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_top_k,
    )
    block: nn.Module = modeling.Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        parameter.data = parameter.data.bfloat16().float()
    return block.eval()


def ours(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ops.mixture(
        x,
        router=block.gate.weight.bfloat16(),
        gate_up=block.experts.gate_up_proj.bfloat16(),
        down=block.experts.down_proj.bfloat16(),
        top_k=block.gate.top_k,
        norm_top_k=block.gate.norm_topk_prob,
    )


def decisions(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, experts in rising order, and their weights before they are rounded."""
    logits, _, expert = block.gate(x)
    share = logits.softmax(-1, dtype=torch.float).gather(-1, expert)
    if block.gate.norm_topk_prob:
        share = share / share.sum(-1, keepdim=True)
    expert, order = expert.sort(-1)
    return logits.float(), expert.int(), share.gather(-1, order)


@pytest.mark.parametrize(("num_experts", "top_k", "norm_top_k"), SHAPES)
@torch.inference_mode()
def test_against_transformers(num_experts: int, top_k: int, norm_top_k: bool) -> None:
    block = block_of(num_experts, top_k, norm_top_k)
    x = torch.randn(NUM_ROWS, HIDDEN).bfloat16()
    exact = block(x.float()[None])[0]
    out, expert, weight = ours(block, x.float())
    _, their_expert, their_weight = decisions(block, x.float())
    assert torch.equal(expert, their_expert)
    assert (weight - their_weight).abs().max() < 1e-5
    assert (out - exact).abs().max() / exact.abs().max() < 1e-5
    # In bfloat16, of rows that both send to the same experts as in float32.
    block.bfloat16()
    _, found, _ = ours(block, x)
    _, theirs, _ = decisions(block, x)
    same = (found == expert).all(-1) & (theirs == expert).all(-1)
    assert same.sum() > NUM_ROWS / 2
    mine, other = ours(block, x)[0][same].float(), block(x[None])[0][same].float()
    errors = [(one - exact[same]).square().mean().sqrt() for one in (mine, other)]
    assert 0 < errors[0] <= errors[1]


@pytest.mark.parametrize(("num_experts", "top_k", "norm_top_k"), SHAPES)
@torch.inference_mode()
def test_decisions_in_bfloat16(num_experts: int, top_k: int, norm_top_k: bool) -> None:
    """The reference's, but where the logits of the last chosen and the next are a step apart."""
    block = block_of(num_experts, top_k, norm_top_k).bfloat16()
    x = torch.randn(NUM_ROWS, HIDDEN).bfloat16()
    _, expert, _ = ours(block, x)
    logits, theirs, _ = decisions(block, x)
    differs = (expert != theirs).any(-1)
    if top_k == num_experts:
        assert not differs.any()
        return
    best = logits.topk(top_k + 1).values
    step = best[:, -2:].abs().amax(-1) * 2**-7
    is_near = best[:, -2] - best[:, -1] <= step
    near = [f"row {i}: {best[i, -2:].tolist()}" for i in is_near.nonzero().flatten().tolist()]
    print(f"{len(near)} of {NUM_ROWS} rows within a step", *near, sep="\n")
    assert not (differs & ~is_near).any()
    assert len(near) < NUM_ROWS / 4


def test_what_does_not_fit_is_refused() -> None:
    block = block_of(8, 2, True)
    with pytest.raises(TypeError, match="x is"):
        ours(block, torch.randn(4, HIDDEN).double())
    with pytest.raises(ValueError, match="router must be contiguous of shape"):
        ours(block, torch.randn(4, HIDDEN + 1))
    block.gate.top_k = 9
    with pytest.raises(ValueError, match=r"top_k must be in \[1, 8\], is 9"):
        ours(block, torch.randn(4, HIDDEN))
