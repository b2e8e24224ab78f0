"""Published formats of draft heads, one function each: config.json, and the shape of every tensor.

Sizes, and what else differs between heads of a format, are the caller's; further keyword arguments
are keys of config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
Shapes = dict[str, list[int]]
Layout = tuple[Config, Shapes]


@dataclass(frozen=True)
class Sizes:
    """Of a head's layers and of its target."""

    hidden: int
    mlp: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    target_layers: int

    def keys(self, model_type: str, num_layers: int = 1) -> Config:
        """What config.json says of the layers."""
        return {
            "model_type": model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "vocab_size": self.vocab,
        }

    def layer(self, prefix: str, inputs: int, has_qk_norm: bool) -> Shapes:
        """One decoder layer; `inputs` is what attention reads of a row."""
        q_rows, kv_rows = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": [q_rows, inputs],
            "self_attn.k_proj": [kv_rows, inputs],
            "self_attn.v_proj": [kv_rows, inputs],
            "self_attn.o_proj": [self.hidden, q_rows],
            "mlp.gate_proj": [self.mlp, self.hidden],
            "mlp.up_proj": [self.mlp, self.hidden],
            "mlp.down_proj": [self.hidden, self.mlp],
            "input_layernorm": [self.hidden],
            "post_attention_layernorm": [self.hidden],
        }
        if has_qk_norm:
            shapes |= {f"self_attn.{part}_norm": [self.head_dim] for part in "qk"}
        return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}

    def tables(self) -> Shapes:
        """Copies of the target's."""
        shape = [self.vocab, self.hidden]
        return {"embed_tokens.weight": shape, "lm_head.weight": shape}

    def token_map(self) -> Shapes:
        """Of a draft vocabulary."""
        return {"d2t": [self.draft_vocab], "t2d": [self.vocab]}


# ---- EAGLE-3 ------------------------------------------------------------------------------------


def eagle3_tensors(
    sizes: Sizes, prefix: str, num_captures: int, vocab: int, has_qk_norm: bool = False
) -> Shapes:
    """What every format has."""
    hidden = sizes.hidden
    return sizes.layer(prefix, 2 * hidden, has_qk_norm) | {
        f"{prefix}hidden_norm.weight": [hidden],
        "fc.weight": [hidden, num_captures * hidden],
        "norm.weight": [hidden],
        "lm_head.weight": [vocab, hidden],
    }


def eagle3_classic(sizes: Sizes, **keys: Any) -> Layout:
    """AngelSlim's and SpecForge's: no embedding, no layer ids unless `keys` have them."""
    config = sizes.keys("llama") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": sizes.draft_vocab,
        "tie_word_embeddings": False,
    }
    shapes = eagle3_tensors(sizes, "midlayer.", 3, sizes.draft_vocab)
    return config | keys, shapes | sizes.token_map()


def eagle3_speculators(sizes: Sizes, **keys: Any) -> Layout:
    """RedHatAI's, with its own embedding."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": sizes.draft_vocab,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": sizes.keys("llama"),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    shapes = eagle3_tensors(sizes, "layers.0.", 3, sizes.draft_vocab)
    shapes["embed_tokens.weight"] = [sizes.vocab, sizes.hidden]
    return config | keys, shapes | sizes.token_map()


def eagle3_deepspec(sizes: Sizes, outputs: Sequence[int], **keys: Any) -> Layout:
    """DeepSpec's, of what leaves these layers of the target."""
    config = sizes.keys("qwen3") | {
        "architectures": ["Qwen3Eagle3Model"],
        "num_target_layers": sizes.target_layers,
        "target_layer_ids": list(outputs),
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }
    shapes = eagle3_tensors(sizes, "layers.0.", len(outputs), sizes.vocab, has_qk_norm=True)
    shapes["embed_tokens.weight"] = [sizes.vocab, sizes.hidden]
    return config | keys, shapes


# ---- DFlash, DFlash2, DSpark and JetSpec --------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What a block drafter has beside its layers' sizes."""

    num_layers: int
    mask: int
    outputs: Sequence[int]
    """What leaves these layers of the target is captured."""


def block_tensors(sizes: Sizes, block: Block) -> Shapes:
    """What every format has."""
    shapes: Shapes = {}
    for layer in range(block.num_layers):
        shapes |= sizes.layer(f"layers.{layer}.", sizes.hidden, has_qk_norm=True)
    return shapes | {
        "fc.weight": [sizes.hidden, len(block.outputs) * sizes.hidden],
        "hidden_norm.weight": [sizes.hidden],
        "norm.weight": [sizes.hidden],
    }


def markov_tensors(sizes: Sizes, rank: int) -> Shapes:
    """A Markov head with its confidence head."""
    return {
        "markov_head.markov_w1.weight": [sizes.vocab, rank],
        "markov_head.markov_w2.weight": [sizes.vocab, rank],
        "confidence_head.proj.weight": [1, sizes.hidden + rank],
        "confidence_head.proj.bias": [1],
    }


def dflash2_tensors(sizes: Sizes, num_layers: int, rank: int, group: int) -> Shapes:
    """Convolutions and selector."""
    shapes: Shapes = {}
    for layer in range(num_layers):
        for side in ("attention", "mlp"):
            name = f"layers.{layer}.{side}_conv"
            shapes[f"{name}.base_kernel"] = [2, 2, sizes.hidden]
            shapes[f"{name}.kernel_projection.weight"] = [4 * sizes.hidden // group, sizes.hidden]
    for table in ("predecessor", "successor"):
        shapes[f"candidate_selector.{table}_codebook"] = [sizes.vocab, rank]
    shapes["candidate_selector.hidden_projection.weight"] = [rank, sizes.hidden]
    return shapes


def dflash2_keys(rank: int, group: int) -> Config:
    """In dflash_config, or at the top level of speculators' config.json."""
    return {
        "conv_kernel_size": 2,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": 16,
    }


def dflash_zlab(sizes: Sizes, block: Block, block_size: int, **inner: Any) -> Layout:
    """z-lab's; `inner` are keys of dflash_config. JetSpec's have causal_head there."""
    config = sizes.keys("qwen3", block.num_layers) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "num_target_layers": sizes.target_layers,
        "layer_types": ["full_attention"] * block.num_layers,
        "dflash_config": {
            "mask_token_id": block.mask,
            "target_layer_ids": list(block.outputs),
            **inner,
        },
    }
    return config, block_tensors(sizes, block)


def dflash_speculators(sizes: Sizes, block: Block, block_size: int, **keys: Any) -> Layout:
    """speculators names a state by the layer that it enters. The vocabulary is the target's."""
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": block_size,
        "draft_vocab_size": sizes.vocab,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in block.outputs],
        "mask_token_id": block.mask,
        "transformer_layer_config": sizes.keys("qwen3", block.num_layers),
        "speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    }
    return config | keys, block_tensors(sizes, block) | sizes.tables()


def dflash_deepspec(sizes: Sizes, block: Block, block_size: int, rank: int = 0) -> Layout:
    """DeepSpec's: DSpark with a rank of its Markov head, DFlash without."""
    config = sizes.keys("qwen3", block.num_layers) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block_size,
        "num_anchors": 512,
        "num_target_layers": sizes.target_layers,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": rank > 0,
        "confidence_head_with_markov": rank > 0,
        "mask_token_id": block.mask,
        "target_layer_ids": list(block.outputs),
        "rope_theta": None,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    }
    markov = markov_tensors(sizes, rank) if rank else {}
    return config, block_tensors(sizes, block) | sizes.tables() | markov
