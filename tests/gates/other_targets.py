"""Other targets for the gates: the embedded model's weights under other switches, or in FP8.

What they write means little, but it has the embedded model's tokens and often repeats, and its
heads read them: they have the widths and layers that these were made for.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from bench.random_target import PUBLISHED, random_tensor, tensor_shapes

from openspec.config import EMBEDDED_MODEL
from openspec.tools.quantize import write_quantized

FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""
FLATTENED = 0.5
"""Factor on logits, which else leave no choice at some places where gates draw many times."""
EMBEDDED: dict[str, Any] = json.loads((EMBEDDED_MODEL / "config.json").read_text())
DISTURBED = 0.5
"""Of the numbers of an expert, relative to those of the trained MLP."""
SHAPES: dict[str, dict[str, Any]] = {
    # Tied, heads of 64, RoPE scaled from position 32 on.
    "llama": {
        **PUBLISHED["llama-3.2-1b"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_scaling": PUBLISHED["llama-3.2-1b"]["rope_scaling"]
        | {"original_max_position_embeddings": 32},
    },
    # Not tied, with biases, heads of 128.
    "qwen2.5": {
        **PUBLISHED["qwen2.5-7b"],
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
    # Experts in all layers but the second. Each is the trained MLP, disturbed.
    "mixture": {
        **PUBLISHED["qwen3-30b-a3b"],
        "num_attention_heads": EMBEDDED["num_attention_heads"],
        "num_key_value_heads": EMBEDDED["num_key_value_heads"],
        "head_dim": EMBEDDED["head_dim"],
        "mlp_only_layers": [1],
        "moe_intermediate_size": EMBEDDED["intermediate_size"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
QUANTIZED = {"fp8 channel": "fp8", "fp8 tensor": "fp8_per_tensor", "fp8 block": "fp8_per_block"}
"""The embedded model with scales of each kind -> what --quantization calls it."""
NAMES = (*SHAPES, *QUANTIZED)
ON_ONE_RANK = ("mixture",)
"""Those that ranks do not share."""


def _tensor(
    name: str, shape: list[int], trained: Mapping[str, torch.Tensor], random: torch.Generator
) -> torch.Tensor:
    if name in trained:
        return trained[name]
    mlp = trained.get(re.sub(r"experts\.\d+\.", "", name))
    if mlp is None:
        return random_tensor(name, shape, torch.bfloat16, random)
    return (mlp * (1 + DISTURBED * torch.randn(shape, generator=random))).to(torch.bfloat16)


@cache
def folder(name: str) -> Path:
    """A model folder with tokenizer, and with the heads that come with the embedded model."""
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="openspec-"))
    root = Path(FOLDERS[-1].name) / name
    if name in QUANTIZED:
        write_quantized(EMBEDDED_MODEL, root, QUANTIZED[name])
        for head in filter(Path.is_dir, EMBEDDED_MODEL.iterdir()):
            shutil.copytree(head, root / head.name)
        return root
    shutil.copytree(EMBEDDED_MODEL, root)
    same = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "eos_token_id")
    config = SHAPES[name] | {key: EMBEDDED[key] for key in same}
    config["max_position_embeddings"] = EMBEDDED["max_position_embeddings"]
    (root / "config.json").write_text(json.dumps(config))
    trained = safetensors.torch.load_file(root / "model.safetensors")
    trained["lm_head.weight"] = trained["model.embed_tokens.weight"].clone()
    trained["model.norm.weight"] *= FLATTENED
    random = torch.Generator().manual_seed(0)
    tensors = {
        tensor: _tensor(tensor, shape, trained, random) for tensor, shape in tensor_shapes(config)
    }
    assert all(list(tensors[tensor].shape) == shape for tensor, shape in tensor_shapes(config))
    safetensors.torch.save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root
