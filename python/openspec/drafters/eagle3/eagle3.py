"""EAGLE-3: a head on the target's hidden states that drafts chains or trees, token by token."""

from __future__ import annotations

import logging
from pathlib import Path

from openspec.checkpoint.draft_head import listed
from openspec.checkpoint.token_map import TOKEN_MAP, TOKEN_MASK
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.eagle3.eagle3_format import (
    AUTO,
    DRAFT_FEEDBACK,
    NORMED,
    RAW,
    SEQUENTIAL,
    HeadParts,
    default_layers,
    read_head,
)
from openspec.drafters.spec import (
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    DRAFT_WINDOW,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    Options,
    Variant,
    check_head_options,
    head_options,
    layer_variants,
)

logger = logging.getLogger(__name__)


def _read_draft_model(setup: DraftSetup) -> DraftModel:
    return _model_of(read_head(setup, SEQUENTIAL), setup)


def _model_of(parts: HeadParts, setup: DraftSetup) -> DraftModel:
    folder, head = parts.checkpoint.folder, parts.head
    _warn_of_unusual_layers(folder, head.layers, setup.target.num_layers)
    return head.model("EAGLE-3", parts.summary, parts.spec, parts.tensor_names, parts.details)


def _warn_of_unusual_layers(folder: Path, layers: tuple[int, ...], num_layers: int) -> None:
    """Ids that are all one off the usual ones were most likely written in the other numbering."""
    usual = default_layers(num_layers).outputs()
    for shift in (-1, 1):
        if layers == tuple(layer + shift for layer in usual):
            logger.warning(
                "%s: reads the outputs of layers %s, all one %s than usual (%s); were the ids "
                "written in the other numbering? capture_layers=%s reads the usual ones, "
                "python -m openspec.doctor says which of them accepts more",
                folder,
                listed(layers),
                "less" if shift < 0 else "more",
                listed(usual),
                ",".join(map(str, usual)),
            )


def _other_readings(setup: DraftSetup, parts: HeadParts) -> tuple[Variant, ...]:
    """Other readings of keys that trainers and published configurations disagree on."""
    feedback = RAW if parts.spec.norm_output else NORMED
    place = "before" if feedback == RAW else "after"
    variants = [
        Variant(
            label=f"outputs fed back {place} the final norm",
            options={DRAFT_FEEDBACK: feedback},
            advice=f"the head was trained so: use --method-option {DRAFT_FEEDBACK}={feedback} or "
            "mend config.json (norm_output)",
        )
    ]
    named = parts.format.dialect.layer.get("sliding_window")
    window = named if isinstance(named, int) else 0
    if (
        window > 0
        and not any(layer.window for layer in parts.spec.layers)
        and not setup.options[DRAFT_WINDOW]
    ):
        variants.append(
            Variant(
                label=f"the last {window} tokens alone",
                options={DRAFT_WINDOW: window},
                advice="config.json drops a window that the head was trained with: use "
                f"--method-option {DRAFT_WINDOW}={window} or mend config.json (use_sliding_window)",
            )
        )
    return tuple(variants)


def _plan_checkup(setup: DraftSetup) -> Checkup:
    parts = read_head(setup, SEQUENTIAL)
    return Checkup(
        usual=(0.65, 0.40),
        source="AngelSlim's heads for Qwen3 4B and 8B accept about 1.05 of 2 drafts (vLLM, their "
        "model cards); the split over the two is an estimate",
        least_first=0.30,
        variants=(
            *layer_variants(_model_of(parts, setup), setup.target),
            *_other_readings(setup, parts),
        ),
        causes=(
            *HEAD_CAUSES,
            "norm_before_residual in config.json does not say what the training did",
            f"{TOKEN_MAP} holds the target's ids where offsets (id - index) are expected; a file "
            f"without {TOKEN_MASK} cannot be checked for that when it is loaded",
            "lm_head or embed_tokens is not the one that the head was trained with",
            "another chat template or thinking mode than in training; texts far from its data",
        ),
    )


def _num_nodes(depth: int, options: Options) -> int:
    top_k = int(options[DRAFT_TOP_K])
    num_candidates = top_k + (depth - 1) * top_k**2
    # With the last known token a power of two of rows, as far as depth is worth it.
    return min(int(options[DRAFT_TREE_SIZE]) or min(4 * depth, 16) - 1, num_candidates)


SPEC = DrafterSpec(
    name="eagle3",
    summary="a head reads the target's hidden states and drafts chains or trees, token by token",
    example=("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"),
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=15,
    options=(
        *head_options(
            max_top_k=10,
            top_k_help="Above 1 a tree is drafted: the best so many drafts of a level get so many "
            "children each.",
            max_tree_size=128,
            tree_size_help="4 K - 1, at most 15",
        ),
        DrafterOption(
            name=DRAFT_FEEDBACK,
            default=AUTO,
            choices=(AUTO, NORMED, RAW),
            help="Whether the head reads its output after the final norm (normed) or before it "
            "(raw) for the next draft. auto: what its config.json says.",
        ),
    ),
    supports_rejection=True,
    check=check_head_options,
    num_tree_drafts=_num_nodes,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
