"""The steps of a choice as answers show them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from openspec.serve.shapes.logprobs import finite
from openspec.serve.shapes.wire import Step
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
        scores = step.draft_scores
        shown.append(
            # By position: there is one for each step of each sequence.
            Step(
                step.token_ids,
                list(texts[first:end]),
                step.draft_token_ids,
                [tokenizer.token_text(token) for token in step.draft_token_ids],
                step.draft_parents,
                UNSET if scores is None else [round(finite(score), 4) for score in scores],
                step.accepted,
                step.num_forced_tokens,
                step.num_copied_tokens,
                step.num_rows,
                step.num_seqs,
                _ms(step.seconds),
                _ms(step.device_seconds),
                None if step.draft_seconds is None else _ms(step.draft_seconds),
                [_ms(seconds) for seconds in step.wait_seconds] or UNSET,
            )
        )
        first = end
    return shown


def _ms(seconds: float) -> float:
    return int(seconds * 1e6 + 0.5) / 1000  # faster than `round`
