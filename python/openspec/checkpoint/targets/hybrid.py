"""Hybrid decoders: layers of gated attention among layers of Gated DeltaNet, as in Qwen3.5."""

from __future__ import annotations

from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.dense import (
    MAX_DIM,
    MAX_LAYERS,
    Family,
    check_layers,
    read_attention,
    read_shape,
)
from openspec.checkpoint.targets.kind import Target, TargetKind
from openspec.checkpoint.targets.refusals import refuse_experts
from openspec.checkpoint.targets.rope import read_rope
from openspec.specs.layers import (
    DELTA_HEAD_DIM,
    DeltaNetSpec,
    DenseMlpSpec,
    LayerSpec,
    MixerSpec,
)

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_INTERVAL = 4
"""Of `full_attention_interval`: every so manieth layer is one of attention."""
ROTATED = 0.25
"""Of a head, where config.json has no partial_rotary_factor."""
FIXED = {
    "linear_key_head_dim": DELTA_HEAD_DIM,
    "linear_value_head_dim": DELTA_HEAD_DIM,
    "linear_conv_kernel_dim": 4,
}
"""What the kernels are made for."""


def read_target(keys: JsonKeys) -> Target:
    """Reads a config.json of Qwen3.5's kind, or the text model's part of one.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    text = keys.object("text_config") or keys
    check_layers(text)
    refuse_experts(text)
    if text is not keys and text.get("quantization_config") is not None:
        text.refuse("quantization_config", "no such key: it stands beside text_config")
    if not text.boolean("attn_output_gate", True):
        text.refuse("attn_output_gate", "true: attention without a gate is not of this kind")
    if text.get("output_gate_type") not in (None, "swish", "silu"):
        text.refuse("output_gate_type", '"swish"')
    family = Family(architecture="", model_type="", has_qk_norm=True, head_dim=256)
    attention, rope = read_attention(
        text, family, lambda head_dim: read_rope(text, head_dim, rotated=ROTATED), has_gate=True
    )
    mlp = DenseMlpSpec(intermediate_size=text.integer("intermediate_size", 1, MAX_DIM))
    mixers: dict[str, MixerSpec] = {FULL: attention, LINEAR: _read_delta_net(text)}
    layers = tuple(LayerSpec(mixer=mixers[kind], mlp=mlp) for kind in _layer_types(text))
    is_tied = keys.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False))
    return read_shape(text, "hybrid", layers, rope, is_tied=is_tied)


def _read_delta_net(text: JsonKeys) -> DeltaNetSpec:
    for name, only in FIXED.items():
        if text.integer(name, 1, 4096, only) != only:
            text.refuse(name, f"{only}, which the kernels are made for")
    num_key_heads = text.integer("linear_num_key_heads", 1, 4096, 16)
    num_value_heads = text.integer("linear_num_value_heads", 1, 4096, 32)
    if num_value_heads % num_key_heads:
        text.refuse("linear_num_value_heads", f"a multiple of {num_key_heads}, the key heads")
    return DeltaNetSpec(num_key_heads=num_key_heads, num_value_heads=num_value_heads)


def _layer_types(text: JsonKeys) -> tuple[str, ...]:
    num_layers = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    given = text.get("layer_types")
    if given is None:
        interval = text.integer("full_attention_interval", 2, num_layers, DEFAULT_INTERVAL)
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    expected = f'{num_layers} entries of "{LINEAR}" or "{FULL}", at least one of each'
    kinds = tuple(map(str, given)) if isinstance(given, list) else ()
    if len(kinds) != num_layers or set(kinds) != {LINEAR, FULL}:
        text.refuse("layer_types", expected)
    return kinds


KIND = TargetKind(
    architectures={
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
    },
    has_text_config=True,
    read=read_target,
)
