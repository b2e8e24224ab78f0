"""What a target is to the compiled core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from openspec.specs.layers import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScale:
    """The scales of a tensor [N, K] of e4m3 codes."""

    name: str
    """Of the tensor that holds them."""
    shape: tuple[int, ...]
    form: str
    """tensor: one number; channel: one for each of N; block: [ceil(N / 128), ceil(K / 128)]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """A target model, layer by layer."""

    kind: str
    """The implementation that computes it, a file in `csrc/model/targets`."""
    hidden_size: int
    vocab_size: int
    """Rows of the embedding; more than the tokenizer has tokens."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    quantized: Mapping[str, TensorScale] = field(default_factory=dict)
    """The tensors that come as e4m3 codes, and their scales; all others are bfloat16."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)
