"""Descriptions that cross into the compiled core: of targets, heads and runners.

`csrc/bind/specs.h` reads them field by field. They hold what is known once a checkpoint and the
settings are checked; nothing here reads or checks.
"""

from __future__ import annotations

from openspec.specs.head import HeadSpec
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec
from openspec.specs.runner import RunnerConfig
from openspec.specs.target import TargetSpec

__all__ = [
    "AttentionSpec",
    "DenseMlpSpec",
    "HeadSpec",
    "LayerSpec",
    "RunnerConfig",
    "TargetSpec",
]
