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


DELTA_HEAD_DIM = 128
"""Of the heads of a DeltaNetSpec, keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSpec:
    """Gated DeltaNet: linear attention with a running state."""

    num_key_heads: int
    num_value_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlpSpec:
    """A SwiGLU MLP."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: SwiGLU MLPs, of which each row goes to some."""

    num_experts: int
    top_k: int
    """Experts of a row: those of its greatest router logits."""
    intermediate_size: int
    """Of each expert."""
    norm_top_k: bool
    """The weights of a row's experts, their probabilities, are divided by their sum."""


MixerSpec: TypeAlias = AttentionSpec | DeltaNetSpec
"""What mixes positions; another kind is one more alternative here."""
MlpSpec: TypeAlias = DenseMlpSpec | ExpertsSpec
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
