"""Families of target models: one decoder with switches, and why other models are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from openspec.checkpoint.strict_json import JsonKeys, JsonValue

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family's config.json has no key for. Source: transformers' classes of that name."""

    architecture: str
    model_type: str
    has_qk_norm: bool = False
    """Norms of each query and key head before RoPE."""
    has_qkv_bias: bool = False
    """Biases of q_proj, k_proj and v_proj."""
    head_dim: int | None = None
    """Where config.json has none; None: hidden_size / num_attention_heads."""
    sliding_window: int | None = None
    """Where config.json has no such key."""
    has_window_switch: bool = False
    """`sliding_window` counts only with use_sliding_window, from layer max_window_layers on."""


FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama"),
    Family(architecture="MistralForCausalLM", model_type="mistral", sliding_window=4096),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        has_qkv_bias=True,
        sliding_window=4096,
        has_window_switch=True,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        has_qk_norm=True,
        head_dim=128,
        sliding_window=4096,
        has_window_switch=True,
    ),
)
SUPPORTED = "openspec runs the dense text models of Llama 3, Mistral, Qwen2, Qwen2.5 and Qwen3"

_HYBRID = "it has layers of linear attention or state spaces beside those of attention"
_EXPERTS = "it is a mixture of experts"
_WINDOWS = "some of its layers attend through a sliding window"
_IMAGES = "it reads images as well; give a text-only checkpoint"
REFUSED = (
    (
        r"qwen3(next|5|6|8)|qwen4|jamba|bamba|mamba|zamba|falconh1|nemotronh|lfm2|kimilinear",
        _HYBRID,
    ),
    (r"gptoss", "it has attention sinks, sliding windows and experts"),
    (r"ministral3", "it scales queries by their position"),
    (r"ministral|gemma2|gemma3(text|forcausal)|cohere2|exaone4|olmo3", _WINDOWS),
    (r"mistral3|pixtral", f"{_IMAGES} such as mistralai/Mistral-Small-24B-Instruct-2501"),
    (r"\w*vl(moe|text)?(for|$)|mllama|llava|gemma3|gemma4|llama4|internvl|\w*omni", _IMAGES),
    (r"\w*(moe|mixtral)|deepseekv|dbrx|grok|kimi|minimax", _EXPERTS),
)
"""Start of an architecture or model_type, small and without underscores -> why it is refused."""


def family_of(keys: JsonKeys) -> Family:
    """The family that a config.json names.

    Raises:
        ConfigError: another one, with the reason.
    """
    named = keys.get("architectures")
    architectures = named if isinstance(named, list) else [named]
    for architecture in architectures:
        _refuse_known(keys, "architectures", architecture)
    _refuse_known(keys, "model_type", keys.get("model_type"))
    for name in ("vision_config", "text_config"):
        if keys.get(name) is not None:
            keys.refuse(name, "no such key", f"{_IMAGES}; {SUPPORTED}")
    for name in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        if keys.get(name):
            keys.refuse(name, "no such key", f"this is a mixture of experts; {SUPPORTED}")
    for family in FAMILIES:
        if keys.get("model_type") == family.model_type:
            if named is not None and architectures != [family.architecture]:
                keys.refuse("architectures", f'["{family.architecture}"]', SUPPORTED)
            return family
    expected = ", ".join(f'"{family.model_type}"' for family in FAMILIES)
    keys.refuse("model_type", f"one of {expected}", SUPPORTED)


def _refuse_known(keys: JsonKeys, name: str, value: JsonValue) -> None:
    if not isinstance(value, str):
        return
    plain = value.lower().replace("_", "").replace(".", "")
    for pattern, reason in REFUSED:
        if re.match(pattern, plain):
            keys.refuse(name, "a dense text model", f"{reason}; {SUPPORTED}")


def refuse_windows(keys: JsonKeys, family: Family, num_positions: int) -> None:
    """Stops at a sliding window that hides any of `num_positions` tokens."""
    window = family.sliding_window
    if "sliding_window" in keys.values:
        given = keys.get("sliding_window")
        window = None if given is None else keys.integer("sliding_window", 1, 1 << 40)
    name = _windowed_key(keys, family, window)
    if name is not None and (window is None or window < num_positions):
        _refuse_window(keys, name, num_positions)


def _windowed_key(keys: JsonKeys, family: Family, window: int | None) -> str | None:
    """The key that puts a window on a layer; None: none does."""
    layer_types = keys.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            keys.refuse("layer_types", "a list of strings")
        others = [kind for kind in layer_types if kind != "full_attention"]
        if any(kind != "sliding_attention" for kind in others):
            keys.refuse("layer_types", 'only "full_attention"', f"{_HYBRID}; {SUPPORTED}")
        return "layer_types" if others else None
    if window is None:
        return None
    if not family.has_window_switch:
        return "sliding_window"
    if not keys.boolean("use_sliding_window", False):
        return None
    num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    first = keys.integer("max_window_layers", 0, 1 << 20, 28)
    return "use_sliding_window" if first < num_layers else None


def _refuse_window(keys: JsonKeys, name: str, num_positions: int) -> NoReturn:
    expected = {
        "layer_types": 'only "full_attention"',
        "use_sliding_window": "false",
        "sliding_window": f"null, or at least the model's {num_positions} positions",
    }[name]
    keys.refuse(name, expected, "sliding windows are not supported in target models")
