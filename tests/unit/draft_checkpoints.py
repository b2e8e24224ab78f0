"""Small target and draft folders, in the formats that are found in the wild."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from openspec.checkpoint.targets.config import ModelConfig

HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB = 64, 36, 160, 40
Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 32, 96
Tensors = dict[str, tuple[str, list[int], bytes]]
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1}


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
    return dtype, shape, bytes([fill]) * (SIZES[dtype] * math.prod(shape))


def vector(dtype: str, values: list[int]) -> tuple[str, list[int], bytes]:
    content = b"".join(v.to_bytes(SIZES[dtype], "little", signed=True) for v in values)
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
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    write_json(folder / "config.json", config | changes)
    write_json(folder / "tokenizer.json", tokenizer_json())
    embedding = tensor("BF16", [VOCAB, HIDDEN], 7)
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": embedding})
    return ModelConfig.from_folder(folder)


def geometry() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": Q_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "vocab_size": VOCAB,
    }


def layer_tensors(prefix: str, num_captures: int = 3, draft_vocab: int = DRAFT_VOCAB) -> Tensors:
    q_rows, kv_rows = Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj.weight": [q_rows, 2 * HIDDEN],
        "self_attn.k_proj.weight": [kv_rows, 2 * HIDDEN],
        "self_attn.v_proj.weight": [kv_rows, 2 * HIDDEN],
        "self_attn.o_proj.weight": [HIDDEN, q_rows],
        "mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
        "mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
        "mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
        "input_layernorm.weight": [HIDDEN],
        "hidden_norm.weight": [HIDDEN],
        "post_attention_layernorm.weight": [HIDDEN],
    }
    shapes = {prefix + name: shape for name, shape in layer.items()}
    shapes |= {
        "fc.weight": [HIDDEN, num_captures * HIDDEN],
        "norm.weight": [HIDDEN],
        "lm_head.weight": [draft_vocab, HIDDEN],
    }
    return {name: tensor("BF16", shape, i) for i, (name, shape) in enumerate(shapes.items())}


IDS = [3 * i + 1 for i in range(DRAFT_VOCAB)]
"""The target's ids of the draft vocabulary."""


def token_map(ids: list[int] = IDS, vocab: int = VOCAB) -> Tensors:
    return {
        "d2t": vector("I64", [token - i for i, token in enumerate(ids)]),
        "t2d": ("BOOL", [vocab], bytes(token in ids for token in range(vocab))),
    }


def classic() -> tuple[dict[str, Any], Tensors]:
    """As AngelSlim writes it: tied in name, with a head of its own."""
    config = geometry() | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": True,
    }
    return config, layer_tensors("midlayer.") | token_map()


def specforge() -> tuple[dict[str, Any], Tensors]:
    config, tensors = classic()
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [2, 16, 30],
        },
        "target_hidden_size": HIDDEN,
    }
    return config, tensors


def speculators() -> tuple[dict[str, Any], Tensors]:
    """As RedHatAI's."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": geometry(),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    tensors = layer_tensors("layers.0.") | token_map()
    tensors["embed_tokens.weight"] = tensor("BF16", [VOCAB, HIDDEN], 7)
    tensors["verifier_norm.weight"] = tensor("BF16", [HIDDEN])
    tensors["verifier_lm_head.weight"] = tensor("BF16", [VOCAB, HIDDEN])
    return config, tensors


def deepspec() -> tuple[dict[str, Any], Tensors]:
    config = geometry() | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"],
        "num_target_layers": LAYERS,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "target_model_name_or_path": "Qwen/Qwen3-4B",
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    }
    tensors = layer_tensors("layers.0.", 5, VOCAB)
    tensors["layers.0.self_attn.q_norm.weight"] = tensor("BF16", [HEAD_DIM])
    tensors["layers.0.self_attn.k_norm.weight"] = tensor("BF16", [HEAD_DIM])
    tensors["embed_tokens.weight"] = tensor("BF16", [VOCAB, HIDDEN], 7)
    return config, tensors


def write_draft(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
