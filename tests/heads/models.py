"""Language models that draft for the embedded one: cut from it, disturbed, or of another family."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from bench.random_target import PUBLISHED, random_tensor, tensor_shapes
from safetensors.torch import load_file, save_file

from openspec.config import EMBEDDED_MODEL

CUT, STRANGER, SHORT, LONG = "cut", "stranger", "short", "long"
KINDS = (CUT, STRANGER, SHORT, LONG)
"""The embedded model's first layers; a random Qwen2.5 that shares nothing with it; Llama's layers
around its embedding, with fewer tokens, or with more."""
NUM_LAYERS = 3
FEWER, MORE = 3072, 128
"""Tokens of the short table, and those that the long one has more."""


@cache
def folder(kind: str) -> Path:
    """A model folder, one of KINDS, with a tokenizer."""
    root = Path(tempfile.mkdtemp(prefix="openspec-model-"))
    trained = load_file(EMBEDDED_MODEL / "model.safetensors")
    embedded = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    if kind == CUT:
        config = embedded | {"num_hidden_layers": NUM_LAYERS}
        tensors = {name: trained[name] for name, _ in tensor_shapes(config) if name in trained}
    else:
        config = _other_config(kind, embedded)
        random = torch.Generator().manual_seed(KINDS.index(kind))
        tensors = {
            name: random_tensor(name, shape, torch.bfloat16, random)
            for name, shape in tensor_shapes(config)
        }
        if kind != STRANGER:
            _keep_embedding(tensors, trained["model.embed_tokens.weight"])
    (root / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", root)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


def _other_config(kind: str, embedded: dict[str, object]) -> dict[str, object]:
    family = "qwen2.5-7b" if kind == STRANGER else "llama-3.2-1b"
    vocab = embedded["vocab_size"]
    assert isinstance(vocab, int)
    return {
        **PUBLISHED[family],
        "hidden_size": 192 if kind == STRANGER else embedded["hidden_size"],
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": {SHORT: FEWER, LONG: vocab + MORE}.get(kind, vocab),
        "eos_token_id": embedded["eos_token_id"] if kind != SHORT else 1,
        "max_position_embeddings": embedded["max_position_embeddings"],
    }


def _keep_embedding(tensors: dict[str, torch.Tensor], table: torch.Tensor) -> None:
    """Rows of the trained embedding as far as both go; layers add little to it."""
    own = tensors["model.embed_tokens.weight"]
    num_rows = min(len(own), len(table))
    own[:num_rows] = table[:num_rows]
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.1
