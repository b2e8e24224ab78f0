"""EngineCore: requests in, tokens out, one step at a time. `engine_loader` makes one."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from openspec.engine.executor import OutOfPages
from openspec.engine.run_queue import NotAdmitted
from openspec.engine.runner import RunnerStats, SpanResult
from openspec.engine.scheduler import Scheduler
from openspec.engine.stats_log import StatsLog
from openspec.engine.step_plan import SchedulerConfig, SequenceTable, StepPlan
from openspec.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats

logger = logging.getLogger(__name__)

DRAFTER_CHECK_STEPS = 64


class StepInFlight(Protocol):
    """A launched step; see `executor.StepInFlight`."""

    @property
    def plan(self) -> StepPlan:
        """What it computes."""

    def finish(self) -> Sequence[SpanResult]:
        """Waits for the step and makes it last."""

    def close(self) -> None:
        """Gives it up, and with it all that are in flight."""


class StepExecutor(SequenceTable, Protocol):
    """The executor as the engine core sees it."""

    @property
    def num_steps_ahead(self) -> int:
        """Steps that may be in flight when another one is launched."""

    def launch(self, plan: StepPlan) -> StepInFlight:
        """Starts a plan, all or nothing."""

    @property
    def stats(self) -> RunnerStats:
        """Counters since the start."""

    @property
    def prefix_cache_stats(self) -> tuple[int, int]:
        """(tokens looked up, tokens found)."""

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""

    def check_integrity(self) -> None:
        """Raises EngineError if a page is leaked, held twice or a length is off."""


class EngineCore:
    """One engine. Not thread-safe; nothing happens outside of `step`.

    Where the device computes on its own, the host stays one step ahead: it plans and launches step
    n + 1 before it collects step n.

    A step that fails is run once more without drafts; if that fails too, the requests in it end
    with finish reason "error" and everyone else goes on. A broken invariant (`EngineError` from the
    integrity check) ends the engine instead.
    """

    def __init__(
        self,
        executor: StepExecutor,
        scheduler_config: SchedulerConfig,
        info: EngineInfo,
        stats_interval_s: float = 0.0,
    ) -> None:
        self.info = info
        self._executor = executor
        self._scheduler = Scheduler(scheduler_config, executor)
        self._ready: list[EngineOutput] = []
        self._in_flight: deque[StepInFlight] = deque()
        self._stats_log = StatsLog(stats_interval_s)
        self._num_step_failures = 0
        self._num_steps = 0
        self._reported: set[str] = set()

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            RequestError: if it can never be served, with the numbers.
        """
        output = self._scheduler.add(request, self.info.vocab_size)
        if output is not None:
            self._ready.append(output)

    def abort(self, request_id: str) -> None:
        """Ends a request; unknown or finished ones are ignored."""
        output = self._scheduler.abort(request_id)
        if output is not None:
            self._ready.append(output)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work or bool(self._in_flight or self._ready)

    def step(self) -> list[EngineOutput]:
        """Launches a step, and collects one when its turn has come; news of requests."""
        outputs, self._ready = self._ready, []
        try:
            return outputs + self._advance()
        except BaseException:
            self._give_up()
            raise

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of this moment."""
        stats, executor = self._scheduler.stats, self._executor
        stats.num_pages = executor.num_pages
        stats.num_free_pages = executor.num_free_pages
        stats.num_steps = executor.stats.num_steps
        stats.num_drafter_failures = executor.stats.num_drafter_failures
        stats.prefix_cache_queries, stats.prefix_cache_hits = executor.prefix_cache_stats
        stats.num_step_failures = self._num_step_failures
        return copy.deepcopy(stats)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._executor.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises EngineError if a page is leaked, held twice or a length is off."""
        self._executor.check_integrity()

    def _advance(self) -> list[EngineOutput]:
        try:
            plan = self._scheduler.schedule()
        except NotAdmitted as refusal:
            return self._refuse(refusal)
        if plan.spans:
            try:
                self._in_flight.append(self._executor.launch(plan))
            except Exception as error:
                return self._recover(plan, error)
            if len(self._in_flight) <= self._executor.num_steps_ahead:
                return []
        if not self._in_flight:
            return []
        plan = self._in_flight[0].plan
        try:
            results = self._finish_oldest()
        except Exception as error:
            return self._recover(plan, error)
        return self._take(plan, results)

    def _finish_oldest(self) -> Sequence[SpanResult]:
        results = self._in_flight[0].finish()
        self._in_flight.popleft()
        return results

    def _take(self, plan: StepPlan, results: Sequence[SpanResult]) -> list[EngineOutput]:
        outputs = self._scheduler.update(plan, results)
        self._stats_log.tick(self.stats)
        self._num_steps += 1
        if self._num_steps % DRAFTER_CHECK_STEPS == 0 or not self._scheduler.has_work:
            self._report_drafter()
        return outputs

    def _give_up(self) -> None:
        """Undoes all steps in flight; their requests are where they were before."""
        while self._in_flight:
            self._in_flight.pop().close()
        self._scheduler.fall_back()

    def _recover(self, plan: StepPlan, error: Exception) -> list[EngineOutput]:
        """Runs a failed step again, alone and without drafts; then gives its requests up.

        Whatever else was in flight is planned anew. Plans count pages exactly; should one be short
        of them all the same, whoever ranks last gives its own up and waits, until one is left.
        """
        self._give_up()
        has_failed = False
        while True:
            if not (isinstance(error, OutOfPages) and self._scheduler.preempt_last()):
                message = self._report(error)
                if has_failed:
                    self._executor.check_integrity()
                    return self._scheduler.fail(plan.requests, message)
                has_failed = True
            plan = self._scheduler.schedule_again(plan)
            if not plan.spans:
                return []
            try:
                self._in_flight.append(self._executor.launch(plan))
                results = self._finish_oldest()
            except Exception as again:
                error = again
                self._give_up()
            else:
                return self._take(plan, results)

    def _refuse(self, refusal: NotAdmitted) -> list[EngineOutput]:
        """Ends a request that the device could not take."""
        cause = refusal.__cause__
        message = f"the request could not be admitted: {type(cause).__name__}: {cause}"
        logger.error("%s", message)
        return self._scheduler.fail([refusal.request], message)

    def _report_drafter(self) -> None:
        stats = self._executor.stats
        if stats.num_drafter_failures > 0 and "drafter" not in self._reported:
            self._reported.add("drafter")
            logger.error(
                "the drafter failed, steps go on without its drafts: %s (further failures are only "
                "counted)",
                stats.last_drafter_failure,
            )

    def _report(self, error: Exception) -> str:
        self._num_step_failures += 1
        message = f"the step failed: {type(error).__name__}: {error}"
        kind = f"{type(error).__name__} {str(error)[:40]}"
        if kind not in self._reported and len(self._reported) < 100:
            self._reported.add(kind)
            logger.error("%s (further ones of this kind are only counted)", message, exc_info=error)
        return message
