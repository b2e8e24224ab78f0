"""Untrained draft heads for the embedded model where it brings none: wrong drafts, right text."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EMBEDDED_MODEL
from openspec.drafters import get_drafter
from tests.unit.draft_checkpoints import Tensors, write_safetensors

NUM_LAYERS, BLOCK, MARKOV_RANK = 2, 16, 16
CONV_GROUP, CANDIDATES = 16, 16
GAIN = 0.1
"""Of what the layers add: a mask's row stays near its embedding, whose token it then drafts."""
MASK = 271
"""The embedded model's " the", which it writes often enough for some drafts to be right."""


LAYERS = "layers"
"""A head that came with the model, with another layer and norms of captured states."""


def draft_model(method: str, kind: str = "") -> str | None:
    """For the setting of that name; None: the method has no head, or one beside the model."""
    if kind == LAYERS or method == "peagle":
        return str(layered_folder(is_parallel=method == "peagle"))
    if not get_drafter(method).needs_draft_model or (EMBEDDED_MODEL / method).is_dir():
        return None
    return str(folder(method))


@cache
def folder(method: str) -> Path:
    """A block drafter's head, with a Markov head, or convolutions and a selector, for the method
    that has them."""
    target = ModelConfig.from_folder(EMBEDDED_MODEL)
    random = np.random.default_rng(0)
    tensors: Tensors = {}

    def matrix(name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        values = random.standard_normal((rows, cols), np.float32)
        bits = (values * np.float32(gain / np.sqrt(cols))).view(np.uint32) >> 16
        tensors[name] = ("BF16", [rows, cols], bits.astype("<u2").tobytes())

    def norm(name: str, size: int) -> None:
        tensors[name] = ("F32", [size], np.ones(size, "<f4").tobytes())

    layer = target.spec.layers[0]
    attention, intermediate = layer.mixer, layer.mlp.intermediate_size
    hidden, head_dim = target.hidden_size, attention.head_dim
    q_rows, kv_rows = attention.num_q_heads * head_dim, attention.num_kv_heads * head_dim
    for i in range(NUM_LAYERS):
        layer = f"layers.{i}."
        matrix(f"{layer}self_attn.q_proj.weight", q_rows, hidden)
        matrix(f"{layer}self_attn.k_proj.weight", kv_rows, hidden)
        matrix(f"{layer}self_attn.v_proj.weight", kv_rows, hidden)
        matrix(f"{layer}self_attn.o_proj.weight", hidden, q_rows, GAIN)
        matrix(f"{layer}mlp.gate_proj.weight", intermediate, hidden)
        matrix(f"{layer}mlp.up_proj.weight", intermediate, hidden)
        matrix(f"{layer}mlp.down_proj.weight", hidden, intermediate, GAIN)
        norm(f"{layer}input_layernorm.weight", hidden)
        norm(f"{layer}post_attention_layernorm.weight", hidden)
        norm(f"{layer}self_attn.q_norm.weight", head_dim)
        norm(f"{layer}self_attn.k_norm.weight", head_dim)
    matrix("fc.weight", hidden, 2 * hidden)
    norm("hidden_norm.weight", hidden)
    norm("norm.weight", hidden)
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": attention.num_q_heads,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": target.spec.rms_norm_eps,
        "rope_theta": 1e6,
        "vocab_size": target.vocab_size,
    }
    if method == "dspark":
        config["markov_rank"] = MARKOV_RANK
        matrix("markov_head.markov_w1.weight", target.vocab_size, MARKOV_RANK)
        matrix("markov_head.markov_w2.weight", target.vocab_size, MARKOV_RANK)
        matrix("confidence_head.proj.weight", 1, hidden + MARKOV_RANK)
        norm("confidence_head.proj.bias", 1)
    if method == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] = {
            "mask_token_id": MASK,
            "target_layer_ids": [0, 2],
            "conv_kernel_size": 2,
            "conv_group_size": CONV_GROUP,
            "selector_rank": MARKOV_RANK,
            "selector_top_k": CANDIDATES,
        }
        for table in ("predecessor_codebook", "successor_codebook"):
            matrix(f"candidate_selector.{table}", target.vocab_size, MARKOV_RANK, GAIN)
        matrix("candidate_selector.hidden_projection.weight", MARKOV_RANK, hidden)
        for i in range(NUM_LAYERS):
            for side in ("attention", "mlp"):
                name = f"layers.{i}.{side}_conv"
                matrix(
                    f"{name}.kernel_projection.weight", 4 * hidden // CONV_GROUP, hidden, GAIN / 10
                )
                base = np.repeat(np.array([[1.0, GAIN / 10]] * 2, "<f4"), hidden)
                tensors[f"{name}.base_kernel"] = ("F32", [2, 2, hidden], base.tobytes())
    root = Path(tempfile.mkdtemp(prefix=f"openspec-{method}-"))
    (root / "config.json").write_text(json.dumps(config))
    write_safetensors(root / "model.safetensors", tensors)
    return root


def read_tensors(path: Path) -> Tensors:
    """All of a safetensors file, as they stand there."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {
        name: (
            info["dtype"],
            info["shape"],
            content[start + info["data_offsets"][0] : start + info["data_offsets"][1]],
        )
        for name, info in header.items()
        if name != "__metadata__"
    }


@cache
def layered_folder(*, is_parallel: bool) -> Path:
    """The trained head with a second, random layer that slides and adds little.

    Parallel: with masks, of which only the first draft is likely to be right. Else with norms that
    it was not trained with.
    """
    trained = EMBEDDED_MODEL / "eagle3"
    config = json.loads((trained / "config.json").read_text())
    tensors = read_tensors(trained / "model.safetensors")
    random = np.random.default_rng(1)

    def matrix(name: str, shape: list[int], gain: float) -> None:
        values = random.standard_normal(shape, np.float32)
        bits = (values * np.float32(gain / np.sqrt(shape[-1]))).view(np.uint32) >> 16
        tensors[name] = ("BF16", shape, bits.astype("<u2").tobytes())

    hidden = config["hidden_size"]
    for name, (_, shape, _) in read_tensors(trained / "model.safetensors").items():
        inner = "layers.1." + name.removeprefix("midlayer.")
        if name.startswith("midlayer.") and len(shape) == 2:
            inputs = hidden if shape[1] == 2 * hidden else shape[1]
            matrix(inner, [shape[0], inputs], GAIN if "o_proj" in name or "down" in name else 1.0)
        elif name.startswith("midlayer.") and "hidden_norm" not in name:
            tensors[inner] = ("F32", shape, np.ones(shape, "<f4").tobytes())
    config |= {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
    }
    num_captures = tensors["fc.weight"][1][1] // hidden
    if is_parallel:
        config |= {"parallel_drafting": True, "ptd_token_id": MASK}
        matrix("mask_hidden", [1, 1, num_captures * hidden], 1.0)
    else:
        config |= {"fc_norm": True, "norm_output": True}
        for i in range(num_captures):
            tensors[f"fc_norm.{i}.weight"] = ("F32", [hidden], np.ones(hidden, "<f4").tobytes())
    root = Path(tempfile.mkdtemp(prefix="openspec-layers-"))
    (root / "config.json").write_text(json.dumps(config))
    write_safetensors(root / "model.safetensors", tensors)
    return root
