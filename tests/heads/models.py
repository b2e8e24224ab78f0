"""Language models that draft for the embedded one: cut from it, or of another family."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench.random_target import PUBLISHED, random_tensor, tensor_shapes
from safetensors.torch import load_file, save_file

from openspec.config import EMBEDDED_MODEL

CUT, STRANGER, SHORT, LONG = "cut", "stranger", "short", "long"
MASKS, STATES = "masks", "states"
KINDS = (CUT, STRANGER, SHORT, LONG, MASKS, STATES)
"""The embedded model's first layers; a random Qwen2.5 that shares nothing with it; the first layers
with fewer tokens, with more, with a mask token, and with that and states of the target."""
STATES_OF, SCALE = [-1, -3, -2], 0.125
MASK = 271
"""The embedded model's " the", which it writes often enough for some drafts to be right."""
EMBEDDING = "model.embed_tokens.weight"
NUM_LAYERS = 3
FEWER, MORE = 3072, 128
"""Tokens of the short table, and those that the long one has more."""


@cache
def folder(kind: str) -> Path:
    """A model folder, one of KINDS, with a tokenizer."""
    root = Path(tempfile.mkdtemp(prefix="openspec-model-"))
    trained = load_file(EMBEDDED_MODEL / "model.safetensors")
    embedded = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    if kind == STRANGER:
        config = _stranger(embedded)
        random = torch.Generator().manual_seed(1)
        tensors = {
            name: random_tensor(name, shape, torch.bfloat16, random)
            for name, shape in tensor_shapes(config)
        }
    else:
        table = trained[EMBEDDING]
        num_tokens = {SHORT: FEWER, LONG: len(table) + MORE}.get(kind, len(table))
        config = embedded | {"num_hidden_layers": NUM_LAYERS, "vocab_size": num_tokens}
        config |= {"pard_token": MASK} if kind in (MASKS, STATES) else {}
        config |= {"eos_token_id": 1, "bos_token_id": 0} if kind == SHORT else {}
        trained[EMBEDDING] = torch.cat([table, table[:MORE]])[:num_tokens].contiguous()
        tensors = {name: trained[name] for name, _ in tensor_shapes(config)}
        if kind == STATES:
            config |= {"spd_type": "pard2", "pard2_scale": SCALE, "pard2_target_layers": STATES_OF}
            hidden = config["hidden_size"]
            width = config["pard2_target_dim"] = len(STATES_OF) * hidden
            random = torch.Generator().manual_seed(2)
            weight = torch.randn(hidden, width, generator=random) / width**0.5
            tensors["target_proj.weight"] = weight.bfloat16()
            tensors["target_proj.bias"] = torch.randn(hidden, generator=random).bfloat16()
    (root / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", root)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


def _stranger(embedded: dict[str, Any]) -> dict[str, Any]:
    return {
        **PUBLISHED["qwen2.5-7b"],
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        **{key: embedded[key] for key in ("vocab_size", "eos_token_id", "max_position_embeddings")},
    }
