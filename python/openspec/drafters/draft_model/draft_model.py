"""A small language model of the target's family that drafts token by token."""

from __future__ import annotations

from openspec.drafters.draft_model.language_model_format import read_language_model
from openspec.drafters.spec import (
    NOISE_OPTION,
    WINDOW_OPTION,
    Checkup,
    DrafterSpec,
    DraftSetup,
    check_drawn,
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
        ),
    )


SPEC = DrafterSpec(
    name="draft_model",
    summary="a small language model with the target's tokenizer drafts token by token",
    example=("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
    default_num_speculative_tokens=4,
    max_num_speculative_tokens=15,
    aliases=("standalone", "STANDALONE"),
    options=(NOISE_OPTION, WINDOW_OPTION),
    supports_rejection=True,
    check=check_drawn,
    read_draft_model=read_language_model,
    plan_checkup=_plan_checkup,
)
