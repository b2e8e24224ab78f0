"""Gated DeltaNet against transformers' layer, from its projections to its output projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from openspec import ops

modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

HIDDEN, NUM_TOKENS = 64, 150


def layer_of(num_k_heads: int, num_v_heads: int) -> nn.Module:
    """A layer with random weights, without its output projection."""
    torch.manual_seed(3)
    config = modeling.Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=num_k_heads,
        linear_num_value_heads=num_v_heads,
    )
    layer: nn.Module = modeling.Qwen3_5GatedDeltaNet(config, 0)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 if parameter.dim() == 3 else HIDDEN**-0.5)
    nn.init.normal_(layer.norm.weight, mean=1.0, std=0.3)
    with torch.no_grad():
        layer.A_log.copy_(torch.linspace(-6.0, 2.0, num_v_heads))
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    layer.out_proj = nn.Identity()
    return layer.eval()


def ours(layer: nn.Module, hidden: Tensor, chunk: int) -> Tensor:
    return ops.delta_net(
        layer.in_proj_qkv(hidden),
        layer.in_proj_z(hidden),
        layer.in_proj_b(hidden),
        layer.in_proj_a(hidden),
        conv_weight=layer.conv1d.weight.squeeze(1).t().float().contiguous(),
        a_log=layer.A_log.float(),
        dt_bias=layer.dt_bias.float(),
        norm_weight=layer.norm.weight.float(),
        num_k_heads=layer.num_k_heads,
        eps=layer.layer_norm_epsilon,
        chunk=chunk,
    )


@pytest.mark.parametrize(("num_k_heads", "num_v_heads"), [(1, 1), (1, 3), (2, 4)])
@torch.inference_mode()
def test_against_transformers(num_k_heads: int, num_v_heads: int) -> None:
    layer = layer_of(num_k_heads, num_v_heads)
    hidden = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    exact = layer(hidden.float()[None])[0]
    error = (ours(layer, hidden.float(), NUM_TOKENS) - exact).abs().max() / exact.abs().max()
    assert error < 1e-5
    layer.bfloat16()
    theirs = (layer(hidden[None])[0].float() - exact).square().mean().sqrt()
    error = (ours(layer, hidden, NUM_TOKENS).float() - exact).square().mean().sqrt()
    assert 0 < error <= theirs


@torch.inference_mode()
def test_chunks_give_the_same_bits() -> None:
    layer = layer_of(1, 2).bfloat16()
    hidden = torch.randn(70, HIDDEN).bfloat16()
    whole = ours(layer, hidden, 70)
    for chunk in (1, 5, 16, 17, 64):
        assert torch.equal(ours(layer, hidden, chunk), whole)


def test_what_does_not_fit_is_refused() -> None:
    layer = layer_of(1, 2)
    with pytest.raises(ValueError, match="chunk"):
        ours(layer, torch.randn(4, HIDDEN), 0)
    with pytest.raises(TypeError, match="qkv"):
        ours(layer.double(), torch.randn(4, HIDDEN).double(), 4)
