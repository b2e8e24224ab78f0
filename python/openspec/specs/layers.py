"""What a layer of a target or head is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention over paged keys and values."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    """Norms of each query and key head before RoPE."""
    has_qkv_bias: bool = False
    """Biases of q_proj, k_proj and v_proj."""
    has_gate: bool = False
    """q_proj holds of each head the query, then a gate of its output."""
    inv_freq: Sequence[float]
    """Frequencies of RoPE [head_dim / 2], scaling applied; fewer: the rest of a head does not
    turn."""
    rope_scale: float = 1.0
    """Multiplies the cosines and sines."""
    window: int = 0
    """Tokens that a row sees, the last ones; 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Gated DeltaNet: linear attention with a running state, in heads of 128."""

    num_key_heads: int
    num_value_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlpSpec:
    """A SwiGLU MLP."""

    intermediate_size: int


MixerSpec: TypeAlias = AttentionSpec | DeltaNetSpec
"""What mixes positions; another kind is one more alternative here."""
MlpSpec: TypeAlias = DenseMlpSpec
"""What works on each position; another kind is one more alternative here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: what mixes positions, then what works on each of them."""

    mixer: MixerSpec
    mlp: MlpSpec

    @property
    def window(self) -> int:
        """Tokens that a row's mixer sees, the last ones; 0: all."""
        return self.mixer.window if isinstance(self.mixer, AttentionSpec) else 0
