"""Untrained draft heads for the embedded model where it brings none: wrong drafts, right text."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from openspec.config import EMBEDDED_MODEL
from openspec.drafters import get_drafter
from tests.heads import fitted, models
from tests.heads.formats import (
    Block,
    Sizes,
    dflash2_keys,
    dflash2_tensors,
    dflash_zlab,
    markov_tensors,
)
from tests.heads.models import MASK
from tests.heads.seeded import drawn, write

BLOCK_SIZE, RANK, GROUP = 16, 16, 16
GAINS = {"o_proj": 0.1, "down_proj": 0.1, "codebook": 0.1, "kernel_projection": 0.01}
"""Layers add little: a mask's row stays near its embedding, whose token it then drafts."""
ONES = (1.0, 1.0)
LAYERS = "layers"
"""A head that came with the model, with another layer and norms of captured states."""


def draft_model(method: str, kind: str = "") -> str | None:
    """For the setting of that name; None: the method has no head, or one beside the model."""
    if method == "draft_model":
        return str(models.folder(kind or models.CUT))
    if kind == LAYERS or method == "peagle":
        return str(layered_folder(is_parallel=method == "peagle"))
    if get_drafter(method).target_prefix:
        return str(fitted.embedded())
    if not get_drafter(method).needs_draft_model or (EMBEDDED_MODEL / method).is_dir():
        return None
    return str(folder(method))


def sizes() -> Sizes:
    """Of the embedded model."""
    keys = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    return Sizes(
        hidden=keys["hidden_size"],
        mlp=keys["intermediate_size"],
        q_heads=keys["num_attention_heads"],
        kv_heads=keys["num_key_value_heads"],
        head_dim=keys["head_dim"],
        vocab=keys["vocab_size"],
        draft_vocab=keys["vocab_size"],
        target_layers=keys["num_hidden_layers"],
    )


@cache
def folder(method: str) -> Path:
    """A block drafter's head, with a Markov head, or convolutions and a selector, for the method
    that has them."""
    of = sizes()
    block = Block(num_layers=2, mask=MASK, outputs=[0, 2])
    config, shapes = dflash_zlab(of, block, BLOCK_SIZE)
    given = {}
    if method == "dspark":
        config["markov_rank"] = RANK
        shapes |= markov_tensors(of, RANK)
    if method == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
        config["dflash_config"] |= dflash2_keys(RANK, GROUP)
        parts = dflash2_tensors(of, block.num_layers, RANK, GROUP)
        base = torch.tensor([[1.0, 0.1]] * 2)[..., None].expand(2, 2, of.hidden).contiguous()
        given = {name: base.clone() for name in parts if name.endswith("base_kernel")}
        shapes |= parts
    root = Path(tempfile.mkdtemp(prefix=f"openspec-{method}-"))
    return write(root, (config, drawn(shapes, 0, GAINS, ONES, given)))


@cache
def layered_folder(*, is_parallel: bool) -> Path:
    """The trained head with a second, random layer that slides and adds little.

    Parallel: with masks, of which only the first draft is likely to be right. Else with norms that
    it was not trained with.
    """
    trained, of = EMBEDDED_MODEL / "eagle3", sizes()
    config = json.loads((trained / "config.json").read_text())
    tensors = load_file(trained / "model.safetensors")
    config |= {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
    }
    of = replace(of, mlp=config["intermediate_size"])
    shapes = of.layer("layers.1.", of.hidden, has_qk_norm=False)
    captured = tensors["fc.weight"].shape[1]
    if is_parallel:
        config |= {"parallel_drafting": True, "ptd_token_id": MASK}
        shapes["mask_hidden"] = [1, 1, captured]
    else:
        config |= {"fc_norm": True, "norm_output": True}
        shapes |= {f"fc_norm.{i}.weight": [of.hidden] for i in range(captured // of.hidden)}
    root = Path(tempfile.mkdtemp(prefix="openspec-layers-"))
    return write(root, (config, tensors | drawn(shapes, 1, GAINS, ONES)))
