"""Small random checkpoints of a target and of heads in every dialect, from a seed alone.

Untrained, so that every part of a layout matters as much as any other; narrow, but with Qwen3's
head_dim. `write` makes a folder of one, as a loader finds it on disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, DRAFT_VOCAB = 64, 4, 2, 128, 96, 256, 160
NUM_LAYERS = 8
DIALECTS = ("classic", "speculators", "deepspec")
VARIANTS = ("eagle31", "whole_norm", "two_layers", "legacy", "window")
"""Heads that compute something more than those of the dialects; see `variant`."""

SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
}


class Weights:
    """Random tensors under names; matrices keep the size of what they multiply, and are bf16
    numbers, as the engine stores them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        values = self.random.standard_normal((rows, cols)) * gain / np.sqrt(cols)
        self.tensors[f"{name}.weight"] = torch.from_numpy(values).bfloat16().float()

    def norm(self, name: str, size: int) -> None:
        values = self.random.uniform(0.5, 1.5, size)
        self.tensors[f"{name}.weight"] = torch.from_numpy(values.astype(np.float32))

    def layer(self, prefix: str, inputs: int, has_qk_norm: bool) -> None:
        self.matrix(f"{prefix}self_attn.q_proj", HEADS * HEAD_DIM, inputs)
        self.matrix(f"{prefix}self_attn.k_proj", KV_HEADS * HEAD_DIM, inputs)
        self.matrix(f"{prefix}self_attn.v_proj", KV_HEADS * HEAD_DIM, inputs)
        self.matrix(f"{prefix}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        self.matrix(f"{prefix}mlp.gate_proj", MLP, HIDDEN)
        self.matrix(f"{prefix}mlp.up_proj", MLP, HIDDEN)
        self.matrix(f"{prefix}mlp.down_proj", HIDDEN, MLP)
        self.norm(f"{prefix}input_layernorm", HIDDEN)
        self.norm(f"{prefix}post_attention_layernorm", HIDDEN)
        if has_qk_norm:
            self.norm(f"{prefix}self_attn.q_norm", HEAD_DIM)
            self.norm(f"{prefix}self_attn.k_norm", HEAD_DIM)


def target(seed: int = 0) -> Checkpoint:
    """A Qwen3 of NUM_LAYERS layers with its own LM head."""
    weights = Weights(seed)
    weights.matrix("model.embed_tokens", VOCAB, HIDDEN, gain=8)
    for layer in range(NUM_LAYERS):
        weights.layer(f"model.layers.{layer}.", HIDDEN, has_qk_norm=True)
    weights.norm("model.norm", HIDDEN)
    weights.matrix("lm_head", VOCAB, HIDDEN, gain=4)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": NUM_LAYERS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        **SIZES,
    }
    return config, weights.tensors


def head(dialect: str, seed: int = 1) -> Checkpoint:
    """A head for `target`."""
    weights = Weights(seed)
    is_deepspec = dialect == "deepspec"
    num_states = 5 if is_deepspec else 3
    prefix = "midlayer." if dialect == "classic" else "layers.0."
    weights.layer(prefix, 2 * HIDDEN, has_qk_norm=is_deepspec)
    weights.norm(f"{prefix}hidden_norm", HIDDEN)
    weights.matrix("fc", HIDDEN, num_states * HIDDEN)
    weights.norm("norm", HIDDEN)
    weights.matrix("lm_head", VOCAB if is_deepspec else DRAFT_VOCAB, HIDDEN, gain=4)
    if dialect != "classic":
        weights.matrix("embed_tokens", VOCAB, HIDDEN, gain=8)
    if not is_deepspec:
        chosen = np.sort(weights.random.permutation(VOCAB)[:DRAFT_VOCAB])
        weights.tensors["d2t"] = torch.from_numpy(chosen - np.arange(DRAFT_VOCAB))
        weights.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        weights.tensors["t2d"][torch.from_numpy(chosen)] = True
    layer = {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if dialect == "classic":  # without layer ids: the defaults
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": DRAFT_VOCAB,
            **layer,
        }
    elif dialect == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 8],
            "norm_before_residual": True,
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformer_layer_config": {"model_type": "llama", **layer},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None},
            },
        }
    else:
        config = {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "draft_num_hidden_layers": 1,
            "num_target_layers": NUM_LAYERS,
            "target_layer_ids": [0, 2, 3, 5, 6],
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            **layer,
        }
    return config, weights.tensors


def variant(name: str, seed: int = 2) -> Checkpoint:
    """A head for `target` that computes something more.

    `eagle31`: speculators' with fc_norm and norm_output; `whole_norm`: one norm of all captured
    states, as eagle_config says; `two_layers`: with norms on queries and keys; `legacy`: the names
    that SGLang reads beside today's, with a second layer; `window`: two layers, one slides.
    """
    is_classic = name in ("whole_norm", "legacy")
    config, tensors = head("classic" if is_classic else "speculators", seed)
    weights = Weights(seed + 1)
    if name == "eagle31":
        config |= {"fc_norm": True, "norm_output": True, "norm_before_fc": False}
        for i in range(3):
            weights.norm(f"fc_norm.{i}", HIDDEN)
    elif name == "whole_norm":
        config["eagle_config"] = {"norm_before_fc": True}
        weights.norm("input_norm", 3 * HIDDEN)
    elif name == "two_layers":
        config["norm_before_residual"] = False
        config["transformer_layer_config"] |= {"model_type": "qwen3", "num_hidden_layers": 2}
        for part in ("q", "k"):
            weights.norm(f"layers.0.self_attn.{part}_norm", HEAD_DIM)
        weights.layer("layers.1.", HIDDEN, has_qk_norm=True)
    elif name == "window":
        config["transformer_layer_config"] |= {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
        }
        weights.layer("layers.1.", HIDDEN, has_qk_norm=False)
    else:
        config |= {"use_aux_norm": True, "norm_output": True, "num_hidden_layers": 2}
        for part in ("low", "mid", "high"):
            weights.norm(f"aux_norm_{part}", HIDDEN)
        weights.layer("layers.1.", HIDDEN, has_qk_norm=False)
        norm = weights.tensors.pop("layers.1.input_layernorm.weight")
        weights.tensors["layers.1.hidden_norm.weight"] = norm
    return config, tensors | weights.tensors


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint."""
    config, weights = checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    stored = {
        name: weight.bfloat16() if weight.dim() == 2 else weight for name, weight in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_pairs(root: Path, heads: dict[str, Checkpoint]) -> dict[str, tuple[Path, Path]]:
    """Folders of `target` and of each head."""
    folder = write(root / "target", target())
    return {name: (folder, write(root / name, head)) for name, head in heads.items()}
