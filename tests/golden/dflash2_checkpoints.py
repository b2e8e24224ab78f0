"""Small random DFlash2 heads in both formats, for the random target beside the other heads."""

from __future__ import annotations

import numpy as np
import torch

from . import dflash_checkpoints
from .dflash_checkpoints import NUM_DRAFT_LAYERS
from .eagle3_checkpoints import HIDDEN, VOCAB, Checkpoint, Weights

GROUP, RANK, CANDIDATES = 16, 24, 16
FORMATS = {
    "zlab2": "zlab",
    "zlab2_sliding": "zlab_sliding",  # causal where they slide
    "speculators2": "speculators",
    "speculators2_sliding": "speculators_sliding",  # not causal, by this trainer's default
}
"""By name: DFlash's head that it extends."""
KEYS = {
    "conv_kernel_size": 2,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": CANDIDATES,
}


def add_parts(weights: Weights) -> None:
    """Convolutions and selector, none of them without effect."""
    for layer in range(NUM_DRAFT_LAYERS):
        for side in ("attention", "mlp"):
            name = f"layers.{layer}.{side}_conv"
            base = weights.random.standard_normal((2, 2, HIDDEN)) * 0.3
            base[:, 0] += 1
            weights.tensors[f"{name}.base_kernel"] = as_stored(base)
            weights.matrix(f"{name}.kernel_projection", 4 * HIDDEN // GROUP, HIDDEN, gain=0.3)
    for name in ("predecessor_codebook", "successor_codebook"):
        table = weights.random.standard_normal((VOCAB, RANK))
        weights.tensors[f"candidate_selector.{name}"] = as_stored(table)
    weights.matrix("candidate_selector.hidden_projection", RANK, HIDDEN)


def as_stored(values: np.ndarray) -> torch.Tensor:
    """bf16 numbers."""
    return torch.from_numpy(values).bfloat16().float()


def head(name: str, seed: int = 5) -> Checkpoint:
    """A drafter for the random target."""
    config, tensors = dflash_checkpoints.head(FORMATS[name], seed)
    weights = Weights(seed + 1)
    add_parts(weights)
    tensors = {**tensors, **weights.tensors}
    if "dflash_config" in config:
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= KEYS
    else:  # without copies of the target's tables, as its trainer writes them
        config |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
        config |= KEYS
        for table in ("embed_tokens.weight", "lm_head.weight"):
            del tensors[table]
    return config, tensors
