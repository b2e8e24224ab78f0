"""Mixtures of experts: Qwen3's decoder, whose layers have experts as their MLP, all or some."""

from __future__ import annotations

import dataclasses

from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.dense import (
    MAX_DIM,
    MAX_LAYERS,
    Family,
    read_decoder,
    refuse_windows,
)
from openspec.checkpoint.targets.kind import Target, TargetKind
from openspec.specs.layers import DenseMlpSpec, ExpertsSpec, LayerSpec

MAX_EXPERTS, MAX_TOP_K = 512, 16
"""What the kernels have room for."""
FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    has_qk_norm=True,
    sliding_window=4096,
    has_window_switch=True,
)


def read_target(keys: JsonKeys) -> Target:
    """Reads a config.json of Qwen3's mixtures.

    Raises:
        ConfigError: the key, the value found and the remedy.
    """
    target = read_decoder(keys, FAMILY, "mixture", _read_experts(keys))
    refuse_windows(keys, FAMILY, target.max_model_len)
    layers = target.spec.layers
    dense = _dense_layers(keys, len(layers))
    if len(dense) == len(layers):
        keys.refuse("mlp_only_layers", "at least one layer of experts")
    if dense:
        mlp = DenseMlpSpec(intermediate_size=keys.integer("intermediate_size", 1, MAX_DIM))
        layers = tuple(
            LayerSpec(mixer=layer.mixer, mlp=mlp) if i in dense else layer
            for i, layer in enumerate(layers)
        )
    return dataclasses.replace(target, spec=dataclasses.replace(target.spec, layers=layers))


def _read_experts(keys: JsonKeys) -> ExpertsSpec:
    # transformers knows the key by both names, and writes either.
    name = "num_local_experts" if keys.get("num_experts") is None else "num_experts"
    num_experts = keys.integer(name, 1, MAX_EXPERTS)
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=keys.integer("num_experts_per_tok", 1, min(num_experts, MAX_TOP_K)),
        intermediate_size=keys.integer("moe_intermediate_size", 1, MAX_DIM),
        # Of published models true, but without the key false, as in transformers.
        norm_top_k=keys.boolean("norm_topk_prob", False),
    )


def _dense_layers(keys: JsonKeys, num_layers: int) -> set[int]:
    """Layers with one MLP in place of experts."""
    step = keys.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    listed = keys.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        keys.refuse("mlp_only_layers", "a list of layers")
    return {i for i in range(num_layers) if i in listed or (i + 1) % step}


KIND = TargetKind(architectures={FAMILY.model_type: FAMILY.architecture}, read=read_target)
