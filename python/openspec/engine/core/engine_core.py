"""EngineCore: requests in, tokens out, one step at a time. `load.py` makes one."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openspec.engine.core import executor
from openspec.engine.core.drafters import Drafters
from openspec.engine.core.executor import Runner
from openspec.engine.core.grammars import Grammars
from openspec.engine.core.kv_events import KVEventPublisher
from openspec.engine.core.request import Request, StepPlan
from openspec.engine.core.run_queue import NotAdmitted
from openspec.engine.core.scheduler import Scheduler
from openspec.errors import EngineError, OutOfPages
from openspec.messages import (
    DrafterState,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    acceptance_rate,
    counters_since,
    mean_acceptance_length,
)
from openspec.specs.runner import RunnerConfig

if TYPE_CHECKING:
    from openspec._C import SpanResult, StepLease

logger = logging.getLogger(__name__)

DRAFTER_CHECK_STEPS = 64
MAX_FAILURES_IN_A_ROW = 3
GRAMMAR_WAIT_S = 0.005
"""What the engine waits for a grammar or a mask at a time if it has nothing else to do."""
_LONGEST_STEP_S = 1.0  # a longer gap between ticks is idleness


class EngineCore:
    """One engine. Not thread-safe; nothing happens outside of `step`.

    Where the device computes on its own, the host stays one step ahead: it plans and launches step
    n + 1 before it collects step n.

    A step that fails is run once more without drafts; if that fails too, the requests in it end
    with finish reason "error" and everyone else goes on. So does a request that the device cannot
    take. The engine ends where going on makes no sense: an invariant is broken or the device does
    not answer (`EngineError` from the integrity check), or `MAX_FAILURES_IN_A_ROW` admissions and
    steps failed and none succeeded.
    """

    def __init__(
        self,
        runner: Runner,
        config: RunnerConfig,
        info: EngineInfo,
        stats_interval_s: float = 0.0,
        kv_events: KVEventPublisher | None = None,
        displaces: bool = False,
        drafters: Drafters | None = None,
    ) -> None:
        """`displaces`: whether priority may take a running sequence's place.

        `drafters` are heads that may take each other's place; None: the one that is there stays.
        """
        self.info = info
        self._runner = runner
        self._scheduler = Scheduler(config, runner, displaces)
        self.grammars = Grammars(runner)
        self.drafters = drafters or Drafters(runner, info.method)
        self._ready: list[EngineOutput] = []
        self._in_flight: deque[tuple[StepPlan, StepLease, int]] = deque()
        """Steps, and the version of the head that each was launched with."""
        self._stats_log = StatsLog(stats_interval_s)
        self._num_step_failures = self._num_admission_failures = 0
        self._num_failures_in_a_row = 0
        self._num_steps = 0
        self._reported: set[str] = set()
        self._kv_events = kv_events
        self.on_launch: Callable[[int], None] | None = None
        """Told how many rows are in flight, as a step is launched."""

    def add_request(self, request: EngineRequest) -> None:
        """Queues the sequences of a request.

        Raises:
            RequestError: if it can never be served, with the numbers.
        """
        grammar = self.grammars.get(request.grammar) if request.grammar else None
        self._ready += self._scheduler.add(request, self.info.vocab_size, grammar)

    def abort(self, request_id: str) -> None:
        """Ends a sequence; unknown or finished ones are ignored."""
        output = self._scheduler.abort(request_id)
        if output is not None:
            self._ready.append(output)

    @property
    def runner(self) -> Runner:
        """The runner, for whoever drives it while the engine has no work."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work or bool(self._in_flight or self._ready)

    def step(self) -> list[EngineOutput]:
        """Launches a step, and collects one when its turn has come; news of requests."""
        outputs, self._ready = self._ready, []
        try:
            outputs += self._advance()
        except BaseException:
            self._give_up()
            raise
        self._publish_kv_events()
        return outputs

    def stats(self) -> EngineStats:
        """Counters since the start, and gauges of this moment."""
        stats, runner = self._scheduler.stats, self._runner
        stats.num_pages = runner.num_pages
        stats.num_free_pages = runner.num_free_pages
        stats.num_steps = runner.stats.num_steps
        stats.num_drafter_failures = runner.stats.num_drafter_failures
        stats.draft_seconds = runner.stats.draft_seconds
        stats.verify_seconds = runner.stats.verify_seconds
        stats.unsplit_seconds = runner.stats.unsplit_seconds
        stats.rest_seconds = runner.stats.rest_seconds
        stats.num_expert_layers, stats.num_distinct_experts, stats.num_expert_rows = (
            runner.stats.experts
        )
        stats.experts_of_drafts = runner.stats.experts_of_drafts
        stats.experts_of_sequences = runner.stats.experts_of_sequences
        of_gpus = runner.stats.exchange
        stats.exchange_rounds = [num_rounds for num_rounds, _ in of_gpus]
        stats.exchange_wait_seconds = [seconds for _, seconds in of_gpus]
        stats.num_step_failures = self._num_step_failures
        stats.num_admission_failures = self._num_admission_failures
        return copy.deepcopy(stats)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._runner.reset_prefix_cache()
        self._runner.forget_answers()
        self._publish_kv_events()

    def drafter_state(self) -> DrafterState:
        """Which head drafts, and what came of its drafts."""
        return self.drafters.state(self._scheduler.stats)

    def exchange_drafter(
        self,
        *,
        back: bool = False,
        flush_prefix_cache: bool = False,
        weight_version: str | None = None,
    ) -> DrafterState:
        """Between two steps: the head that was loaded drafts, or with `back` the one before it.

        With `flush_prefix_cache` no later request begins with what the other head wrote.

        Raises:
            RequestError: there is no such head, or it is being loaded.
        """
        self.drafters.exchange(back=back, weight_version=weight_version)
        if flush_prefix_cache:
            self.reset_prefix_cache()
        state = self.drafter_state()
        logger.info(
            "draft head: version %d, %s, drafts from here on; the exchange took %.0f us",
            state.version,
            state.folder,
            state.gap_us,
        )
        return state

    def close(self) -> None:
        """Closes what others are connected to, or hold on to; nothing may follow."""
        self.grammars.close()
        self.drafters.close()
        if self._kv_events is not None:
            self._kv_events.close()

    def check_integrity(self) -> None:
        """Raises EngineError if a page is leaked, held twice or a length is off."""
        self._runner.check_integrity()

    def _advance(self) -> list[EngineOutput]:
        try:
            plan = self._scheduler.schedule()
        except NotAdmitted as refusal:
            return self._refuse(refusal)
        if plan.spans:
            try:
                self._launch(plan)
            except Exception as error:
                return self._recover(plan, error)
            if len(self._in_flight) <= self._runner.num_steps_ahead:
                return []
        if not self._in_flight:
            self._scheduler.await_work(GRAMMAR_WAIT_S)
            return []
        plan, _, version = self._in_flight[0]
        try:
            results = self._finish_oldest()
        except Exception as error:
            return self._recover(plan, error)
        return self._take(plan, results, version)

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.publish(self._runner.take_page_events())

    def _launch(self, plan: StepPlan) -> None:
        if self.on_launch is not None:
            plans = [plan, *(other for other, _, _ in self._in_flight)]
            self.on_launch(sum(one.num_rows for one in plans))
        lease = executor.launch(self._runner, plan.spans)
        self._in_flight.append((plan, lease, self.drafters.version))

    def _finish_oldest(self) -> Sequence[SpanResult]:
        results = executor.finish(self._in_flight[0][1])
        self._in_flight.popleft()
        return results

    def _take(
        self, plan: StepPlan, results: Sequence[SpanResult], version: int
    ) -> list[EngineOutput]:
        self._num_failures_in_a_row = 0
        self.drafters.count_step(version, self._scheduler.stats)
        outputs = self._scheduler.update(plan, results)
        self._stats_log.tick(self.stats)
        self._num_steps += 1
        if self._num_steps % DRAFTER_CHECK_STEPS == 0 or not self._scheduler.has_work:
            self._report_drafter()
        return outputs

    def _give_up(self) -> None:
        """Undoes all steps in flight; their requests are where they were before."""
        while self._in_flight:
            self._in_flight.pop()[1].close()
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
                    return self._fail(plan.requests, message)
                has_failed = True
            plan = self._scheduler.schedule_again(plan)
            if not plan.spans:
                return []
            try:
                self._launch(plan)
                results = self._finish_oldest()
            except Exception as again:
                error = again
                self._give_up()
            else:
                return self._take(plan, results, self.drafters.version)

    def _refuse(self, refusal: NotAdmitted) -> list[EngineOutput]:
        """Ends a request that the device could not take, or whose grammar is not there."""
        cause = refusal.__cause__
        if not refusal.is_loaded:
            message = f"the grammar could not be loaded: {cause}"
            logger.error("%s", message)
            return self._scheduler.fail([refusal.request], message)
        self._num_admission_failures += 1
        message = f"the request could not be admitted: {type(cause).__name__}: {cause}"
        logger.error("%s", message)
        self._give_up()  # books are checked where nothing is under way
        return self._fail([refusal.request], message)

    def _fail(self, requests: Sequence[Request], message: str) -> list[EngineOutput]:
        """Ends requests, and with them the engine if it cannot serve others either."""
        self._runner.check_integrity()
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            raise EngineError(
                f"{self._num_failures_in_a_row} failures in a row; the last: {message}"
            )
        return self._scheduler.fail(requests, message)

    def _report_drafter(self) -> None:
        stats = self._runner.stats
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


class StatsLog:
    """Writes what happened since the last line."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_s = 0.0
        self._last_tick = time.monotonic()
        self._last = EngineStats()

    def tick(self, read_stats: Callable[[], EngineStats]) -> None:
        """Called after every step; cheap unless a line is due."""
        now = time.monotonic()
        self._busy_s += min(now - self._last_tick, _LONGEST_STEP_S)
        self._last_tick = now
        if self._interval_s <= 0 or self._busy_s < self._interval_s:
            return
        stats = read_stats()
        logger.info("%s", self._line(stats, self._busy_s))
        self._busy_s = 0.0
        self._last = stats

    def _line(self, stats: EngineStats, busy_s: float) -> str:
        last = self._last
        drafting = counters_since(last, stats)
        num_prompt_tokens = stats.num_prompt_tokens - last.num_prompt_tokens
        num_generation_tokens = stats.num_generation_tokens - last.num_generation_tokens
        num_queries = stats.prefix_cache_queries - last.prefix_cache_queries
        num_hits = stats.prefix_cache_hits - last.prefix_cache_hits
        num_used = stats.num_pages - stats.num_free_pages
        return (
            f"prompt {num_prompt_tokens / busy_s:.1f} tok/s, "
            f"generation {num_generation_tokens / busy_s:.1f} tok/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"KV pages {100 * num_used / max(stats.num_pages, 1):.1f}%, "
            f"prefix hits {100 * num_hits / max(num_queries, 1):.1f}%, "
            f"acceptance length {mean_acceptance_length(drafting):.2f}, "
            f"acceptance rate {100 * acceptance_rate(drafting):.1f}%" + _experts(last, stats)
        )


def _experts(before: EngineStats, after: EngineStats) -> str:
    """What a mixture's steps went to in between, at the end of a line."""
    num_experts = after.num_distinct_experts - before.num_distinct_experts
    num_layers = after.num_expert_layers - before.num_expert_layers
    num_rows = after.num_expert_rows - before.num_expert_rows
    if num_experts == 0:
        return ""
    return (
        f", {num_experts / num_layers:.1f} experts of a layer in a step, "
        f"{num_rows / num_experts:.1f} rows each"
    )
