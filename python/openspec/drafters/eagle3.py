"""EAGLE-3: a head of one layer that reads the target's hidden states and drafts chains or trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openspec.checkpoint.draft_head import TOKEN_MAP, TOKEN_MASK
from openspec.checkpoint.draft_model import DraftModel, opened_draft_checkpoint
from openspec.draft_formats.eagle3 import describe
from openspec.drafters import (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    DRAFT_WINDOW_OPTION,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    Options,
    check_rejection,
    check_trees,
    layer_variants,
)

if TYPE_CHECKING:
    from openspec.checkpoint.config import ModelConfig
    from openspec.config import EngineConfig


def _read_draft_model(config: EngineConfig, target: ModelConfig) -> DraftModel:
    """The head in `config.draft_model_path`, checked against the target."""
    folder = config.draft_model_path
    assert folder is not None  # DrafterSpec.validate has seen to it
    with opened_draft_checkpoint(folder) as checkpoint:
        return describe(checkpoint, SPEC.complete_options(config.method_options), target)


def _plan_checkup(config: EngineConfig, target: ModelConfig) -> Checkup:
    return Checkup(
        usual=(0.65, 0.40),
        source="AngelSlim's heads for Qwen3 4B and 8B accept about 1.05 of 2 drafts (vLLM, their "
        "model cards); the split over the two is an estimate",
        least_first=0.30,
        variants=layer_variants(_read_draft_model(config, target), target),
        causes=(
            *HEAD_CAUSES,
            "norm_before_residual in config.json does not say what the training did",
            f"{TOKEN_MAP} holds the target's ids where offsets (id - index) are expected; a file "
            f"without {TOKEN_MASK} cannot be checked for that when it is loaded",
            "lm_head or embed_tokens is not the one that the head was trained with",
            "another chat template or thinking mode than in training; texts far from its data",
        ),
    )


def _max_draft_tokens(depth: int, options: Options) -> int:
    """Drafts of a step: K, or the nodes of a tree of depth K."""
    top_k, wanted = int(options[DRAFT_TOP_K]), int(options[DRAFT_TREE_SIZE])
    if top_k == 1 or depth == 0:
        return depth
    num_candidates = top_k + (depth - 1) * top_k**2
    # With the last known token a power of two of rows, as far as depth is worth it.
    return min(wanted or min(4 * depth, 16) - 1, num_candidates)


def _check(config: EngineConfig, _: ModelConfig) -> None:
    options = SPEC.complete_options(config.method_options)
    check_rejection(config, options)
    check_trees(config, options)


SPEC = DrafterSpec(
    name="eagle3",
    summary="a head of one layer reads the target's hidden states and drafts chains or trees",
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=15,
    options=(
        CAPTURE_LAYERS_OPTION,
        DrafterOption(
            name=DRAFT_TOP_K,
            default=1,
            minimum=1,
            maximum=10,
            help="Above 1 a tree is drafted: the best so many drafts of a level get so many "
            "children each.",
        ),
        DrafterOption(
            name=DRAFT_TREE_SIZE,
            default=0,
            minimum=0,
            maximum=128,
            help="Drafts of a tree, the most likely ones. Default: 4 K - 1, at most 15.",
        ),
        DRAFT_NOISE_OPTION,
        DRAFT_WINDOW_OPTION,
    ),
    supports_rejection=True,
    check=_check,
    max_draft_tokens=_max_draft_tokens,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
