"""Qwen3 in plain PyTorch, with the parameter names of a Hugging Face checkpoint.

Training needs no generation, so there is no KV cache here: a row of tokens goes in, the final
hidden states come out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import ADDED_TOKENS, EMBEDDING_ROWS, END_OF_TEXT, TURN_END

INTO_STREAM = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class TinyConfig:
    """Sizes; the defaults repeat a power-of-two number of times into Qwen3-4B."""

    hidden_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 128
    intermediate_size: int = 1216
    vocab_size: int = EMBEDDING_ROWS
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000
    max_position_embeddings: int = 40960

    @property
    def rotary_dim(self) -> int:
        """How much of a head RoPE turns."""
        return self.head_dim

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": ADDED_TOKENS[END_OF_TEXT],
            "eos_token_id": ADDED_TOKENS[TURN_END],
            **asdict(self),
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": self.num_hidden_layers,
            "model_type": "qwen3",
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight.to(x.dtype)


def rotary_tables(config: TinyConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [length, rotary_dim / 2]."""
    half = torch.arange(0, config.rotary_dim, 2, device=device, dtype=torch.float32)
    frequencies = config.rope_theta ** (-half / config.rotary_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE that pairs dimension j with j + head_dim / 2."""
    cos, sin = (table.to(x.dtype) for table in tables)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Attention(nn.Module):
    """Causal grouped-query attention with a norm on every query and key head."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)
        self.q_norm = RMSNorm(width, config.rms_norm_eps)
        self.k_norm = RMSNorm(width, config.rms_norm_eps)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, length, hidden] -> same."""
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.config.head_dim)

        query = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), tables)
        key = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), tables)
        value = heads(self.v_proj(x)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm residual block; dropout acts on what it adds to the stream."""

    def __init__(self, config: TinyConfig, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """[batch, length, hidden] -> same."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), tables))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    """Embedding, layers and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: TinyConfig, dropout: float) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states."""
        tables = rotary_tables(self.config, tokens.shape[1], tokens.device)
        x = self.dropout(self.embed_tokens(tokens))
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)


class TinyQwen3(nn.Module):
    """The language model; its LM head is the embedding matrix."""

    def __init__(self, config: TinyConfig | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config or TinyConfig()
        self.model = Trunk(self.config, dropout)
        self.initialise()

    def initialise(self) -> None:
        """Random matrices; those that add to the residual stream are smaller."""
        residual_std = 0.02 / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(INTO_STREAM)
                nn.init.normal_(parameter, std=residual_std if into_stream else 0.02)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.embed_tokens.weight.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] token ids -> [batch, length, vocabulary] scores."""
        return self.logits(self.model(tokens))
