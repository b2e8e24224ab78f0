"""Small random checkpoints of a target and of heads in every format, from a seed alone.

Untrained, so that every part of a layout matters as much as any other; narrow, but with Qwen3's
head_dim. `write` makes a folder of one, as a loader finds it on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.heads.formats import (
    Block,
    Layout,
    Shapes,
    Sizes,
    dflash2_keys,
    dflash2_tensors,
    dflash_deepspec,
    dflash_speculators,
    dflash_zlab,
    eagle3_classic,
    eagle3_deepspec,
    eagle3_speculators,
)

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]

NUM_LAYERS = 8
SIZES = Sizes(
    hidden=64,
    mlp=96,
    q_heads=4,
    kv_heads=2,
    head_dim=128,
    vocab=256,
    draft_vocab=160,
    target_layers=NUM_LAYERS,
)
HIDDEN, VOCAB = SIZES.hidden, SIZES.vocab
EAGLE3_DIALECTS = ("classic", "speculators", "deepspec")
EAGLE3_VARIANTS = ("eagle31", "whole_norm", "two_layers", "legacy", "window")
"""Heads that compute something more than those of the dialects; see `eagle3_variant`."""
PEAGLE_KINDS = ("one_layer", "four_layers", "window")
PEAGLE_MASK, PEAGLE_WINDOW = 251, 8

DFLASH_DIALECTS = ("zlab", "jetspec", "speculators", "deepspec", "dspark")
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
DFLASH_KINDS = (*DFLASH_DIALECTS, *SLIDING, OWN_VOCABULARY)
BLOCK_SIZE, MARKOV_RANK = 8, 16
BLOCK = Block(num_layers=3, mask=VOCAB - 1, outputs=[0, 2, 5])
DFLASH2_FORMATS = {
    "zlab2": "zlab",
    "zlab2_sliding": "zlab_sliding",  # causal where they slide
    "speculators2": "speculators",
    "speculators2_sliding": "speculators_sliding",  # not causal, by this trainer's default
}
"""By name: DFlash's head that it extends."""
GROUP, RANK = 16, 24
GAINS = {
    "lm_head": 4.0,
    "embed_tokens": 8.0,
    "markov_w": 4.0,
    "kernel_projection": 0.3,
    "codebook": RANK**0.5,
}
"""Of tensors with such a name; other matrices keep the size of what they multiply."""


def drawn(
    shapes: Shapes,
    seed: int,
    gains: Mapping[str, float] = GAINS,
    norms: tuple[float, float] = (0.5, 1.5),
    given: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Random tensors, those that are `given` as they are.

    Matrices are bf16 numbers, as the engine stores them; norms lie within the range.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if given and name in given:
            tensors[name] = given[name]
        elif name == "d2t":
            chosen = torch.from_numpy(random.permutation(shapes["t2d"][0])[: shape[0]]).sort()[0]
            tensors |= token_map(chosen, shapes["t2d"][0])
        elif name.endswith("base_kernel"):
            values = random.standard_normal(shape) * 0.3
            values[:, 0] += 1
            tensors[name] = torch.from_numpy(values).bfloat16().float()
        elif len(shape) == 1 and name != "t2d":
            tensors[name] = torch.from_numpy(random.uniform(*norms, shape[0]).astype(np.float32))
        elif name != "t2d":
            gain = next((gain for part, gain in gains.items() if part in name), 1.0)
            values = random.standard_normal(shape) * gain / np.sqrt(shape[-1])
            tensors[name] = torch.from_numpy(values).bfloat16().float()
    return tensors


def token_map(chosen: Tensor, vocab: int) -> dict[str, Tensor]:
    """Of a head that knows these tokens, in rising order."""
    marks = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": marks}


def target(seed: int = 0) -> Checkpoint:
    """A Qwen3 of NUM_LAYERS layers with its own LM head."""
    shapes: Shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN]}
    for layer in range(NUM_LAYERS):
        shapes |= SIZES.layer(f"model.layers.{layer}.", HIDDEN, has_qk_norm=True)
    shapes |= {"model.norm.weight": [HIDDEN], "lm_head.weight": [VOCAB, HIDDEN]}
    config = SIZES.keys("qwen3", NUM_LAYERS) | {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return config, drawn(shapes, seed)


def eagle3(dialect: str, seed: int = 1) -> Checkpoint:
    """An EAGLE-3 head for `target`; the classic one has the default layers."""
    layouts: dict[str, Layout] = {
        "classic": eagle3_classic(SIZES),
        "speculators": eagle3_speculators(SIZES, eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
        "deepspec": eagle3_deepspec(SIZES, [0, 2, 3, 5, 6]),
    }
    config, shapes = layouts[dialect]
    return config, drawn(shapes, seed)


def eagle3_variant(name: str, seed: int = 2) -> Checkpoint:
    """An EAGLE-3 head for `target` that computes something more.

    `eagle31`: speculators' with fc_norm and norm_output; `whole_norm`: one norm of all captured
    states, as eagle_config says; `two_layers`: with norms on queries and keys; `legacy`: the names
    that SGLang reads beside today's, with a second layer; `window`: two layers, one slides.
    """
    is_classic = name in ("whole_norm", "legacy")
    config, tensors = eagle3("classic" if is_classic else "speculators", seed)
    second = SIZES.layer("layers.1.", HIDDEN, has_qk_norm=name == "two_layers")
    more: Shapes
    if name == "eagle31":
        config |= {"fc_norm": True, "norm_output": True, "norm_before_fc": False}
        more = {f"fc_norm.{i}.weight": [HIDDEN] for i in range(3)}
    elif name == "whole_norm":
        config["eagle_config"] = {"norm_before_fc": True}
        more = {"input_norm.weight": [3 * HIDDEN]}
    elif name == "two_layers":
        config["norm_before_residual"] = False
        config["transformer_layer_config"] |= {"model_type": "qwen3", "num_hidden_layers": 2}
        norms = {f"layers.0.self_attn.{part}_norm.weight": [SIZES.head_dim] for part in "qk"}
        more = norms | second
    elif name == "window":
        config["transformer_layer_config"] |= {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
        }
        more = second
    else:
        config |= {"use_aux_norm": True, "norm_output": True, "num_hidden_layers": 2}
        more = {f"aux_norm_{part}.weight": [HIDDEN] for part in ("low", "mid", "high")} | second
    tensors |= drawn(more, seed + 1)
    if name == "legacy":
        norm = tensors.pop("layers.1.input_layernorm.weight")
        tensors["layers.1.hidden_norm.weight"] = norm
    return config, tensors


def peagle(kind: str, seed: int = 4) -> Checkpoint:
    """`one_layer`: as speculators writes it, with an embedding of its own. `four_layers`: vLLM's
    keys, four captured states, each normed. `window`: two layers, of which the first slides."""
    config, tensors = eagle3("classic" if kind == "four_layers" else "speculators", seed)
    num_captures, num_layers = 3, {"one_layer": 1, "four_layers": 4, "window": 2}[kind]
    more: Shapes = {}
    if kind == "four_layers":
        num_captures = 4
        config |= {"parallel_drafting": True, "ptd_token_id": PEAGLE_MASK, "fc_norm": True}
        config |= {"num_hidden_layers": 4}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 7]}
        more["fc.weight"] = [HIDDEN, num_captures * HIDDEN]
        more |= {f"fc_norm.{i}.weight": [HIDDEN] for i in range(num_captures)}
    else:
        config |= {"speculators_model_type": "peagle", "mask_token_id": PEAGLE_MASK}
        config["architectures"] = ["PEagleSpeculator"]
        config["norm_before_residual"] = kind == "window"
        config["transformer_layer_config"]["num_hidden_layers"] = num_layers
    if kind == "window":
        config["transformer_layer_config"] |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": PEAGLE_WINDOW,
        }
    for i in range(1, num_layers):
        more |= SIZES.layer(f"layers.{i}.", HIDDEN, has_qk_norm=False)
    # Small, so that what a mask sees tells more than what all masks have in common.
    more["mask_hidden"] = [1, 1, num_captures * HIDDEN]
    return config, tensors | drawn(more, seed)


def dflash(kind: str, seed: int = 2) -> Checkpoint:
    """A block drafter for `target`, one of DFLASH_KINDS."""
    if kind in SLIDING:
        dialect, outer, inner = SLIDING[kind]
        config, tensors = dflash(dialect, seed)
        config |= outer
        if inner:
            config["dflash_config"] |= inner
        else:
            types = ["sliding_attention"] * (BLOCK.num_layers - 1) + ["full_attention"]
            layer = config.get("transformer_layer_config", config)
            layer |= {"layer_types": types, "use_sliding_window": True, "sliding_window": WINDOW}
        return config, tensors
    if kind == OWN_VOCABULARY:
        return _with_own_vocabulary(seed)
    config, shapes = {
        "zlab": lambda: dflash_zlab(SIZES, BLOCK, BLOCK_SIZE),
        "jetspec": lambda: dflash_zlab(SIZES, BLOCK, BLOCK_SIZE, causal_head=True),
        "speculators": lambda: dflash_speculators(SIZES, BLOCK, BLOCK_SIZE),
        "deepspec": lambda: dflash_deepspec(SIZES, BLOCK, BLOCK_SIZE - 1),
        "dspark": lambda: dflash_deepspec(SIZES, BLOCK, BLOCK_SIZE - 1, MARKOV_RANK),
    }[kind]()
    tables = target()[1]
    given = {name: tables[f"model.{name}"] for name in ("embed_tokens.weight",)}
    given["lm_head.weight"] = tables["lm_head.weight"]
    given["confidence_head.proj.bias"] = torch.tensor([0.25])
    return config, drawn(shapes, seed, given=given)


def _with_own_vocabulary(seed: int) -> Checkpoint:
    _, tensors = dflash("dspark", seed)
    keys = {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}
    keys |= {"sample_from_anchor": True, "markov_rank": MARKOV_RANK}
    keys |= {"draft_vocab_size": SIZES.draft_vocab, "markov_head_type": "vanilla"}
    config, _ = dflash_speculators(SIZES, BLOCK, BLOCK_SIZE - 1, **keys)
    tensors |= drawn(SIZES.token_map(), seed + 1)
    known = tensors["t2d"].nonzero()[:, 0]
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][known].contiguous()
    return config, tensors


def dflash2(name: str, seed: int = 5) -> Checkpoint:
    """A head for `target`, one of DFLASH2_FORMATS: convolutions and selector have an effect."""
    config, tensors = dflash(DFLASH2_FORMATS[name], seed)
    tensors |= drawn(dflash2_tensors(SIZES, BLOCK.num_layers, RANK, GROUP), seed + 1)
    config["architectures"] = ["DFlash2DraftModel"]
    if "dflash_config" in config:
        config["dflash_config"] |= dflash2_keys(RANK, GROUP)
    else:  # without copies of the target's tables, as its trainer writes them
        config |= {"speculators_model_type": "dflash2", **dflash2_keys(RANK, GROUP)}
        for table in SIZES.tables():
            del tensors[table]
    return config, tensors


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
