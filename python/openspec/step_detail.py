"""StepDetail: what one step did for a sequence that asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StepDetail(msgspec.Struct, array_like=True, gc=False):
    """One step that produced output of one sequence, and what the whole step took.

    `token_ids` are the accepted drafts, in order, and then one that is the target's own, unless the
    answer ended with a draft.
    """

    token_ids: list[int]
    draft_token_ids: list[int]
    """Drafts that the target checked; empty for a step without."""
    draft_parents: list[int]
    """By draft, the number of the draft that it follows; -1: the last token before the step."""
    draft_scores: list[float] | None
    """By draft, the drafter's logarithm of the probability that it and all before it are accepted;
    None: it gave none."""
    accepted: list[int]
    """Numbers of the drafts among `token_ids`."""
    num_forced_tokens: int
    """Drafts, the first ones, that a grammar left no choice of."""
    num_copied_tokens: int
    """Drafts after these that are copied from the text so far, beside a drafter that has others."""
    num_rows: int
    """Token positions of all sequences in the step."""
    num_seqs: int
    seconds: float
    """Since the step before it ended, or since its launch if that is later."""
    device_seconds: float
    """Of these, for computing."""
    draft_seconds: float | None
    """Of these, for drafting. None: not known; on CUDA as steps timed at the start have it."""
    wait_seconds: list[float] = []
    """Of the device's, by GPU where several share the model: that it waited for the others."""


def depth_of(draft_parents: Sequence[int]) -> int:
    """How many drafts of a step follow each other at most."""
    depths: list[int] = []
    for parent in draft_parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def steps_of(steps: Sequence[StepDetail], num_tokens: int) -> list[StepDetail]:
    """The steps of the first tokens that they brought, the last one cut where these end."""
    kept: list[StepDetail] = []
    for step in steps:
        if num_tokens == 0:
            break
        if num_tokens < len(step.token_ids):
            step = msgspec.structs.replace(
                step, token_ids=step.token_ids[:num_tokens], accepted=step.accepted[:num_tokens]
            )
        num_tokens -= len(step.token_ids)
        kept.append(step)
    return kept
