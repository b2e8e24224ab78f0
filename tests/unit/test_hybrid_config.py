"""config.json of Qwen3.5's kind: the text model's keys, wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import default_rope
from openspec.errors import ConfigError
from openspec.specs.layers import AttentionSpec, DeltaNetSpec, DenseMlpSpec

# Qwen3.5-4B's, as far as it matters.
TEXT: dict[str, Any] = {
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
NESTED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24},
}
FLAT: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"]}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(folder)


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    flat, nested = read(tmp_path, FLAT | TEXT), read(tmp_path, NESTED | {"text_config": TEXT})
    assert flat == nested
    assert flat.spec.kind == "hybrid" and flat.spec.tie_word_embeddings
    assert flat.eos_token_ids == (248044,) and flat.max_model_len == 262144
    mixers = [layer.mixer for layer in flat.spec.layers]
    assert mixers.count(DeltaNetSpec(num_key_heads=16, num_value_heads=32)) == 24
    full = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionSpec)]
    assert full == list(range(3, 32, 4))
    attention = mixers[3]
    assert isinstance(attention, AttentionSpec) and attention.has_gate and attention.has_qk_norm
    assert attention.inv_freq == default_rope(1e7, 64).inv_freq
    types = ["full_attention" if i in full else "linear_attention" for i in range(32)]
    assert read(tmp_path, FLAT | TEXT | {"layer_types": types}) == flat
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [248046, 248044]}')
    assert read(tmp_path, NESTED | {"text_config": TEXT}).eos_token_ids == (248046, 248044)
    (tmp_path / "generation_config.json").unlink()
    rope = TEXT["rope_parameters"] | {"rope_type": "mrope"}
    assert read(tmp_path, FLAT | TEXT | {"rope_parameters": rope}) == flat


# hidden, mlp, layers; query and KV heads; key and value heads of the others; tied.
PUBLISHED = {
    "0.8B": (1024, 3584, 24, (8, 2), (16, 16), True),
    "2B": (2048, 6144, 24, (8, 2), (16, 16), True),
    "9B": (4096, 12288, 32, (16, 4), (16, 32), False),
    "27B": (5120, 17408, 64, (24, 4), (16, 48), False),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(tmp_path: Path, size: str) -> None:
    hidden, mlp, num_layers, (q, kv), (keys, values), is_tied = PUBLISHED[size]
    text = TEXT | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": num_layers,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "tie_word_embeddings": is_tied,
    }
    outer = NESTED | {"text_config": text, "tie_word_embeddings": is_tied}
    spec = read(tmp_path, outer).spec
    assert spec.hidden_size == hidden and spec.tie_word_embeddings is is_tied
    mixers = [layer.mixer for layer in spec.layers]
    assert (
        mixers.count(DeltaNetSpec(num_key_heads=keys, num_value_heads=values))
        == 3 * num_layers // 4
    )
    [attention] = {mixer for mixer in mixers if isinstance(mixer, AttentionSpec)}
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (q, kv, 256)
    assert all(layer.mlp == DenseMlpSpec(intermediate_size=mlp) for layer in spec.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: expected true"),
        ({"output_gate_type": "sigmoid"}, 'output_gate_type: expected "swish"'),
        ({"linear_key_head_dim": 64}, "linear_key_head_dim: expected 128, which the kernels"),
        ({"linear_value_head_dim": 256}, "linear_value_head_dim: expected 128"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim: expected 4"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads: expected a multiple of 16"),
        ({"layer_types": ["full_attention"] * 32}, "layer_types: expected 32 entries .* of each"),
        ({"layer_types": ["linear_attention"] * 31}, "layer_types: expected 32 entries"),
        ({"layer_types": "linear_attention"}, "layer_types: expected 32 entries"),
        ({"layer_types": [["x"]] * 32}, "layer_types: expected 32 entries"),
        ({"layer_types": ["mamba"] * 32}, "layer_types: expected 32 entries"),
        ({"full_attention_interval": 64}, "full_attention_interval: expected"),
        ({"full_attention_interval": 1}, "full_attention_interval: expected"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.001}}, "even number"),
    ],
)
def test_refused_settings(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    for config in (FLAT | TEXT | changes, NESTED | {"text_config": TEXT | changes}):
        with pytest.raises(ConfigError, match=message):
            read(tmp_path, config)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "mxfp4"])
def test_other_weights_in_codes(tmp_path: Path, method: str) -> None:
    config = FLAT | TEXT | {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(ConfigError, match=r"quantization_config.*quant_method"):
        read(tmp_path, config)
    codes = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConfigError, match=r"quantization_config.*stands beside text_config"):
        read(tmp_path, NESTED | {"text_config": TEXT | codes})


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        ("Qwen3NextForCausalLM", "qwen3_next"),
        ("Qwen4ExpForConditionalGeneration", "qwen4_exp"),
    ],
)
def test_relatives_are_refused_by_name(tmp_path: Path, architecture: str, model_type: str) -> None:
    names = {"architectures": [architecture], "model_type": model_type}
    for config in (TEXT | names, NESTED | names | {"text_config": TEXT}):
        with pytest.raises(ConfigError, match="has layers of linear attention"):
            read(tmp_path, config)
