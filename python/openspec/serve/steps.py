"""The steps of a choice as answers show them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from openspec.serve.logprobs import finite
from openspec.serve.wire import Step
from openspec.step_detail import StepDetail
from openspec.text.tokenizer import Tokenizer


def shown_steps(
    tokenizer: Tokenizer, steps: Sequence[StepDetail] | None, texts: Sequence[str]
) -> list[Step] | UnsetType:
    """`texts` are those of the steps' tokens, in order; nothing where no steps were asked for."""
    if steps is None:
        return UNSET
    shown = []
    first = 0
    for step in steps:
        end = first + len(step.token_ids)
        shown.append(
            Step(
                token_ids=step.token_ids,
                tokens=list(texts[first:end]),
                draft_token_ids=step.draft_token_ids,
                draft_tokens=[tokenizer.token_text(token) for token in step.draft_token_ids],
                draft_parents=step.draft_parents,
                draft_scores=UNSET
                if step.draft_scores is None
                else [round(finite(score), 4) for score in step.draft_scores],
                accepted=step.accepted,
                num_rows=step.num_rows,
                num_sequences=step.num_seqs,
                time_ms=_ms(step.seconds),
                device_time_ms=_ms(step.device_seconds),
                draft_time_ms=None if step.draft_seconds is None else _ms(step.draft_seconds),
            )
        )
        first = end
    return shown


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
