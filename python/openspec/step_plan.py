"""StepPlan: what one step computes; and what planning needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from openspec.request import Request
from openspec.runner import Span


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
        """Pages that so many more rows of the sequence would take."""

    def kv_len(self, slot: int, /) -> int:
        """Tokens with KV."""

    def add(self, request: Request, /) -> int:
        """Takes a slot and attaches the cached prefix."""

    def remove(self, slot: int, /) -> None:
        """Gives slot and pages back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Rows of a step."""
    page_size: int
    num_speculative_tokens: int


@dataclass(slots=True)
class StepPlan:
    """Spans of one step and, in the same order, the requests that they belong to."""

    spans: list[Span] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def without_drafts(self) -> StepPlan:
        """The same step, plain."""
        return StepPlan([(slot, num_new, 0) for slot, num_new, _ in self.spans], self.requests)
