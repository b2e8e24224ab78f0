"""Executor: plans in, results out. The only part of the engine that touches the runner.

A step is `reserve` and `launch`, later `collect` and `commit`. On a device that computes on its own
a second step is launched before the first is collected; see `Executor.num_steps_ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from openspec.engine.request import Request
from openspec.engine.runner import LeaseT, ParamsT_contra, Runner, RunnerStats, SpanResult
from openspec.engine.step_plan import StepPlan


class OutOfPages(Exception):
    """The step needs more pages than are free; nothing has changed."""


@dataclass(frozen=True, slots=True)
class StepInFlight(Generic[LeaseT, ParamsT_contra]):
    """A launched step. It ends with `finish`, oldest first, or with `close`, newest first."""

    plan: StepPlan
    _runner: Runner[LeaseT, ParamsT_contra]
    _lease: LeaseT

    def finish(self) -> Sequence[SpanResult]:
        """Waits for the step and makes it last. If this raises, the step has still to be closed."""
        results = self._runner.collect(self._lease)
        self._runner.commit(self._lease)
        return results

    def close(self) -> None:
        """Gives the step up. Those in flight beside it, older ones too, must be closed as well."""
        self._lease.close()


class Executor(Generic[LeaseT, ParamsT_contra]):
    """Runs steps on one runner, and is the scheduler's view of its sequences and pages."""

    def __init__(
        self,
        runner: Runner[LeaseT, ParamsT_contra],
        make_params: Callable[[Request], ParamsT_contra],
        out_of_pages: type[Exception],
    ) -> None:
        """`out_of_pages` is what `runner.reserve` raises when pages are short."""
        self._runner = runner
        self._make_params = make_params
        self._out_of_pages = out_of_pages
        # Called for every sequence in every step: bound once.
        self.num_pages_needed = runner.num_pages_needed
        self.kv_len = runner.kv_len
        self.remove = runner.remove_sequence

    def launch(self, plan: StepPlan) -> StepInFlight[LeaseT, ParamsT_contra]:
        """Starts a step; if this raises, it has not been started.

        Raises:
            OutOfPages: the plan asked for more pages than there are.
        """
        try:
            lease = self._runner.reserve(plan.spans)
        except self._out_of_pages as error:
            raise OutOfPages(str(error)) from error
        try:
            self._runner.launch(lease)
        except BaseException:
            lease.close()
            raise
        return StepInFlight(plan, self._runner, lease)

    @property
    def num_steps_ahead(self) -> int:
        """Steps that may be in flight when another one is launched."""
        return self._runner.num_steps_ahead

    def add(self, request: Request) -> int:
        """Takes a slot for the request's known tokens and attaches the cached prefix."""
        return self._runner.add_sequence(
            request.token_ids,
            request.prompt_len,
            self._make_params(request),
            request.source.cache_salt.encode(),
        )

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._runner.num_pages

    @property
    def num_free_pages(self) -> int:
        """Free or evictable pages."""
        return self._runner.num_free_pages

    @property
    def num_free_slots(self) -> int:
        """Sequences that can be added."""
        return self._runner.num_free_slots

    @property
    def stats(self) -> RunnerStats:
        """The runner's counters."""
        return self._runner.stats

    @property
    def prefix_cache_stats(self) -> tuple[int, int]:
        """(tokens looked up, tokens found)."""
        return self._runner.prefix_cache_stats

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._runner.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises EngineError if a page is leaked, held twice or a length is off."""
        self._runner.check_integrity()
