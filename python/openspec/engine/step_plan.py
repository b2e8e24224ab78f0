"""StepPlan: what one step computes; and what planning needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from openspec.engine.request import Request
from openspec.engine.runner import Span


class SequenceTable(Protocol):
    """The part of the executor that the scheduler talks to."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""

    @property
    def num_free_pages(self) -> int:
        """Free or evictable ones."""

    @property
    def num_free_slots(self) -> int:
        """Sequences that can be added."""

    def num_pages_needed(self, slot: int, num_rows: int, /) -> int:
        """Pages that so many more rows would take, all rows in flight kept."""

    def kv_len(self, slot: int, /) -> int:
        """Tokens with KV, steps in flight left aside."""

    def add(self, request: Request, /) -> int:
        """Takes a slot and attaches the cached prefix."""

    def remove(self, slot: int, /) -> None:
        """Gives slot and pages back, also while steps with them are in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler."""

    max_model_len: int
    max_num_batched_tokens: int
    """Rows of a step."""
    page_size: int
    max_draft_tokens: int
    """Drafts of a sequence and step."""
    draft_depth: int
    """How many of these follow each other, at most."""
    num_rows_ahead: int = 0
    """Entries behind the last known token that a step with drafts may write, at most; counts where
    they are more than the drafts."""


@dataclass(slots=True)
class StepPlan:
    """Spans of one step and, in the same order, the requests that they belong to."""

    spans: list[Span] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    stays: list[int] = field(init=False)
    """The requests' stays when the step was planned."""

    def __post_init__(self) -> None:
        self.stays = [request.stay for request in self.requests]

    def plain(self) -> StepPlan:
        """The same step without drafts, for the requests that have not left since."""
        left = [
            (request, (slot, num_new, 0))
            for request, stay, (slot, num_new, _) in zip(
                self.requests, self.stays, self.spans, strict=True
            )
            if request.stay == stay
        ]
        return StepPlan([span for _, span in left], [request for request, _ in left])
