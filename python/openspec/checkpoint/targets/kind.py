"""What a kind of targets says about itself: which models it runs, and how to read one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.rope import RopeConfig
from openspec.specs.target import TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One target as its config.json describes it."""

    spec: TargetSpec
    """For the compiled core."""
    rope: RopeConfig
    max_model_len: int
    """Tokens that the position encoding is made for: with scaling, more than it was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetKind:
    """Models that one file in `csrc/model/targets` computes."""

    architectures: Mapping[str, str]
    """Architecture of each model_type."""
    has_text_config: bool = False
    """Whether config.json may keep the text model's keys in an object of that name, beside those of
    a part that reads images and is left out."""
    read: Callable[[JsonKeys], Target]
    """Reads and checks a config.json of one of them; raises ConfigError with key and remedy."""
