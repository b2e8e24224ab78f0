"""The target of a head that is to be trained: what is refused, and its ends for torch."""

from __future__ import annotations

import dataclasses

import torch

from openspec.adapt.heads.parts import Geometry, HeadKind, TargetEnds
from openspec.checkpoint.folder import open_folder
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import checkpoint_files
from openspec.config import EngineConfig
from openspec.drafters import default_method
from openspec.errors import ConfigError
from openspec.specs.layers import AttentionSpec, DenseMlpSpec

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ENGINE_SHARE = 0.3
"""Of the GPU's memory for each engine; the rest is for torch."""


def check_target(config: EngineConfig, model: ModelConfig) -> None:
    """Refuses targets whose heads cannot be trained here.

    Raises:
        ConfigError: with the reason.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "--tensor-parallel-size: heads are trained beside a target on one GPU; drop it"
        )
    if model.quantization is not None or config.quantization is not None:
        raise ConfigError(
            "heads are trained for targets in bfloat16 and float32, not for quantised ones; give "
            "the bfloat16 checkpoint: a head for it serves its quantised form as well"
        )
    kinds = {type(layer.mixer) for layer in model.spec.layers}
    if kinds != {AttentionSpec}:
        raise ConfigError("heads for targets with a running state (hybrids) cannot be trained yet")
    if {type(layer.mlp) for layer in model.spec.layers} != {DenseMlpSpec}:
        raise ConfigError("heads for mixtures of experts cannot be trained yet")
    if config.load_format == "dummy":
        raise ConfigError("--load-format dummy: a head needs a target with weights; drop it")


def answering_config(config: EngineConfig) -> EngineConfig:
    """An engine that answers and replays: drafts from the text itself, no cached prefixes."""
    return dataclasses.replace(
        config,
        method=default_method(),
        method_options={},
        draft_model=None,
        num_speculative_tokens=None,
        enable_prefix_caching=False,  # a replay computes all of a text
        stats_interval_s=0.0,
        gpu_memory_utilization=min(config.gpu_memory_utilization, ENGINE_SHARE),
    )


def set_threads(config: EngineConfig) -> None:
    """Gives torch as many threads as the engine was given."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)


def geometry_of(
    model: ModelConfig, kind: HeadKind, intermediate_size: int | None, num_layers: int | None,
    trained_length: int,
) -> Geometry:  # fmt: skip
    """A head's sizes: attention as the target's first layer has it, and an MLP of that size."""
    layer = model.spec.layers[0]
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, DenseMlpSpec)
    return Geometry(
        hidden_size=model.hidden_size,
        num_heads=layer.mixer.num_q_heads,
        num_kv_heads=layer.mixer.num_kv_heads,
        head_dim=layer.mixer.head_dim,
        intermediate_size=intermediate_size or layer.mlp.intermediate_size,
        num_layers=num_layers or kind.num_layers,
        vocab_size=model.vocab_size,
        rms_norm_eps=model.spec.rms_norm_eps,
        rope_theta=model.rope.theta,
        trained_length=trained_length,
    )


def load_ends(model: ModelConfig, device: torch.device) -> TargetEnds:
    """Embedding, last norm and LM head of the checkpoint.

    Raises:
        ConfigError: one of them is missing.
    """
    root = open_folder(model.folder)
    wanted = {EMBEDDING, NORM} | (set() if model.spec.tie_word_embeddings else {HEAD})
    found = {}
    for file in checkpoint_files(root):
        for name in wanted & file.tensors.keys():
            tensor = file.tensor(name)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            found[name] = tensor.to(device=device, dtype=dtype, copy=True)
        file.close()
    if missing := wanted - found.keys():
        raise ConfigError(f"{root}: missing {', '.join(sorted(missing))}; get the checkpoint anew")
    return TargetEnds(
        embedding=found[EMBEDDING],
        norm=found[NORM],
        head=found.get(HEAD, found[EMBEDDING]),
        rms_norm_eps=model.spec.rms_norm_eps,
    )
