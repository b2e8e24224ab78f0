"""PARD-2: a model with masks that reads states of its target, added to its embeddings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openspec.checkpoint.draft_model import DraftCheckpoint
from openspec.checkpoint.weights import CONVERTER
from openspec.drafters.spec import DraftSetup
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PROJECTION, BIAS = "target_proj.weight", "target_proj.bias"
SCALES = ("pard2_scale", "pard_scale", "feat_scale")
LAYERS, DIM = "pard2_target_layers", "pard2_target_dim"
DEFAULT_SCALE, DEFAULT_DIM = 0.02, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """Which states are read, and how they come in."""

    layers: tuple[int, ...] = ()
    """The target's layers, from 0, whose outputs these are, in rising order; none: no states."""
    is_normed: bool = False
    """Whether the last of them is read after the target's final norm."""
    has_bias: bool = False
    edits: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    """What is made at load of the tensors that take them in."""


NONE = TargetStates(edits={})


def read_states(checkpoint: DraftCheckpoint, setup: DraftSetup, hidden_size: int) -> TargetStates:
    """What a model of `hidden_size` reads of the target; no layers: tokens alone.

    Raises:
        ConfigError: keys and tensors contradict each other, with the remedy.
    """
    keys = checkpoint.keys
    if not keys.boolean("pard2", False) and keys.get("spd_type") != "pard2":
        return NONE
    target = setup.target
    indices = keys.integers(LAYERS) or (-1,)
    dim = keys.integer(DIM, 1, 1 << 24, DEFAULT_DIM)
    if dim != len(indices) * target.hidden_size:
        logger.info(
            "%s: %s is %d, the target has %d states of %d: the model drafts without them",
            keys.source,
            DIM,
            dim,
            len(indices),
            target.hidden_size,
        )
        return NONE
    # Of transformers' hidden states entry i has left layer i - 1, and the last one is normed.
    last = target.num_layers
    outputs = [(index if index >= 0 else index + last + 1) - 1 for index in indices]
    if len(set(outputs)) < len(outputs) or not all(0 <= layer < last for layer in outputs):
        keys.refuse(LAYERS, f"different indices in [1, {last}], or in [-{last}, -1]")
    if PROJECTION not in checkpoint.tensors:
        raise ConfigError(
            f"{checkpoint.folder}: missing tensor {PROJECTION}, which is published in "
            f"warp_model.bin; convert the folder once: {CONVERTER} {checkpoint.folder} NEW_FOLDER"
        )
    info = checkpoint.tensor(PROJECTION)
    if info.shape != (hidden_size, dim):
        raise ConfigError(
            f"{info.path}: {PROJECTION}: expected shape {[hidden_size, dim]}, found "
            f"{list(info.shape)}; config.json and weights belong to different models"
        )
    scale = next(
        (keys.number(name, 0.0, 1e6) for name in SCALES if keys.get(name) is not None),
        DEFAULT_SCALE,
    )
    order = sorted(range(len(outputs)), key=outputs.__getitem__)

    def in_rising_order(weight: torch.Tensor) -> torch.Tensor:
        blocks = weight.view(hidden_size, len(order), target.hidden_size)
        return scale * blocks[:, order].reshape(weight.shape)

    return TargetStates(
        layers=tuple(sorted(outputs)),
        is_normed=last - 1 in outputs,
        has_bias=BIAS in checkpoint.tensors,
        edits={PROJECTION: in_rising_order, BIAS: lambda bias: scale * bias},
    )
