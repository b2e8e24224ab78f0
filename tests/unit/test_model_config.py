from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import YarnParams, default_rope, linear_rope, yarn_rope
from openspec.errors import ConfigError
from tests.unit.examples import examples

# hidden, layers, q heads, kv heads, intermediate, tied
SIZES = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "14B": (5120, 40, 40, 8, 17408, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}


def config_json(size: str = "0.6B", **changes: Any) -> dict[str, Any]:
    hidden, layers, q_heads, kv_heads, intermediate, tied = SIZES[size]
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": q_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value != "absent"}


def load(folder: Path, config: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(tmp_path: Path, size: str) -> None:
    config = load(tmp_path, config_json(size))
    attention = config.spec.layers[0].mixer
    found = (
        config.hidden_size,
        config.num_layers,
        attention.num_q_heads,
        attention.num_kv_heads,
        config.spec.layers[0].mlp.intermediate_size,
        config.spec.tie_word_embeddings,
    )
    assert found == SIZES[size]
    assert (attention.head_dim, config.vocab_size) == (128, 151936)
    assert config.spec.rms_norm_eps == 1e-6
    assert config.max_model_len == 40960
    assert config.rope == default_rope(1e6, 128, 40960)
    assert config.eos_token_ids == (151645,)


def test_generation_config(tmp_path: Path) -> None:
    generation = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    config = load(tmp_path, config_json(), generation)
    assert config.eos_token_ids == (151645, 151643)
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    assert (sampling.min_p, sampling.repetition_penalty) == (None, None)
    config = load(tmp_path, config_json(), {"do_sample": False, "eos_token_id": 7})
    assert (config.eos_token_ids, config.sampling.temperature) == ((7,), 0.0)


def test_the_tokenizers_end_token_counts_too(tmp_path: Path) -> None:
    config = load(tmp_path, config_json(), {"eos_token_id": 151643})
    assert config.with_eos_token(151645).eos_token_ids == (151643, 151645)
    for known in (None, 151643, config.vocab_size):
        assert config.with_eos_token(known) is config


def test_newer_dialect(tmp_path: Path) -> None:
    changes = {
        "rope_theta": "absent",
        "rope_scaling": "absent",
        "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
        "layer_types": ["full_attention"] * 28,
        "torch_dtype": "absent",
        "dtype": "float32",
        "head_dim": "absent",
    }
    config = load(tmp_path, config_json(**changes))
    assert config.rope == default_rope(5e6, 128, 40960)


def test_yarn_dialects(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    old = load(tmp_path, config_json(rope_scaling=yarn))
    new = load(
        tmp_path, config_json(rope_theta="absent", rope_parameters={**yarn, "rope_theta": 1000000})
    )
    base = {"rope_type": "default", "rope_theta": 1000000}
    both = config_json(rope_theta="absent", rope_parameters=base, rope_scaling=yarn)
    assert load(tmp_path, both).rope == old.rope
    oldest = load(
        tmp_path,
        config_json(
            rope_scaling={
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 32768,
            }
        ),
    )
    assert old.rope == new.rope == oldest.rope
    assert old.max_model_len == 131072
    assert old.rope.scale == pytest.approx(1.1386294, abs=1e-6)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 4.0},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16384,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.8,
        "mscale_all_dim": 0.6,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.8,
    },
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0},
    LLAMA3 | {"factor": 7.3, "low_freq_factor": 0.7, "high_freq_factor": 5.1},
    {name: LLAMA3[name] for name in LLAMA3 if name != "original_max_position_embeddings"},
]


@pytest.mark.parametrize("theta", [10000.0, 1e6, 5e6, 123456.7])
@pytest.mark.parametrize("head_dim", [128, 64, 96])
@pytest.mark.parametrize("parameters", ROPE_CASES)
def test_rope_is_the_reference(
    tmp_path: Path, parameters: dict[str, Any], head_dim: int, theta: float
) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**parameters, "rope_theta": theta}
    raw = config_json(rope_theta="absent", head_dim=head_dim, rope_parameters=parameters)
    ours = load(tmp_path, raw).rope
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    if parameters["rope_type"] == "default":
        # Divided by one: the default's own function takes the whole model's module to import.
        reference.rope_parameters |= {"rope_type": "linear", "factor": 1.0}
    expected, scale = ROPE_INIT_FUNCTIONS[reference.rope_parameters["rope_type"]](reference)
    # The reference's float32 power is not always rounded correctly: a unit in the last place.
    found = torch.tensor(ours.inv_freq, dtype=torch.float32)
    assert found.tolist() == list(ours.inv_freq)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    assert (found != expected).sum() <= 3
    assert ours.scale == scale


def test_rope_functions_agree() -> None:
    assert linear_rope(1e6, 128, 1.0).inv_freq == default_rope(1e6, 128).inv_freq
    yarn = yarn_rope(1e6, 128, YarnParams(factor=1.0, original_max_position_embeddings=32768))
    assert yarn.inv_freq == pytest.approx(default_rope(1e6, 128).inv_freq, rel=2e-7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, ["architectures", "LlamaForCausalLM", "Qwen3"]),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, ["architectures", "Qwen3Moe"]),
        ({"model_type": "phi3", "architectures": None}, ["model_type", '"phi3"', '"qwen3"']),
        ({"model_type": "absent"}, ["model_type", "found nothing"]),
        ({"num_experts": 128}, ["num_experts", "128", "mixture of experts"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        ({"attention_bias": True}, ["attention_bias", "false", "found true"]),
        ({"hidden_act": "gelu"}, ["hidden_act", '"silu"', '"gelu"']),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14},
            ["use_sliding_window", "sliding windows are not supported"],
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"layer_types": 3}, ["layer_types"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "nothing"]),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            ["high_freq_factor", "more than low_freq_factor (1)", "1.0"],
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type", "llama3", "longrope"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, ["type", "dynamic"]),
        ({"rope_scaling": {"full_attention": {"rope_type": "yarn"}}}, ["for all layers"]),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", '"yarn"']),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["factor", "found nothing"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, ["factor", '"4"']),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_theta": None}, ["rope_theta", "null"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_size": 0}, ["hidden_size", "found 0"]),
        ({"hidden_size": -1}, ["hidden_size", "-1"]),
        ({"hidden_size": True}, ["hidden_size", "true"]),
        ({"hidden_size": 1024.0}, ["hidden_size", "1024.0"]),
        ({"hidden_size": "absent"}, ["hidden_size", "found nothing"]),
        ({"hidden_size": 2**80}, ["hidden_size"]),
        ({"hidden_size": 10**300}, ["hidden_size", "bits"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "16"]),
        ({"head_dim": 80}, ["head_dim", "multiple of 32"]),
        ({"head_dim": 512}, ["head_dim", "256"]),
        ({"vocab_size": 0}, ["vocab_size"]),
        ({"eos_token_id": 151936}, ["eos_token_id", "[0, 151936)"]),
        ({"eos_token_id": ["a"]}, ["eos_token_id"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8", "save the checkpoint"]),
        ({"max_position_embeddings": 10**12}, ["max_position_embeddings"]),
    ],
)
def test_refusals_name_key_value_and_remedy(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, config_json(**changes))
    message = str(caught.value)
    assert "config.json" in message
    assert len(message) < 600
    for word in words:
        assert word in message


def test_unused_sliding_window_is_fine(tmp_path: Path) -> None:
    load(tmp_path, config_json(use_sliding_window=True, sliding_window=4096))
    load(tmp_path, config_json(use_sliding_window=False, sliding_window=4096, max_window_layers=1))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":1,"a":2}', '{"a":NaN}', "\xff", "[" * 99999])
def test_broken_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        ModelConfig.from_folder(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder"):
        ModelConfig.from_folder(tmp_path / "file")
    with pytest.raises(ConfigError):
        ModelConfig.from_folder("a\0b")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        ModelConfig.from_folder(tmp_path)


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.sampled_from(["yarn", "linear", "default", 10**400, -(10**400), 1e308, 5e-324]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["yarn", "linear", "llama3", "default"])},
    optional={
        key: st.one_of(JSON, st.floats(0.0, 1e7), st.integers(0, 10**6))
        for key in (
            "factor",
            "original_max_position_embeddings",
            "rope_theta",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
            "low_freq_factor",
            "high_freq_factor",
        )
    },
)


@pytest.mark.slow
@settings(
    examples(1000),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(sorted(config_json())), JSON, max_size=3), JSON, ROPE)
def test_fuzz_only_config_errors(
    tmp_path: Path, changes: dict[str, Any], generation: Any, rope: dict[str, Any]
) -> None:
    config = config_json(**changes)
    for variant in (config, {**config_json(), "rope_parameters": rope}):
        try:
            result = load(tmp_path, variant, generation)
        except ConfigError:
            continue
        assert len(result.rope.inv_freq) == result.spec.layers[0].mixer.head_dim // 2
        assert all(0.0 <= freq < 1e30 for freq in result.rope.inv_freq)
