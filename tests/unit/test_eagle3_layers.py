"""EAGLE-3 and P-EAGLE checkpoints: layers, norms, windows and masks, and what tells of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import DraftModel
from openspec.config import EngineConfig
from openspec.drafters import get_drafter
from openspec.errors import ConfigError
from tests.heads.stubs import (
    HIDDEN,
    LAYERS,
    VOCAB,
    Tensors,
    classic,
    eagle3_layer,
    speculators,
    tensor,
    write_draft,
    write_target,
)

Format = Callable[[], tuple[dict[str, Any], Tensors]]


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return write_target(tmp_path / "target")


def read(target: ModelConfig, folder: Path, method: str = "eagle3") -> DraftModel:
    spec = get_drafter(method)
    config = EngineConfig(model=str(target.folder), method=method, draft_model=str(folder))
    spec.validate(config.draft_setup(target))
    assert spec.read_draft_model is not None
    return spec.read_draft_model(config.draft_setup(target))


def read_format(target: ModelConfig, make: Format, **changes: Any) -> DraftModel:
    config, tensors = make()
    return read(target, write_draft(target.folder.parent / "draft", config | changes, tensors))


NORM_FLAGS = {"fc_norm": "slices", "use_aux_norm": "slices", "norm_before_fc": "whole"}


@pytest.mark.parametrize("flag", NORM_FLAGS)
@pytest.mark.parametrize("is_inner", [False, True])
def test_norms_of_captured_states(target: ModelConfig, flag: str, is_inner: bool) -> None:
    """SGLang reads a key of eagle_config before the same one beside it."""
    keys = {"eagle_config": {flag: True}, flag: False} if is_inner else {flag: True}
    model = read_format(target, classic, **keys)
    assert model.head.capture_norm == NORM_FLAGS[flag]
    expected = {f"fc_norm.{i}.weight" for i in range(3)} if flag != "norm_before_fc" else set()
    assert {name for name in model.tensor_names if name.startswith("fc_norm")} == expected
    assert ("input_norm.weight" in model.tensor_names) == (flag == "norm_before_fc")


def test_legacy_names_of_norms(target: ModelConfig, tmp_path: Path) -> None:
    config, tensors = classic()
    for part in ("low", "mid", "high"):
        tensors[f"aux_norm_{part}.weight"] = tensor("BF16", [HIDDEN])
    folder = write_draft(tmp_path / "draft", config | {"use_aux_norm": True}, tensors)
    assert read(target, folder).tensor_names["aux_norm_mid.weight"] == "fc_norm.1.weight"
    config |= {"fc_norm": True, "norm_output": True}
    folder = write_draft(tmp_path / "draft", config, tensors)
    model = read(target, folder)
    assert model.tensor_names["aux_norm_high.weight"] == "fc_norm.2.weight"
    assert model.head.norm_output is True
    assert "each normed (fc_norm), outputs fed back after" in "\n".join(model.details)


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])
def test_layers_behind_the_first(target: ModelConfig, tmp_path: Path, norm: str) -> None:
    """speculators and vLLM norm what enters them with one tensor, SGLang with the other."""
    config, tensors = speculators()
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    tensors |= eagle3_layer("layers.1.")
    with pytest.raises(ConfigError, match=r"num_hidden_layers: expected 1, found 2; layers\.1\."):
        read(target, write_draft(tmp_path / "deepspec", config, tensors))
    for part in "qkv":
        name = f"layers.1.self_attn.{part}_proj.weight"
        tensors[name] = tensor("BF16", [tensors[name][1][0], HIDDEN])
    del tensors[
        f"layers.1.{'hidden_norm' if norm == 'input_layernorm' else 'input_layernorm'}.weight"
    ]
    model = read(target, write_draft(tmp_path / "draft", config, tensors))
    assert len(model.head.layers) == 2
    assert model.tensor_names[f"layers.1.{norm}.weight"] == "layers.1.input_layernorm.weight"
    assert len(model.tensor_names) == 14 + 9
    for both in ("input_layernorm", "hidden_norm"):
        tensors[f"layers.1.{both}.weight"] = tensor("BF16", [HIDDEN])
    with pytest.raises(ConfigError, match=r"one of layers\.1\.input_layernorm.*found both"):
        read(target, write_draft(tmp_path / "both", config, tensors))


def windows(model: DraftModel) -> list[int]:
    return [layer.mixer.window for layer in model.head.layers]


def test_layers_that_slide(target: ModelConfig) -> None:
    keys = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    assert windows(read_format(target, classic, **keys)) == [2048]
    # transformers drops a window of this class of configurations that is not asked for.
    model = read_format(target, classic, **keys, model_type="qwen3")
    assert windows(model) == [0]
    assert "transformers drops sliding_window" in "\n".join(model.details)
    keys["layer_types"] = ["full_attention"]
    assert windows(read_format(target, classic, **keys)) == [0]


@pytest.mark.parametrize(
    ("changes", "options", "norm_output", "others"),
    [
        ({}, {}, False, [{"draft_feedback": "normed"}]),
        ({"norm_output": True}, {}, True, [{"draft_feedback": "raw"}]),
        ({}, {"draft_feedback": "normed"}, True, [{"draft_feedback": "raw"}]),
        ({"norm_output": True}, {"draft_feedback": "raw"}, False, [{"draft_feedback": "normed"}]),
        (
            {"sliding_window": 512, "model_type": "qwen3"},
            {},
            False,
            [{"draft_feedback": "normed"}, {"draft_window": 512}],
        ),
        (
            {"sliding_window": 512, "model_type": "qwen3"},
            {"draft_window": 256},
            False,
            [{"draft_feedback": "normed"}],
        ),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention"]},
            {},
            False,
            [{"draft_feedback": "normed"}],
        ),
    ],
)
def test_the_other_readings_are_named(
    target: ModelConfig,
    changes: dict[str, Any],
    options: dict[str, str | int],
    norm_output: bool,
    others: list[dict[str, str | int]],
) -> None:
    config, tensors = classic()
    folder = write_draft(target.folder.parent / "draft", config | changes, tensors)
    engine = EngineConfig(
        model=str(target.folder), method="eagle3", draft_model=str(folder), method_options=options
    )
    spec, setup = get_drafter("eagle3"), engine.draft_setup(target)
    assert spec.read_draft_model is not None and spec.plan_checkup is not None
    assert spec.read_draft_model(setup).head.norm_output is norm_output
    found = [dict(variant.options) for variant in spec.plan_checkup(setup).variants]
    assert [one for one in found if "capture_layers" not in one] == others


def test_the_last_layer_is_read_before_the_final_norm(
    target: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 20, LAYERS]}
    read_format(target, speculators, **ids)
    assert "the output of layer 35, the target's last one" in caplog.text
    caplog.clear()
    read_format(target, speculators)
    assert not caplog.text


# ---- Masks --------------------------------------------------------------------------------------


def parallel() -> tuple[dict[str, Any], Tensors]:
    """As speculators writes it."""
    config, tensors = speculators()
    config |= {"speculators_model_type": "peagle", "mask_token_id": 7}
    return config, tensors | {"mask_hidden": tensor("BF16", [1, 1, 3 * HIDDEN])}


def test_masks(target: ModelConfig, tmp_path: Path) -> None:
    config, tensors = parallel()
    model = read(target, write_draft(tmp_path / "draft", config, tensors), "peagle")
    assert model.head.mask_token == 7
    assert model.tensor_names["mask_hidden"] == "mask_hidden"
    assert "P-EAGLE" in model.description and "masks: token 7" in "\n".join(model.details)
    assert get_drafter("p-eagle").name == "peagle"
    # vLLM's keys, in a file that nothing else tells.
    config, tensors = classic()
    config |= {"parallel_drafting": True, "ptd_token_id": VOCAB - 1}
    tensors["mask_hidden"] = tensor("BF16", [1, 1, 3 * HIDDEN])
    model = read(target, write_draft(tmp_path / "vllm", config, tensors), "p_eagle")
    assert model.head.mask_token == VOCAB - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id: expected the id of the token"),
        ({"mask_token_id": VOCAB}, r"mask_token_id: expected an integer in \[0, 159\]"),
        ({"pard_token": 8}, "pard_token: expected 7, as mask_token_id says, found 8"),
        ({"speculators_model_type": "eagle3"}, "without mask_hidden; use --method eagle3"),
    ],
)
def test_masks_that_cannot_be(target: ModelConfig, changes: dict[str, Any], message: str) -> None:
    config, tensors = parallel()
    folder = write_draft(target.folder.parent / "draft", config | changes, tensors)
    with pytest.raises(ConfigError, match=message):
        read(target, folder, "peagle")


def test_a_head_without_its_mask(target: ModelConfig, tmp_path: Path) -> None:
    config, tensors = parallel()
    del tensors["mask_hidden"]
    with pytest.raises(ConfigError, match="missing tensor mask_hidden"):
        read(target, write_draft(tmp_path / "draft", config, tensors), "peagle")
