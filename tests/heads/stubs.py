"""Small target and draft folders without meaningful weights, in the formats of `formats.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from openspec.checkpoint.targets.config import ModelConfig
from tests.heads.formats import (
    Block,
    Layout,
    Shapes,
    Sizes,
    dflash_deepspec,
    dflash_speculators,
    dflash_zlab,
    eagle3_classic,
    eagle3_deepspec,
    eagle3_speculators,
    eagle3_tensors,
)

HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB = 64, 36, 160, 40
Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 32, 96
SIZES = Sizes(HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB, LAYERS)
OUTPUTS = [1, 9, 17, 25, 33]
BLOCK = Block(num_layers=2, mask=VOCAB - 3, outputs=OUTPUTS)
RANK = 8
COPY = 7
"""What fills the target's embedding and its copies."""
Tensors = dict[str, tuple[str, list[int], bytes]]
Checkpoint = tuple[dict[str, Any], Tensors]
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1}


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, object] = {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(dtype: str, shape: list[int], fill: int = 0) -> tuple[str, list[int], bytes]:
    return dtype, shape, bytes([fill]) * (BYTES[dtype] * math.prod(shape))


def vector(dtype: str, values: list[int]) -> tuple[str, list[int], bytes]:
    content = b"".join(v.to_bytes(BYTES[dtype], "little", signed=True) for v in values)
    return dtype, [len(values)], content


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def tokenizer_json(num_tokens: int = 150, **changes: int) -> dict[str, Any]:
    vocab = {f"t{i}": i for i in range(num_tokens - 1)} | changes
    return {
        "model": {"type": "BPE", "vocab": vocab},
        "added_tokens": [{"id": num_tokens - 1, "content": "<|end|>", "special": True}],
    }


def write_target(folder: Path, **changes: Any) -> ModelConfig:
    """A target of which only the embedding is there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SIZES.keys("qwen3", LAYERS) | {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", config | changes)
    write_json(folder / "tokenizer.json", tokenizer_json())
    embedding = tensor("BF16", [VOCAB, HIDDEN], COPY)
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": embedding})
    return ModelConfig.from_folder(folder)


IDS = [3 * i + 1 for i in range(DRAFT_VOCAB)]
"""The target's ids of the draft vocabulary."""


def token_map(ids: list[int] = IDS, vocab: int = VOCAB) -> Tensors:
    return {
        "d2t": vector("I64", [token - i for i, token in enumerate(ids)]),
        "t2d": ("BOOL", [vocab], bytes(token in ids for token in range(vocab))),
    }


def filled(shapes: Shapes) -> Tensors:
    """Tensors of these shapes; an embedding, or a head of the whole vocabulary, is a copy."""
    tensors: Tensors = {}
    for name, shape in shapes.items():
        is_copy = name in SIZES.tables() and shape == [VOCAB, HIDDEN]
        tensors[name] = tensor("BF16", shape, COPY if is_copy else 1)
    return tensors | token_map() if "d2t" in shapes else tensors


def stub(layout: Layout) -> Checkpoint:
    """A checkpoint of a layout."""
    config, shapes = layout
    return config, filled(shapes)


def eagle3_layer(prefix: str) -> Tensors:
    """A head of one layer of that name, without token map and embedding."""
    return filled(eagle3_tensors(SIZES, prefix, 3, DRAFT_VOCAB))


def classic() -> Checkpoint:
    """As AngelSlim writes it: tied in name, with a head of its own."""
    keys = {"architectures": ["Eagle3LlamaForCausalLM"], "tie_word_embeddings": True}
    return stub(eagle3_classic(SIZES, max_position_embeddings=2048, **keys))


def specforge() -> Checkpoint:
    """The classic format with layer ids."""
    layers = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 16, 30]}
    return stub(eagle3_classic(SIZES, eagle_config=layers, target_hidden_size=HIDDEN))


def speculators() -> Checkpoint:
    """With what RedHatAI's heads hold of their target."""
    config, tensors = stub(eagle3_speculators(SIZES, norm_before_fc=False))
    tensors["verifier_norm.weight"] = tensor("BF16", [HIDDEN])
    tensors["verifier_lm_head.weight"] = tensor("BF16", [VOCAB, HIDDEN])
    return config, tensors


def deepspec() -> Checkpoint:
    """With a head of its own for the whole vocabulary."""
    rope = {"rope_theta": 1000000, "rope_type": "default"}
    config, tensors = stub(eagle3_deepspec(SIZES, OUTPUTS, rope_theta=None, rope_parameters=rope))
    return config, tensors | {"lm_head.weight": tensor("BF16", [VOCAB, HIDDEN], 1)}


def zlab() -> Checkpoint:
    """DFlash's own."""
    return stub(dflash_zlab(SIZES, BLOCK, 16))


def jetspec() -> Checkpoint:
    """z-lab's format with causal blocks."""
    return stub(dflash_zlab(SIZES, BLOCK, 16, causal_head=True, draft_shift=False))


def block_deepspec() -> Checkpoint:
    """DSpark's format without a Markov head."""
    return stub(dflash_deepspec(SIZES, BLOCK, 7))


def dspark() -> Checkpoint:
    """With a Markov head."""
    return stub(dflash_deepspec(SIZES, BLOCK, 7, RANK))


def block_speculators() -> Checkpoint:
    """With a vocabulary and an embedding of its own."""
    config, shapes = dflash_speculators(SIZES, BLOCK, 8, draft_vocab_size=DRAFT_VOCAB)
    tensors = filled(shapes | SIZES.token_map() | {"lm_head.weight": [DRAFT_VOCAB, HIDDEN]})
    tensors["embed_tokens.weight"] = tensor("BF16", [VOCAB, HIDDEN], COPY + 1)
    tensors["verifier_norm.weight"] = tensor("BF16", [HIDDEN])
    return config, tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
