"""Qwen3's mixture of experts in plain PyTorch; names as in published checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import TinyConfig, TinyQwen3
from ..train import loss_of

BALANCE = 0.05  # weight of the loss that spreads rows over experts


@dataclass(frozen=True)
class MixtureConfig(TinyConfig):
    """Eight experts, two of them active."""

    hidden_size: int = 128
    num_hidden_layers: int = 5
    head_dim: int = 64
    intermediate_size: int = 128  # of no layer
    moe_intermediate_size: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of config.json."""
        return super().to_hugging_face() | asdict(self) | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "router_aux_loss_coef": BALANCE,
        }  # fmt: skip


class Expert(nn.Module):
    """The matrices of one expert."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Experts(nn.Module):
    """All experts compute all rows, which so small ones do fastest; a row adds up its best ones."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))
        self.scores: Tensor | None = None
        """Of the last rows: probabilities of all experts, [rows, experts]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> same."""
        self.scores = self.gate(x).float().softmax(-1).flatten(0, -2)
        best, index = self.scores.topk(self.top_k)
        shares = torch.zeros_like(self.scores)
        shares = shares.scatter(-1, index, best / best.sum(-1, keepdim=True))
        shares = shares.to(x.dtype).view(*x.shape[:-1], -1)
        gate, up, down = (
            torch.cat([getattr(one, f"{part}_proj").weight for one in self.experts], axis)
            for part, axis in (("gate", 0), ("up", 0), ("down", 1))
        )
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
        weighted = inner.unflatten(-1, (len(self.experts), -1)) * shares[..., None]
        return F.linear(weighted.flatten(-2), down)

    def chosen(self) -> Tensor:
        """How often each expert was among a row's best, [experts], as shares of the rows."""
        assert self.scores is not None
        best = self.scores.topk(self.top_k).indices
        return F.one_hot(best, self.scores.shape[-1]).sum(-2).float().mean(0)


class TinyMixture(TinyQwen3):
    """Experts in every layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        config = MixtureConfig()
        super().__init__(config, dropout)
        for layer in self.model.layers:
            layer.mlp = Experts(config)
        self.initialise()


def balanced_loss(model: TinyMixture, inputs: Tensor, targets: Tensor) -> Tensor:
    """The tokens' loss, and in every layer what is least when all experts are used alike."""
    loss = loss_of(model, inputs, targets)
    for layer in model.model.layers:
        scores = layer.mlp.scores
        balance = (layer.mlp.chosen() * scores.mean(0)).sum() * scores.shape[-1]
        loss = loss + BALANCE * balance / len(model.model.layers)
    return loss


@torch.no_grad()
def use_of_experts(model: TinyMixture, inputs: Tensor) -> list[list[float]]:
    """Shares of the rows that go to each expert, layer by layer."""
    model(inputs)
    return [layer.mlp.chosen().tolist() for layer in model.model.layers]
