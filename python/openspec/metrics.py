"""The one place that defines the measures of speculation. Documentation and bench link here.

* A *draft* is one step of one sequence with at least one draft token.
* *Acceptance rate*: accepted draft tokens / draft tokens. Of a tree at most one draft token per
  depth can be accepted.
* *Mean acceptance length*: 1 + accepted draft tokens / drafts. The one is the token that the target
  adds itself, so plain decoding has length 1.
* *Acceptance at position i*: drafts whose token i (of a tree: at depth i) was accepted / drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SpecCounters(Protocol):
    """Counters of a request (`SpecDecodeStats`) or of the engine (`EngineStats`)."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]


def acceptance_rate(counters: SpecCounters) -> float:
    """Accepted / drafted; 0 where nothing was drafted."""
    if counters.num_draft_tokens == 0:
        return 0.0
    return counters.num_accepted_tokens / counters.num_draft_tokens


def mean_acceptance_length(counters: SpecCounters) -> float:
    """1 + accepted / drafts; 1 where nothing was drafted."""
    if counters.num_drafts == 0:
        return 1.0
    return 1.0 + counters.num_accepted_tokens / counters.num_drafts


def acceptance_per_position(counters: SpecCounters) -> list[float]:
    """For each draft position the share of drafts accepted there."""
    num_drafts = max(counters.num_drafts, 1)
    return [accepted / num_drafts for accepted in counters.num_accepted_tokens_per_pos]


def record_draft(
    counters: SpecCounters,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    depth: int | None = None,
) -> None:
    """Counts one draft, in which at most `depth` (None: all) tokens follow each other."""
    counters.num_drafts += 1
    counters.num_draft_tokens += num_draft_tokens
    counters.num_accepted_tokens += num_accepted_tokens
    per_pos = counters.num_accepted_tokens_per_pos
    num_positions = num_draft_tokens if depth is None else min(num_draft_tokens, depth)
    # A drafter in the place of a method's that makes trees may draft a chain as long as the tree.
    num_positions = max(num_positions, num_accepted_tokens)
    per_pos.extend([0] * (num_positions - len(per_pos)))
    for position in range(num_accepted_tokens):
        per_pos[position] += 1


def add_counters(total: SpecCounters, parts: Sequence[SpecCounters]) -> None:
    """Adds the counters of several requests to a total."""
    for part in parts:
        total.num_drafts += part.num_drafts
        total.num_draft_tokens += part.num_draft_tokens
        total.num_accepted_tokens += part.num_accepted_tokens
        sums, more = total.num_accepted_tokens_per_pos, part.num_accepted_tokens_per_pos
        sums.extend([0] * (len(more) - len(sums)))
        for position, accepted in enumerate(more):
            sums[position] += accepted
