"""Qwen3 over a whole sequence, in fp32, with the residual stream after every layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def forward(
    config: dict[str, Any], weights: dict[str, Tensor], tokens: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocabulary] and the states [n, hidden] that leave each layer."""
    w = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
    eps, head_dim, count = config["rms_norm_eps"], config["head_dim"], len(tokens)
    half = head_dim // 2

    def norm(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    frequency = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(count, dtype=torch.float32)[:, None] * frequency

    def rope(x: Tensor) -> Tensor:  # [heads, n, head_dim]
        left, right = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    h = w["embed_tokens.weight"][tokens]
    hidden_mask = torch.ones(count, count, dtype=torch.bool).triu(1)
    states = []
    for layer in range(config["num_hidden_layers"]):
        p = f"layers.{layer}"
        x = norm(f"{p}.input_layernorm", h)
        q, k, v = (
            (x @ w[f"{p}.self_attn.{part}_proj.weight"].T).view(count, -1, head_dim).transpose(0, 1)
            for part in "qkv"
        )
        q = rope(norm(f"{p}.self_attn.q_norm", q))
        k = rope(norm(f"{p}.self_attn.k_norm", k))
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = (q @ k.mT * head_dim**-0.5).masked_fill(hidden_mask, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        h = h + mixed @ w[f"{p}.self_attn.o_proj.weight"].T
        x = norm(f"{p}.post_attention_layernorm", h)
        gated = F.silu(x @ w[f"{p}.mlp.gate_proj.weight"].T) * (x @ w[f"{p}.mlp.up_proj.weight"].T)
        h = h + gated @ w[f"{p}.mlp.down_proj.weight"].T
        states.append(h)
    table = w["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm("norm", h) @ table.T, states
