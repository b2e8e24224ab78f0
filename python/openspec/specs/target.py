"""What a target is to the compiled core."""

from __future__ import annotations

from dataclasses import dataclass

from openspec.specs.layers import LayerSpec


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

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)
