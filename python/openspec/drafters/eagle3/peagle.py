"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass, with masks after the last one."""

from __future__ import annotations

from dataclasses import replace

from openspec.checkpoint.draft_model import MASK_KEYS, read_mask_token
from openspec.checkpoint.token_map import TOKEN_MAP
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.eagle3.eagle3_format import MASK_HIDDEN, PARALLEL, read_head
from openspec.drafters.spec import (
    HEAD_CAUSES,
    Checkup,
    DrafterSpec,
    DraftSetup,
    check_head_options,
    layer_variants,
    num_one_pass_nodes,
    one_pass_options,
)

MAX_DEPTH = 63


def _read_draft_model(setup: DraftSetup) -> DraftModel:
    parts = read_head(setup, PARALLEL)
    parts.checkpoint.tensor(MASK_HIDDEN)
    keys = parts.format.dialect.keys
    mask = read_mask_token(keys, setup.target.vocab_size)
    if mask is None:
        keys.refuse(MASK_KEYS[0], "the id of the token that masks stand for")
    spec, names = (
        replace(parts.spec, mask_token=mask),
        {**parts.tensor_names, MASK_HIDDEN: MASK_HIDDEN},
    )
    details = (*parts.details, f"masks: token {mask}, with a feature of {MASK_HIDDEN}")
    return parts.head.model("P-EAGLE", parts.summary, spec, names, details)


def _plan_checkup(setup: DraftSetup) -> Checkup:
    return Checkup(
        usual=(0.65, 0.45),
        source="arXiv 2602.01469: a little below a head of the same size that drafts token by "
        "token; the figures are an estimate",
        least_first=0.30,
        variants=layer_variants(_read_draft_model(setup), setup.target),
        causes=(
            *HEAD_CAUSES,
            "mask_token_id is not the token that the head was trained with",
            "embed_tokens is not the one that was trained with the head",
            f"{TOKEN_MAP} holds the target's ids where offsets (id - index) are expected",
            "more drafts are wanted than the head was trained for; later ones are then wrong",
            "another chat template or thinking mode than in training; texts far from its data",
        ),
    )


SPEC = DrafterSpec(
    name=PARALLEL,
    summary="a head reads the target's hidden states and drafts all tokens in one pass",
    example=("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle"),
    default_num_speculative_tokens=4,
    max_num_speculative_tokens=MAX_DEPTH,
    aliases=("p-eagle", "p_eagle"),
    options=one_pass_options(),
    supports_rejection=True,
    check=check_head_options,
    num_tree_drafts=num_one_pass_nodes,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
