# ruff: noqa: D102 - _C.pyi documents the members
"""A step on a runner: reserve, launch, collect, commit; and what the engine needs of a runner.

The compiled core has it (`load.py` makes one), and so has the fake one in the tests. On a device
that computes on its own a second step is launched before the first is collected; see
`Runner.num_steps_ahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from openspec.engine.core.request import Request, Span

if TYPE_CHECKING:
    from openspec._C import PageEvent, RunnerStats, SpanResult, StepLease


class Runner(Protocol):
    """Sequences, pages and the step; see `_C.Runner`."""

    def add(self, request: Request, /) -> int:
        """Takes a slot for the request's known tokens and attaches the cached prefix."""

    def num_cached(self, request: Request, /) -> int:
        """With how much KV, found in the prefix cache, it would begin."""

    def load_vocabulary(
        self, tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int], /
    ) -> Any:
        """What grammars are read with; this and the next call leave the GIL to others."""

    def load_grammar(self, vocabulary: Any, data: bytes, /) -> Any:
        """One grammar, from what `_grammar.compile_...` returned for the same vocabulary."""

    def new_grammar_tally(self) -> Any:
        """For all sequences of a request with a grammar."""

    def is_held(self, slot: int, /) -> bool:
        """Whether the sequence's next mask is being made beside the steps."""

    def await_masks(self, seconds: float, /) -> None:
        """Returns when such a mask was made since the last call, or after so many seconds."""

    def remove_sequence(self, slot: int, /) -> None: ...
    def kv_len(self, slot: int, /) -> int: ...
    @property
    def num_steps_ahead(self) -> int: ...
    @property
    def num_rows_ahead(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_base_pages(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    def wanted_end(self, slot: int, /) -> int: ...
    def num_pages_needed(self, slot: int, num_rows: int, /) -> int: ...
    def reset_prefix_cache(self) -> None: ...
    def forget_answers(self) -> None: ...
    def take_page_events(self) -> Sequence[PageEvent]: ...
    def check_integrity(self) -> None: ...
    def exchange_drafter(self) -> None:
        """Between launches: another head's weights take the place of the drafter's."""

    def reserve(self, spans: Sequence[Span], /) -> StepLease:
        """Pages for a step, all or nothing; raises OutOfPages."""

    @property
    def stats(self) -> RunnerStats: ...


def launch(runner: Runner, spans: Sequence[Span]) -> StepLease:
    """Starts a step; if this raises, it has not been started."""
    lease = runner.reserve(spans)
    try:
        lease.launch()
    except BaseException:
        lease.close()
        raise
    return lease


def finish(lease: StepLease) -> Sequence[SpanResult]:
    """Waits for the oldest step in flight and makes it last; if this raises, close the lease."""
    results = lease.collect()
    lease.commit()
    return results
