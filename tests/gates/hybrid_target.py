"""Random checkpoints of Qwen3.5's kind, small, with the embedded model's tokenizer."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench.random_target import random_tensor
from safetensors.torch import save_file

from openspec.config import EMBEDDED_MODEL

FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""
EMBEDDED: dict[str, Any] = json.loads((EMBEDDED_MODEL / "config.json").read_text())
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": EMBEDDED["eos_token_id"],
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": EMBEDDED["hidden_size"],  # its heads fit
    "intermediate_size": 256,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e7,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "vocab_size": EMBEDDED["vocab_size"],
}


def attention_shapes(config: Mapping[str, Any], at: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a layer's attention."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    yield f"{at}q_proj.weight", [2 * q_rows, hidden]
    yield f"{at}k_proj.weight", [kv_rows, hidden]
    yield f"{at}v_proj.weight", [kv_rows, hidden]
    yield f"{at}o_proj.weight", [hidden, q_rows]
    yield f"{at}q_norm.weight", [head_dim]
    yield f"{at}k_norm.weight", [head_dim]


def mlp_shapes(config: Mapping[str, Any], at: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a layer's MLP, and of its norms."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    yield f"{at}mlp.gate_proj.weight", [mlp, hidden]
    yield f"{at}mlp.up_proj.weight", [mlp, hidden]
    yield f"{at}mlp.down_proj.weight", [hidden, mlp]
    yield f"{at}input_layernorm.weight", [hidden]
    yield f"{at}post_attention_layernorm.weight", [hidden]


def mtp_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the layer that drafts. Source: the published files."""
    hidden = config["hidden_size"]
    yield "mtp.fc.weight", [hidden, 2 * hidden]
    yield "mtp.pre_fc_norm_embedding.weight", [hidden]
    yield "mtp.pre_fc_norm_hidden.weight", [hidden]
    yield from attention_shapes(config, "mtp.layers.0.self_attn.")
    yield from mlp_shapes(config, "mtp.layers.0.")
    yield "mtp.norm.weight", [hidden]


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a checkpoint's tensors. Source: transformers' Qwen3_5ForCausalLM."""
    hidden = config["hidden_size"]
    k_width = 128 * config["linear_num_key_heads"]
    v_heads = config["linear_num_value_heads"]
    v_width = 128 * v_heads
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}."
        if kind == "linear_attention":
            own = f"{at}linear_attn."
            yield f"{own}in_proj_qkv.weight", [2 * k_width + v_width, hidden]
            yield f"{own}in_proj_z.weight", [v_width, hidden]
            yield f"{own}in_proj_b.weight", [v_heads, hidden]
            yield f"{own}in_proj_a.weight", [v_heads, hidden]
            yield f"{own}conv1d.weight", [2 * k_width + v_width, 1, 4]
            yield f"{own}A_log", [v_heads]
            yield f"{own}dt_bias", [v_heads]
            yield f"{own}norm.weight", [128]
            yield f"{own}out_proj.weight", [hidden, v_width]
        else:
            yield from attention_shapes(config, f"{at}self_attn.")
        yield from mlp_shapes(config, at)
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]
    yield from mtp_shapes(config)


def _tensor(name: str, shape: list[int], random: torch.Generator) -> torch.Tensor:
    if name.endswith("A_log"):  # memories of a few tokens and of hundreds
        return torch.linspace(-5.0, 0.5, shape[0]).to(torch.bfloat16)
    values = random_tensor(name, shape, torch.bfloat16, random)
    if name.endswith("norm.weight") and "linear_attn" not in name:
        values -= 1.0  # weights less 1
    return values


def tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's weights."""
    random = torch.Generator().manual_seed(seed)
    return {name: _tensor(name, shape, random) for name, shape in tensor_shapes(config)}


@cache
def folder(*, nested: bool = False, seed: int = 0, **changes: Any) -> Path:
    """A model folder; `nested`: as a model that reads images is published, with other parts."""
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="openspec-"))
    root = Path(FOLDERS[-1].name)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (EMBEDDED_MODEL / name).exists():
            shutil.copy(EMBEDDED_MODEL / name, root / name)
    config = CONFIG | changes
    weights = tensors(config, seed)
    if nested:
        text = {**config, "model_type": "qwen3_5_text"}
        tied = text.pop("tie_word_embeddings")
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": 2},
            "tie_word_embeddings": tied,
        }
        weights = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in weights.items()
        }
        weights["model.visual.merger.norm.weight"] = torch.ones(8)
    (root / "config.json").write_text(json.dumps(config))
    save_file(weights, root / "model.safetensors", {"format": "pt"})
    return root
