"""Small random P-EAGLE heads for `eagle3_checkpoints.target`, from a seed alone."""

from __future__ import annotations

from .eagle3_checkpoints import HIDDEN, Checkpoint, Weights
from .eagle3_checkpoints import head as eagle3_head

KINDS = ("one_layer", "four_layers", "window")
MASK = 251


def head(kind: str, seed: int = 4) -> Checkpoint:
    """`one_layer`: as speculators writes it, with an embedding of its own. `four_layers`: vLLM's
    keys, four captured states, each normed. `window`: two layers, of which the first slides."""
    weights = Weights(seed)
    config, tensors = eagle3_head("classic" if kind == "four_layers" else "speculators", seed)
    num_captures, num_layers = 3, {"one_layer": 1, "four_layers": 4, "window": 2}[kind]
    if kind == "four_layers":
        num_captures = 4
        config |= {"parallel_drafting": True, "ptd_token_id": MASK, "fc_norm": True}
        config |= {"num_hidden_layers": 4}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 7]}
        weights.matrix("fc", HIDDEN, num_captures * HIDDEN)
        for i in range(num_captures):
            weights.norm(f"fc_norm.{i}", HIDDEN)
    else:
        config |= {"speculators_model_type": "peagle", "mask_token_id": MASK}
        config["architectures"] = ["PEagleSpeculator"]
        config["norm_before_residual"] = kind == "window"
        config["transformer_layer_config"]["num_hidden_layers"] = num_layers
    if kind == "window":
        config["transformer_layer_config"] |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
        }
    for i in range(1, num_layers):
        weights.layer(f"layers.{i}.", HIDDEN, has_qk_norm=False)
    # Small, so that what a mask sees tells more than what all masks have in common.
    weights.matrix("mask_hidden", 1, num_captures * HIDDEN)
    mask_hidden = weights.tensors.pop("mask_hidden.weight")
    return config, {**tensors, **weights.tensors, "mask_hidden": mask_hidden[None]}
