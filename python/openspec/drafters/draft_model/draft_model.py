"""A small language model of the target's family: drafts token by token, or with masks at once."""

from __future__ import annotations

from openspec.checkpoint.draft_head import CAPTURE_LAYERS
from openspec.drafters.draft_model.language_model_format import (
    NUM_CHAIN,
    PARALLEL_DRAFTING,
    num_drafts_of,
    read_language_model,
)
from openspec.drafters.spec import (
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    check_head_options,
    num_one_pass_nodes,
    one_pass_options,
)


def _plan_checkup(setup: DraftSetup) -> Checkup:
    return Checkup(
        usual=(0.75, 0.60),
        source="what small models of a family reach on their large ones; an estimate",
        least_first=0.40,
        causes=(
            "the draft model is of another family or generation than the target (base against "
            "instruct, thinking against not)",
            "the draft model's chat template differs from the target's",
            "texts longer than the draft model's positions are made for",
            "with masks: more drafts are wanted than the model was trained for; later ones are "
            "then wrong",
        ),
    )


SPEC = DrafterSpec(
    name="draft_model",
    summary="a small language model with the target's tokenizer drafts token by token, or with "
    "mask tokens all in one pass",
    example=("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    default_num_speculative_tokens=NUM_CHAIN,
    max_num_speculative_tokens=63,
    aliases=("standalone", "STANDALONE"),
    options=(
        *(option for option in one_pass_options() if option.name != CAPTURE_LAYERS),
        DrafterOption(
            name=PARALLEL_DRAFTING,
            default=True,
            help="Draft all tokens in one pass where the model's config.json names a mask token; "
            "off: one after another all the same.",
        ),
    ),
    supports_rejection=True,
    check=check_head_options,
    num_drafts_of=num_drafts_of,
    num_tree_drafts=num_one_pass_nodes,
    read_draft_model=read_language_model,
    plan_checkup=_plan_checkup,
)
