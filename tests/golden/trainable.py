"""Heads of checkpoint folders as `openspec.adapt` trains them, and what the target says to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from openspec.adapt.cycle.vocabulary import with_vocabulary
from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import (
    Geometry,
    HeadPlan,
    Lesson,
    TargetEnds,
    TrainableHead,
    VocabularyHead,
)
from openspec.adapt.start import read_head
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import config_from_settings
from tests.golden.make_eagle3 import TINY, load
from tests.golden.stored_cases import target_says

TARGET = load(TINY)
NUM_LAYERS, HIDDEN, VOCABULARY = 4, 320, 4096
MASK = 4081  # an id of no token


def ends() -> TargetEnds:
    weights = {name: tensor.float() for name, tensor in TARGET[1].items()}
    embedding = weights["model.embed_tokens.weight"]
    norm = weights["model.norm.weight"]
    return TargetEnds(embedding=embedding, norm=norm, head=embedding, rms_norm_eps=1e-6)


def plan(**changes: Any) -> HeadPlan:
    """Of the embedded model's heads."""
    sizes = {
        "num_layers": 1,
        "intermediate_size": 608,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 128,
    }
    geometry = Geometry(
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        trained_length=1024,
        **{name: changes.pop(name, size) for name, size in sizes.items()},
    )
    usual = HeadPlan(
        geometry=geometry,
        capture_layers=(0, 1, 2),
        num_target_layers=NUM_LAYERS,
        vocabulary=torch.arange(3, 4000, 31),
        mask_token=MASK,
        block_size=16,
        num_anchors=4,
    )
    return dataclasses.replace(usual, **changes)


def block_plan(kind: str) -> HeadPlan:
    block_size = 15 + kind_named(kind).num_extra_rows
    return plan(num_layers=3, capture_layers=(0, 1, 2, 3), block_size=block_size)


def shipped(kind: str) -> TrainableHead:
    """One of the heads that come with the embedded model."""
    tensors = load_file(TINY / kind / "model.safetensors")
    if "d2t" in tensors:
        offsets = tensors["d2t"]
        made = plan(vocabulary=offsets + torch.arange(len(offsets)))
    else:
        made = block_plan(kind)
    head = kind_named(kind).make(made)
    head.load(tensors)
    return head.requires_grad_(False)


def random_head(kind: str, made: HeadPlan) -> TrainableHead:
    """Untrained, but with no part that does nothing, in numbers of bfloat16."""
    torch.manual_seed(1)
    head = kind_named(kind).make(made)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(0.25)
            parameter.copy_(parameter.bfloat16().float())
    return head.requires_grad_(False)


def captured(tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """The target's states [tokens, layers * hidden] of a text."""
    return target_says(TARGET, layers, tokens)[1]


LENGTHS = (18, 30)
"""Of the two texts of a row."""


def lesson(layers: tuple[int, ...]) -> Lesson:
    """A row of two random texts, all of it generated."""
    tokens = torch.randint(0, 4000, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    parts = [part.tolist() for part in tokens[0].split(LENGTHS)]
    every = torch.cat([captured(part, (*layers, NUM_LAYERS - 1)) for part in parts])[None]
    return Lesson(
        tokens=tokens,
        places=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        generated=torch.ones_like(tokens, dtype=torch.bool),
        captured=every[..., : len(layers) * HIDDEN],
        last=every[..., -HIDDEN:],
    )


def write_without(tokens: Tensor, folder: Path) -> Tensor:
    """The shipped sequential head, which cannot draft `tokens`; returns those that it could."""
    config = config_from_settings({"method": "eagle3"})
    start = read_head(config, ModelConfig.from_folder(config.model_path))
    made = start.plan(ModelConfig.from_folder(config.model_path), 128, 4)
    head = shipped("eagle3")
    assert isinstance(head, VocabularyHead)
    gone = tokens[torch.isin(tokens, head.vocabulary)]
    others = torch.ones(VOCABULARY, dtype=torch.bool)
    others[head.vocabulary] = False
    kept = head.vocabulary[~torch.isin(head.vocabulary, gone)]
    poor = torch.cat((kept, others.nonzero()[: len(gone), 0])).sort().values
    folder.mkdir(parents=True)
    start.write(folder, with_vocabulary(head, kind_named("eagle3"), made, poor, ends()))
    return gone
