"""Layers of a draft head that see a window of the context, as transformers' configurations say."""

from __future__ import annotations

from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonKeys

SLIDING, ALL = "sliding_attention", "full_attention"
MAX_WINDOW = 1 << 24
DEFAULT_WINDOW = 4096  # of transformers' Qwen3Config
DEFAULT_FULL_LAYERS = 28  # of its max_window_layers
OPT_IN_TYPES = (None, "qwen2", "qwen3")
"""Values of model_type whose configuration drops a window unless use_sliding_window is true."""


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """Which layers see the last tokens of the context only."""

    window: int
    """Tokens; 0: every layer sees all."""
    layers: tuple[int, ...]
    """From 0, rising; empty exactly where `window` is 0."""
    dropped: str = ""
    """Why a window that stands in config.json does not count."""


def read_sliding_layers(layer: JsonKeys, num_layers: int) -> SlidingLayers:
    """Which layers slide, by layer_types, sliding_window, use_sliding_window and max_window_layers.

    Raises:
        ConfigError: other types of layers, or another number of them.
    """
    named = named_layers(layer, num_layers)
    is_used = layer.boolean("use_sliding_window", layer.get("model_type") not in OPT_IN_TYPES)
    if not is_used:
        dropped = "use_sliding_window is not true, so that transformers drops sliding_window"
        return SlidingLayers(0, (), dropped if named else "")
    has_default = layer.get("model_type") in OPT_IN_TYPES and "sliding_window" not in layer.values
    window = layer.get("sliding_window")
    if has_default:
        window = DEFAULT_WINDOW
    elif window is not None:
        window = layer.integer("sliding_window", 1, MAX_WINDOW)
    if named is None:
        first = layer.integer("max_window_layers", 0, MAX_WINDOW, DEFAULT_FULL_LAYERS)
        named = tuple(range(min(first, num_layers), num_layers))
    if window is None or not named:
        return SlidingLayers(0, (), "sliding_window is null" if named else "")
    return SlidingLayers(int(window), named)


def named_layers(layer: JsonKeys, num_layers: int) -> tuple[int, ...] | None:
    """The layers that layer_types calls sliding, rising; None: there is no such key.

    Raises:
        ConfigError: other types of layers, or another number of them.
    """
    types = layer.get("layer_types")
    if types is None:
        return None
    expected = f'{num_layers} times "{ALL}" or "{SLIDING}"'
    if not isinstance(types, list) or any(kind not in (ALL, SLIDING) for kind in types):
        layer.refuse("layer_types", expected, "other kinds of layers are not supported")
    if len(types) != num_layers:
        layer.refuse("layer_types", expected, "num_hidden_layers says how many layers there are")
    return tuple(i for i, kind in enumerate(types) if kind == SLIDING)
