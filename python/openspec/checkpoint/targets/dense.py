"""Dense decoders: one implementation with switches for the families that differ in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.kind import Target, TargetKind
from openspec.checkpoint.targets.refusals import HYBRID, SUPPORTED
from openspec.checkpoint.targets.rope import MAX_POSITIONS, RopeConfig, read_rope
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec, MlpSpec
from openspec.specs.target import TargetSpec

MAX_LAYERS = 1024
MAX_DIM = 1 << 20
MAX_HEAD_DIM = 256


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


def read_target(keys: JsonKeys) -> Target:
    """Reads a config.json of one of the families.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    family = next(one for one in FAMILIES if one.model_type == keys.get("model_type"))
    mlp = DenseMlpSpec(intermediate_size=keys.integer("intermediate_size", 1, MAX_DIM))
    target = read_decoder(keys, family, "dense", mlp)
    refuse_windows(keys, family, target.max_model_len)
    return target


def read_decoder(keys: JsonKeys, family: Family, kind: str, mlp: MlpSpec) -> Target:
    """Reads what decoders of all kinds have in common, with attention and `mlp` in every layer.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    check_layers(keys)
    attention, rope = read_attention(keys, family, lambda head_dim: read_rope(keys, head_dim))
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * keys.integer(
        "num_hidden_layers", 1, MAX_LAYERS
    )
    is_tied = keys.boolean("tie_word_embeddings", False)
    return read_shape(keys, kind, layers, rope, is_tied=is_tied)


def read_attention(
    keys: JsonKeys,
    family: Family,
    rope_of: Callable[[int], RopeConfig],
    *,
    has_gate: bool = False,
) -> tuple[AttentionSpec, RopeConfig]:
    """The attention of a decoder's layers; `rope_of` reads RoPE for heads of so many dimensions.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    num_q_heads = keys.integer("num_attention_heads", 1, 4096)
    num_kv_heads = keys.integer("num_key_value_heads", 1, 4096)
    if num_q_heads % num_kv_heads:
        keys.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    hidden_size = keys.integer("hidden_size", 1, MAX_DIM)
    head_dim = _head_dim(keys, family, hidden_size, num_q_heads)
    keys.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = rope_of(head_dim)
    attention = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
        has_gate=has_gate,
        inv_freq=rope.inv_freq,
        rope_scale=rope.scale,
    )
    return attention, rope


def read_shape(
    keys: JsonKeys, kind: str, layers: tuple[LayerSpec, ...], rope: RopeConfig, *, is_tied: bool
) -> Target:
    """A decoder of such layers.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    spec = TargetSpec(
        kind=kind,
        hidden_size=keys.integer("hidden_size", 1, MAX_DIM),
        vocab_size=keys.integer("vocab_size", 2, 1 << 24),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        tie_word_embeddings=is_tied,
        layers=layers,
    )
    max_positions = keys.integer("max_position_embeddings", 1, MAX_POSITIONS)
    return Target(spec=spec, rope=rope, max_model_len=rope.length or max_positions)


def _head_dim(keys: JsonKeys, family: Family, hidden_size: int, num_heads: int) -> int:
    name, default = "head_dim", family.head_dim
    if keys.get(name) is None and default is None:
        if hidden_size % num_heads:
            keys.refuse("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
        name, default = "hidden_size", hidden_size // num_heads
    head_dim = keys.integer("head_dim", 2, 4096, default)
    if head_dim % 32 or head_dim > MAX_HEAD_DIM:
        needed = f"a multiple of 32 up to {MAX_HEAD_DIM}, as the kernels need"
        heads = f"{num_heads} heads of " if name == "hidden_size" else ""
        keys.refuse(name, heads + needed)
    return head_dim


def check_layers(keys: JsonKeys) -> None:
    """Refuses what would make the decoder layers of a model, or of a head on it, different ones."""
    for name in ("attention_bias", "mlp_bias"):
        if keys.boolean(name, False):
            also = ", o_proj's here" if name == "attention_bias" else ""
            keys.refuse(name, "false", f"layers with such biases{also}, are not supported")
    if keys.get("hidden_act") not in (None, "silu"):
        keys.refuse("hidden_act", '"silu"', "other activations are not supported")


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
            keys.refuse("layer_types", 'only "full_attention"', f"{HYBRID}; {SUPPORTED}")
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


KIND = TargetKind(
    architectures={family.model_type: family.architecture for family in FAMILIES},
    read=read_target,
)
