"""What a draft head is to the compiled core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from openspec.specs.layers import LayerSpec
from openspec.specs.target import TargetSpec, TensorScale

CaptureNorm = Literal["none", "slices", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head on a target's hidden states, or a model of its own.

    A head's hidden_size and vocabulary are the target's. Each method reads the fields that its
    heads have; the others keep their defaults.
    """

    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    capture_layers: tuple[int, ...]
    """The target's layers, from 0, whose outputs it reads, in rising order."""
    captures_normed: bool = False
    """Whether it reads the last of the captured layers after the target's final norm."""
    draft_vocab_size: int
    has_embedding: bool
    """Whether it has an embedding of its own; else the target's serves."""
    has_head: bool = True
    """Whether it has an output head of its own; else the target's serves."""
    has_token_map: bool
    """Whether a tensor maps its token ids to the target's."""
    kept_tokens: tuple[int, ...] = ()
    """Of a head that drafts a part of the target's vocabulary: tokens that are always in it."""
    quantized: Mapping[str, TensorScale] = field(default_factory=dict)
    """The tensors that come as e4m3 codes, and their scales."""
    mask_token: int = -1
    """What stands at positions whose token is not known; -1: nothing does."""

    model: TargetSpec | None = None
    """A whole language model that drafts; `layers` and `rms_norm_eps` are its own."""
    unknown_token: int = 0
    """What such a model reads in place of tokens beyond its table."""
    has_projection_bias: bool = False
    """Whether what takes captured states into such a model has a bias."""

    capture_norm: CaptureNorm = "none"
    """How captured states are normed: not at all, each layer's by itself, or all together."""
    norm_before_residual: bool = False
    """Whether the residual stream begins with the normed feature."""
    norm_output: bool = False
    """Whether a row's feature is the normed output of the row before."""

    block_size: int = 0
    """Rows of a block, as trained; 0: the head drafts no blocks."""
    anchor_drafts: bool = False
    """Whether the row of the last known token drafts, too."""
    is_causal: bool = False
    """Whether rows of a block do not see those after them, in layers without a window."""
    sliding_is_causal: bool = False
    """Whether rows of a block do not see those after them, in layers with a window."""
    window_follows_rows: bool = False
    """Whether the window of a causal layer ends with each row, and not with the context."""
    markov_rank: int = 0
    """Rank of the Markov head; 0: there is none."""
    conv_group: int = 0
    """Columns that share a coefficient of a convolution; 0: there are no convolutions."""
    selector_rank: int = 0
    """Rank of the selector of candidates; 0: there is none."""
    selector_top_k: int = 0
    """The selector's candidates of a position."""
    has_confidence: bool = False
    confidence_sees_token: bool = False
    """Whether confidences read the Markov head's state of the token before as well."""
