"""Families of target models: what their published files come to, and whom openspec refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench.random_target import PUBLISHED, tensor_shapes

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import Llama3Params, default_rope, llama3_rope
from openspec.errors import ConfigError

# Name -> parameters of the published model, head_dim, positions.
SIZES = {
    "llama-3-8b": (8_030_261_248, 128, 8192),
    "llama-3.1-8b": (8_030_261_248, 128, 131072),
    "llama-3.2-1b": (1_235_814_400, 64, 131072),
    "llama-3.2-3b": (3_212_749_824, 128, 131072),
    "llama-3.3-70b": (70_553_706_496, 128, 131072),
    "qwen2.5-0.5b": (494_032_768, 64, 32768),
    "qwen2.5-1.5b": (1_543_714_304, 128, 32768),
    "qwen2.5-3b": (3_085_938_688, 128, 32768),
    "qwen2.5-7b": (7_615_616_512, 128, 32768),
    "qwen2.5-14b": (14_770_033_664, 128, 32768),
    "qwen2.5-32b": (32_763_876_352, 128, 32768),
    "mistral-7b-v0.3": (7_248_023_552, 128, 32768),
    "mistral-nemo-12b": (12_247_782_400, 128, 131072),
    "mistral-small-24b": (23_572_403_200, 128, 32768),
}


def load(folder: Path, name: str, **changes: Any) -> ModelConfig:
    config = {**PUBLISHED[name], **changes}
    kept = {key: value for key, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("name", SIZES)
def test_published_models(tmp_path: Path, name: str) -> None:
    count, head_dim, positions = SIZES[name]
    config = load(tmp_path, name)
    attention = config.spec.layers[0].mixer
    assert (attention.head_dim, config.max_model_len) == (head_dim, positions)
    assert sum(math.prod(shape) for _, shape in tensor_shapes(PUBLISHED[name])) == count
    assert attention.has_qk_norm is False
    assert attention.has_qkv_bias is name.startswith("qwen2")
    assert config.spec.tie_word_embeddings is PUBLISHED[name]["tie_word_embeddings"]
    assert config.spec.rms_norm_eps == (1e-6 if name.startswith("qwen2") else 1e-5)


def test_llama3_scaling_ends_at_the_positions_named(tmp_path: Path) -> None:
    """max_position_embeddings is the scaled length here, unlike with YaRN."""
    config = load(tmp_path, "llama-3.1-8b")
    scaling = Llama3Params(
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert config.rope == llama3_rope(5e5, 128, scaling, 131072)
    assert load(tmp_path, "llama-3-8b").rope == default_rope(5e5, 128, 8192)


def test_both_dialects_say_the_same(tmp_path: Path) -> None:
    for name in ("llama-3.2-1b", "qwen2.5-7b", "mistral-nemo-12b"):
        older = load(tmp_path, name)
        scaling = PUBLISHED[name].get("rope_scaling") or {"rope_type": "default"}
        newer = load(
            tmp_path,
            name,
            rope_scaling="absent",
            rope_theta="absent",
            rope_parameters={"rope_theta": PUBLISHED[name]["rope_theta"], **scaling},
            torch_dtype="absent",
            dtype="bfloat16",
        )
        assert newer == older


def head_dim_of(folder: Path, name: str, **changes: Any) -> int:
    return load(folder, name, **changes).spec.layers[0].mixer.head_dim


def test_head_dim_of_the_config_or_of_the_widths(tmp_path: Path) -> None:
    assert head_dim_of(tmp_path, "mistral-nemo-12b") == 128  # 5120 / 32 is 160
    assert head_dim_of(tmp_path, "mistral-nemo-12b", head_dim=None) == 160
    assert head_dim_of(tmp_path, "llama-3.2-1b", head_dim="absent") == 64
    assert head_dim_of(tmp_path, "qwen3-4b", head_dim="absent") == 128  # 2560 / 32 is 80
    with pytest.raises(ConfigError, match=r"hidden_size: expected a multiple of num_att.*\(32\)"):
        load(tmp_path, "llama-3.1-8b", hidden_size=4100)
    with pytest.raises(ConfigError, match="hidden_size: expected 32 heads of a multiple of 32"):
        load(tmp_path, "llama-3.1-8b", hidden_size=2560)


def test_windows_that_hide_nothing(tmp_path: Path) -> None:
    load(tmp_path, "mistral-7b-v0.3", sliding_window=32768)
    load(tmp_path, "qwen2.5-7b", use_sliding_window=True)  # from layer 28 of 28 on
    load(tmp_path, "qwen2.5-7b", use_sliding_window=True, max_window_layers=0)  # 131072 positions
    layers = ["full_attention"] * 28
    load(tmp_path, "qwen2.5-7b", layer_types=layers, use_sliding_window=True, max_window_layers=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral-7b-v0.3", {"sliding_window": 4096}, "sliding_window: expected null, or at least"),
        # transformers' default for a file without the key
        ("mistral-7b-v0.3", {"sliding_window": "absent"}, "sliding_window: .*found nothing"),
        ("llama-3.1-8b", {"sliding_window": 8192}, "sliding_window: expected null"),
        (
            "qwen2.5-7b",
            {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096},
            "use_sliding_window: expected false, found true; sliding windows are not supported",
        ),
        ("llama-3.1-8b", {"attention_bias": True}, "attention_bias: .*o_proj's"),
        ("llama-3.1-8b", {"mlp_bias": True}, "mlp_bias: expected false, found true"),
        ("llama-3.1-8b", {"hidden_act": "gelu"}, "hidden_act"),
        (
            "llama-3.1-8b",
            {"quantization_config": {"quant_method": "awq"}},
            r'quantization_config: quant_method: .*"awq"; 4-bit weights are not read yet',
        ),
        ("mistral-small-24b", {"layer_types": ["chunked_attention"]}, "layer_types: expected only"),
        ("llama-3.1-8b", {"architectures": ["MistralForCausalLM"]}, "LlamaForCausalLM.*found"),
        ("llama-3.1-8b", {"model_type": "granite"}, 'one of "llama", .*openspec runs the dense'),
        ("llama-3.1-8b", {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, '"phi3"'),
    ],
)
def test_refused_settings(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, name, **changes)


REFUSED = [
    ("Qwen2MoeForCausalLM", "qwen2_moe", "mixture of experts"),
    ("Qwen3MoeForCausalLM", "qwen3_moe", "mixture of experts"),
    ("MixtralForCausalLM", "mixtral", "mixture of experts"),
    ("DeepseekV3ForCausalLM", "deepseek_v3", "mixture of experts"),
    ("Qwen3NextForCausalLM", "qwen3_next", "layers of linear attention"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "layers of linear attention"),
    ("GptOssForCausalLM", "gpt_oss", "attention sinks"),
    ("MinistralForCausalLM", "ministral", "sliding window"),
    ("Ministral3ForCausalLM", "ministral3", "scales queries by their position"),
    ("Mistral3ForConditionalGeneration", "mistral3", "Mistral-Small-24B-Instruct-2501"),
    ("Gemma2ForCausalLM", "gemma2", "sliding window"),
    ("Gemma3ForCausalLM", "gemma3_text", "sliding window"),
    ("Gemma3ForConditionalGeneration", "gemma3", "images"),
    ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "images"),
    ("Qwen3VLForConditionalGeneration", "qwen3_vl", "images"),
    ("MllamaForConditionalGeneration", "mllama", "images"),
    ("Llama4ForConditionalGeneration", "llama4", "images"),
    ("Phi3ForCausalLM", "phi3", "openspec runs the dense"),
    ("GemmaForCausalLM", "gemma", "openspec runs the dense"),
]


@pytest.mark.parametrize(("architecture", "model_type", "reason"), REFUSED)
def test_refused_by_name(tmp_path: Path, architecture: str, model_type: str, reason: str) -> None:
    """Whichever of the two keys there is."""
    names = {"architectures": [architecture], "model_type": model_type}
    for absent in ({}, {"architectures": "absent"}, {"model_type": "absent"}):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, "llama-3.1-8b", **{**names, **absent})
        message = str(caught.value)
        assert reason in message and "openspec runs the dense text models" in message
        if not absent:
            assert architecture in message or f'"{model_type}"' in message
    assert len(message) < 600


def test_keys_of_other_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text_config: .*images"):
        load(tmp_path, "llama-3.1-8b", text_config={"model_type": "mistral"})
    with pytest.raises(ConfigError, match=r"num_local_experts: .*mixture of experts"):
        load(tmp_path, "llama-3.1-8b", num_local_experts=8)


def test_mistrals_own_format(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"only params\.json, in Mistral's own format; give"):
        ModelConfig.from_folder(tmp_path)
