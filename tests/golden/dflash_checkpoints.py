"""Small random block drafters in every dialect, for the random target beside the other heads.

Untrained and narrow for the same reasons as those; `eagle3_checkpoints.write` makes a folder.
"""

from __future__ import annotations

from typing import Any

import torch

from .eagle3_checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    NUM_LAYERS,
    SIZES,
    VOCAB,
    Checkpoint,
    Weights,
    target,
)

DIALECTS = ("zlab", "jetspec", "speculators", "deepspec", "dspark")
WINDOW = 6
SLIDING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "zlab_sliding": ("zlab", {}, {}),
    "zlab_sliding_full": ("zlab", {"is_causal": False}, {}),
    "zlab_swa": ("zlab", {}, {"use_swa": True, "swa_window_size": WINDOW}),
    "speculators_sliding": ("speculators", {}, {}),
    "speculators_sliding_full": ("speculators", {"sliding_window_non_causal": True}, {}),
    "dspark_sliding": ("dspark", {}, {}),
}
"""Heads whose layers slide -> their dialect, and what their config.json says more at top level and
in dflash_config. Without a key the window's layers are causal."""
OWN_VOCABULARY = "dspark_vocabulary"
"""A head with a Markov head as speculators writes it, with tokens of its own."""
KINDS = (*DIALECTS, *SLIDING, OWN_VOCABULARY)
NUM_DRAFT_LAYERS, BLOCK, MASK, MARKOV_RANK = 3, 8, VOCAB - 1, 16
CAPTURED = [0, 2, 5]  # what leaves these layers


def head(kind: str, seed: int = 2) -> Checkpoint:
    """A drafter for `target`, one of KINDS."""
    if kind in SLIDING:
        dialect, outer, inner = SLIDING[kind]
        config, tensors = head(dialect, seed)
        config |= outer
        if inner:
            config["dflash_config"] |= inner
        else:
            types = ["sliding_attention"] * (NUM_DRAFT_LAYERS - 1) + ["full_attention"]
            layer = config.get("transformer_layer_config", config)
            layer |= {"layer_types": types, "use_sliding_window": True, "sliding_window": WINDOW}
        return config, tensors
    if kind == OWN_VOCABULARY:
        return _with_own_vocabulary(seed)
    dialect = kind
    weights = Weights(seed)
    for layer in range(NUM_DRAFT_LAYERS):
        weights.layer(f"layers.{layer}.", HIDDEN, has_qk_norm=True)
    weights.matrix("fc", HIDDEN, len(CAPTURED) * HIDDEN)
    weights.norm("hidden_norm", HIDDEN)
    weights.norm("norm", HIDDEN)
    if dialect not in ("zlab", "jetspec"):  # these bring copies of the target's tables
        tables = target()[1]
        weights.tensors["embed_tokens.weight"] = tables["model.embed_tokens.weight"]
        weights.tensors["lm_head.weight"] = tables["lm_head.weight"]
    if dialect == "dspark":
        weights.matrix("markov_head.markov_w1", VOCAB, MARKOV_RANK, gain=4)
        weights.matrix("markov_head.markov_w2", VOCAB, MARKOV_RANK, gain=4)
        weights.matrix("confidence_head.proj", 1, HIDDEN + MARKOV_RANK)
        weights.tensors["confidence_head.proj.bias"] = torch.tensor([0.25])
    layers = {**SIZES, "num_hidden_layers": NUM_DRAFT_LAYERS, "tie_word_embeddings": False}
    return _config(dialect, layers), weights.tensors


def _with_own_vocabulary(seed: int) -> Checkpoint:
    _, tensors = head("dspark", seed)
    config, _ = head("speculators")
    config |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    config |= {"sample_from_anchor": True, "block_size": BLOCK - 1, "markov_rank": MARKOV_RANK}
    config |= {"draft_vocab_size": DRAFT_VOCAB, "markov_head_type": "vanilla"}
    random = Weights(seed + 1).random
    known = torch.from_numpy(random.permutation(VOCAB)[:DRAFT_VOCAB]).sort().values
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][known].contiguous()
    tensors["d2t"] = known - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, True)
    return config, tensors


def _config(dialect: str, layers: dict[str, Any]) -> dict[str, Any]:
    """config.json as each family writes it."""
    if dialect in ("zlab", "jetspec"):
        block = {"mask_token_id": MASK, "target_layer_ids": CAPTURED}
        if dialect == "jetspec":
            block["causal_head"] = True
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": BLOCK,
            "dflash_config": block,
            "layer_types": ["full_attention"] * NUM_DRAFT_LAYERS,
            "num_target_layers": NUM_LAYERS,
            **layers,
        }
    if dialect == "speculators":  # names a state by the layer that it enters
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "aux_hidden_state_layer_ids": [layer + 1 for layer in CAPTURED],
            "block_size": BLOCK,
            "draft_vocab_size": VOCAB,
            "mask_token_id": MASK,
            "sample_from_anchor": False,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformer_layer_config": {"model_type": "qwen3", **layers},
        }
    has_markov = dialect == "dspark"
    rope_theta = layers.pop("rope_theta")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": BLOCK - 1,
        "confidence_head_with_markov": has_markov,
        "enable_confidence_head": has_markov,
        "layer_types": ["full_attention"] * NUM_DRAFT_LAYERS,
        "markov_head_type": "vanilla",
        "markov_rank": MARKOV_RANK if has_markov else 0,
        "mask_token_id": MASK,
        "num_anchors": 512,
        "num_target_layers": NUM_LAYERS,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "target_layer_ids": CAPTURED,
        **layers,
    }
