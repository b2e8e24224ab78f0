"""RoPE of draft heads: their own, by the same keys as targets; never the target's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import (
    Llama3Params,
    RopeConfig,
    YarnParams,
    default_rope,
    linear_rope,
    llama3_rope,
    yarn_rope,
)
from openspec.checkpoint.weights import DraftModel
from openspec.config import EngineConfig
from openspec.drafters import get_drafter
from tests.heads.stubs import HEAD_DIM, classic, speculators, write_draft, write_target

BASE = {"rope_theta": 5e5}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
KINDS: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "default": ({}, default_rope(5e5, HEAD_DIM)),
    "linear": ({"factor": 2.0}, linear_rope(5e5, HEAD_DIM, 2.0)),
    "yarn": (YARN, yarn_rope(5e5, HEAD_DIM, YarnParams(**YARN))),
    "llama3": (LLAMA3, llama3_rope(5e5, HEAD_DIM, Llama3Params(**LLAMA3))),
}


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return write_target(tmp_path / "target")


def read(target: ModelConfig, make: Any, keys: dict[str, Any]) -> DraftModel:
    config, tensors = make()
    layer = config.get("transformer_layer_config", config)
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        layer.pop(name, None)
    layer |= keys
    folder = write_draft(target.folder.parent / "draft", config, tensors)
    spec = get_drafter("eagle3")
    setup = EngineConfig(model=str(target.folder), method="eagle3", draft_model=str(folder))
    assert spec.read_draft_model is not None
    return spec.read_draft_model(setup.draft_setup(target))


@pytest.mark.parametrize("make", [classic, speculators])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_turns_as_its_own_config_says(target: ModelConfig, make: Any, kind: str) -> None:
    settings, expected = KINDS[kind]
    scaling = {"rope_type": kind, **settings}
    for keys in (BASE | {"rope_scaling": scaling}, {"rope_parameters": BASE | scaling}):
        model = read(target, make, keys)
        assert model.head.layers[0].mixer.inv_freq == expected.inv_freq
        assert model.head.layers[0].mixer.rope_scale == expected.scale
        shown = "unscaled" if kind == "default" else kind
        assert any(line.endswith(f"RoPE base 500000, {shown}") for line in model.details)


@pytest.mark.parametrize("make", [classic, speculators])
def test_without_keys_it_is_the_layer_class_default(target: ModelConfig, make: Any) -> None:
    assert target.rope.theta == 1e6
    model = read(target, make, {})
    assert model.head.layers[0].mixer.inv_freq == default_rope(1e4, HEAD_DIM).inv_freq
    assert model.head.layers[0].mixer.rope_scale == 1.0
    assert any(line.endswith("RoPE base 10000, unscaled") for line in model.details)


def test_positions_count_after_scaling(target: ModelConfig) -> None:
    """max_position_embeddings is what linear scaling starts from, and what llama3 ends at."""
    said = {"max_position_embeddings": 1024} | BASE
    linear = read(target, classic, said | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert any(line.startswith("positions: made for 2048,") for line in linear.details)
    llama3 = read(target, classic, said | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    assert any(line.startswith("positions: made for 1024,") for line in llama3.details)
