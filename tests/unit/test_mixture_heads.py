"""Heads of mixtures of experts, in the layouts in which they are published.

A head's MLP is dense and of a width of its own: six times the hidden size, in those of Qwen3's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig
from openspec.drafters import get_drafter
from openspec.specs.head import HeadSpec
from openspec.specs.layers import DenseMlpSpec
from tests.heads.formats import (
    Block,
    Layout,
    dflash_speculators,
    dflash_zlab,
    eagle3_classic,
    eagle3_speculators,
)
from tests.heads.stubs import HIDDEN, SIZES, VOCAB, stub, write_draft, write_target

MLP = 6 * HIDDEN
A3B, A22B = (
    dataclasses.replace(SIZES, mlp=MLP, kv_heads=1, target_layers=num_layers)
    for num_layers in (48, 94)
)
BLOCK = Block(num_layers=5, mask=VOCAB - 3, outputs=[1, 12, 23, 34, 45])


def write_mixture(folder: Path, num_layers: int) -> ModelConfig:
    return write_target(
        folder,
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_hidden_layers=num_layers,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    )


def read(tmp_path: Path, method: str, layout: Layout) -> HeadSpec:
    config, tensors = stub(layout)
    num_layers = 94 if config.get("eagle_config") else 48
    target = write_mixture(tmp_path / "target", num_layers)
    folder = write_draft(tmp_path / "draft", config, tensors)
    spec = get_drafter(method)
    setup = EngineConfig(
        model=str(target.folder), method=method, draft_model=str(folder)
    ).draft_setup(target)
    spec.validate(setup)
    assert spec.read_draft_model is not None
    return spec.read_draft_model(setup).head


def angelslim() -> Layout:
    """Qwen3-a3B_eagle3: no layer ids."""
    return eagle3_classic(A3B, max_position_embeddings=2048)


def lmsys() -> Layout:
    """Of 235B-A22B: ids of outputs."""
    ids = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 46, 90]}
    return eagle3_classic(A22B, eagle_config=ids)


def eagle31() -> Layout:
    """SpecForge's qwen3-30B-A3B-eagle3.1."""
    flags = {"fc_norm": True, "norm_output": True}
    config, shapes = eagle3_classic(A3B, max_position_embeddings=2048, **flags)
    return config, shapes | {f"fc_norm.{i}.weight": [HIDDEN] for i in range(3)}


def amazon() -> Layout:
    """Of Coder-30B-A3B: vLLM's keys of a head with masks."""
    masks = {"parallel_drafting": True, "ptd_token_id": VOCAB - 1}
    config, shapes = eagle3_classic(A3B, **masks)
    return config, shapes | {"mask_hidden": [1, 1, 3 * HIDDEN]}


CASES: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "angelslim": ("eagle3", angelslim(), {"capture_layers": (1, 23, 44)}),
    "lmsys": ("eagle3", lmsys(), {"capture_layers": (1, 46, 90)}),
    "eagle-3.1": ("eagle3", eagle31(), {"capture_norm": "slices", "norm_output": True}),
    "redhat eagle3": ("eagle3", eagle3_speculators(A3B), {"norm_before_residual": True}),
    "z-lab": ("dflash", dflash_zlab(A3B, BLOCK, 16), {"capture_layers": (1, 12, 23, 34, 45)}),
    "redhat dflash": (
        "dflash",
        dflash_speculators(A3B, BLOCK, 8),
        {"capture_layers": (1, 12, 23, 34, 45), "block_size": 8},
    ),
    "amazon": ("peagle", amazon(), {"mask_token": VOCAB - 1}),
    "jetspec": ("dflash", dflash_zlab(A3B, BLOCK, 16, causal_head=True), {"is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_published_heads(tmp_path: Path, name: str) -> None:
    method, layout, expected = CASES[name]
    head = read(tmp_path, method, layout)
    assert {key: getattr(head, key) for key in expected} == expected
    assert {layer.mlp for layer in head.layers} == {DenseMlpSpec(intermediate_size=MLP)}
