# ruff: noqa: D102 - _C.pyi documents the members
"""A step on a runner: reserve, launch, collect, commit; and what the engine needs of a runner.

The compiled core has it (`load.py` makes one), and so has the fake one in the tests. On a device
that computes on its own a second step is launched before the first is collected; see
`Runner.num_steps_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from openspec.engine.core.grammars import GrammarLoader
from openspec.engine.core.request import Request, Span

Logprobs = tuple[list[int], list[float], int]
"""The fields of a `TokenLogprobs`."""


SpanDetail = tuple[
    list[int],
    list[int],
    list[float] | None,
    list[int],
    int,
    int,
    int,
    float,
    float,
    float | None,
]
"""The fields of a `StepDetail` after its tokens."""


class SpanResult(Protocol):
    """What one sequence got from a step; see `_C.SpanResult`."""

    @property
    def slot(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def num_draft_tokens(self) -> int: ...
    @property
    def num_accepted_tokens(self) -> int: ...
    @property
    def drafts_by_source(self) -> Sequence[tuple[int, int]]: ...
    @property
    def logprobs(self) -> Sequence[Logprobs]: ...
    @property
    def prompt_logprobs(self) -> Sequence[Logprobs]: ...
    @property
    def detail(self) -> SpanDetail | None: ...


class PageEvent(Protocol):
    """One change of what the prefix cache holds; see `_C.PageEvent`."""

    @property
    def kind(self) -> str: ...
    @property
    def hashes(self) -> Sequence[int]: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> bytes: ...


class RunnerStats(Protocol):
    """Counters since the start."""

    @property
    def num_steps(self) -> int: ...
    @property
    def num_drafter_failures(self) -> int: ...
    @property
    def last_drafter_failure(self) -> str: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def verify_seconds(self) -> float: ...
    @property
    def unsplit_seconds(self) -> float: ...
    @property
    def rest_seconds(self) -> float: ...


class Lease(Protocol):
    """One step: its pages and, once launched, what it computes."""

    def launch(self) -> None: ...
    def collect(self) -> Sequence[SpanResult]: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class Runner(GrammarLoader, Protocol):
    """Sequences, pages and the step; see `_C.Runner`."""

    def add(self, request: Request, /) -> int:
        """Takes a slot for the request's known tokens and attaches the cached prefix."""

    def remove_sequence(self, slot: int, /) -> None: ...
    def kv_len(self, slot: int, /) -> int: ...
    @property
    def num_steps_ahead(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    def num_pages_needed(self, slot: int, num_rows: int, /) -> int: ...
    def reset_prefix_cache(self) -> None: ...
    def take_page_events(self) -> Sequence[PageEvent]: ...
    def check_integrity(self) -> None: ...
    def reserve(self, spans: Sequence[Span], /) -> Lease:
        """Pages for a step, all or nothing; raises OutOfPages."""

    @property
    def stats(self) -> RunnerStats: ...
    @property
    def prefix_cache_stats(self) -> tuple[int, int]: ...


def launch(runner: Runner, spans: Sequence[Span]) -> Lease:
    """Starts a step; if this raises, it has not been started."""
    lease = runner.reserve(spans)
    try:
        lease.launch()
    except BaseException:
        lease.close()
        raise
    return lease


def finish(lease: Lease) -> Sequence[SpanResult]:
    """Waits for the oldest step in flight and makes it last; if this raises, close the lease."""
    results = lease.collect()
    lease.commit()
    return results
