"""Planning of one step: rows and pages for the running sequences, in order of rank.

Steps before it may still be in flight. What they will bring is not known, so a sequence is planned
for the least (one token each) where its budget counts, and for the most where its pages do.
"""

from __future__ import annotations

from openspec.engine.core.executor import Runner
from openspec.engine.core.request import Phase, Request, StepPlan
from openspec.engine.core.run_queue import RunQueue
from openspec.specs.runner import RunnerConfig

SHORT_SHARE = 4
"""Of a step's prompt rows, this part goes to prompts that are short beside the first."""
MOST_YIELDED = 20
"""This part of its tokens a prompt yields to short ones, in all its steps together."""
MOST_LOOKED_AT = 32
"""Requests in the queue that may be short ones."""


def plan_step(config: RunnerConfig, runner: Runner, queue: RunQueue) -> StepPlan:
    """The next step; admits and preempts as needed. No spans: there is nothing to do."""
    may_admit = queue.may_admit(runner.num_free_pages) or queue.may_displace()
    if queue.num_prefilling == 0 and not may_admit:
        plan = _plan_only_decodes(config, runner, queue)
        if plan is not None:
            return plan
    return _MixedStep(config, runner, queue).plan()


def _plan_only_decodes(config: RunnerConfig, runner: Runner, queue: RunQueue) -> StepPlan | None:
    """Every sequence with all the drafts it wants, if rows and pages allow."""
    requests = [request for request in queue.running if request.num_wanted > 0]
    spans = [(request.slot, 1, request.max_drafts) for request in requests]
    num_rows = len(spans) + sum([span[2] for span in spans])
    if num_rows > config.max_num_batched_tokens:
        return None
    num_free = runner.num_free_pages
    most_pages = runner.num_rows_ahead // config.page_size + 2 + runner.num_base_pages
    if num_free < len(spans) * most_pages:
        needed = runner.num_pages_needed
        if sum([needed(slot, 1 + num_drafts) for slot, _, num_drafts in spans]) > num_free:
            return None
    return StepPlan(spans, requests)


def _may_pass(num_rows: int, request: Request, other: Request) -> bool:
    """Whether so many rows of a request may come before another one's prompt."""
    has_priority = request.source.priority <= other.source.priority
    return has_priority and MOST_YIELDED * (other.num_yielded + num_rows) <= other.num_tokens


class _MixedStep:
    """A step with prompts in it, or one that is short of rows or pages."""

    def __init__(self, config: RunnerConfig, runner: Runner, queue: RunQueue) -> None:
        self._config = config
        self._runner = runner
        self._queue = queue
        self._requests: list[Request] = []
        self._num_new: list[int] = []
        self._num_pages_taken = 0
        self._rows_left = config.max_num_batched_tokens
        self._kept_for: dict[int, int] = {}
        """Rows that are kept for prompts before their turn, by slot."""

    def plan(self) -> StepPlan:
        queue = self._queue
        running = queue.running
        queue.follow_leaders()
        while queue.make_room() and queue.admit(0) is not None:
            pass
        while queue.outranks_a_prompt() and queue.admit(0) is not None:
            pass  # else a long prompt would keep a later request of higher priority waiting
        num_preemptions = queue.num_preemptions
        # One row for every decoding sequence comes first; then up to half of the rest for drafts.
        # Prompts beside them get half of a step at most, so that who streams keeps its pace.
        decoding = [
            request
            for request in running
            if request.phase is Phase.DECODING and request.num_wanted > 0
        ]
        self._rows_left -= len(decoding)
        drafts_wanted = sum(request.max_drafts for request in decoding)
        rows_for_drafts = min(drafts_wanted, self._rows_left // 2)
        self._rows_left -= rows_for_drafts
        num_kept = 0
        if decoding:
            num_kept = max(0, self._rows_left - self._config.max_num_batched_tokens // 2)
        self._rows_left -= num_kept
        self._keep_rows_for_short_prompts()

        index = 0
        while index < len(running):  # preemption shortens the list after the index
            request = running[index]
            if request.phase is Phase.PREFILLING:
                self._rows_left += self._kept_for.pop(request.slot, 0)
                self._place_chunk(request)
            elif request.num_wanted > 0:
                self._place_decode(request)
            index += 1
        while queue.num_preemptions == num_preemptions and self._rows_left > 0:
            admitted = queue.admit(self._num_pages_taken)
            if admitted is None:
                break
            # It may rank before sequences that are placed already: those keep what they have.
            self._place_chunk(admitted, may_preempt=False)

        self._rows_left += rows_for_drafts + num_kept + sum(self._kept_for.values())
        return StepPlan(self._spans_with_drafts(), self._requests)

    def _keep_rows_for_short_prompts(self) -> None:
        """Who has few rows left need not wait for a long prompt: a share of the rows is kept.

        A prompt is passed by others of its priority or a higher one, and only as far as
        MOST_YIELDED allows, so that it loses next to nothing however many they are.
        """
        queue = self._queue
        prompts = [one for one in queue.running if one.phase is Phase.PREFILLING]
        num_left = self._rows_left // SHORT_SHARE
        if not prompts or num_left == 0 or queue.rows_left(prompts[0]) <= self._rows_left:
            return
        passed: list[Request] = []
        for request in [*prompts, *queue.waiting(MOST_LOOKED_AT)]:
            num_rows = queue.rows_left(request)
            may_pass = passed and all(_may_pass(num_rows, request, one) for one in passed)
            if may_pass and request.phase is Phase.WAITING:
                may_pass = queue.admit_early(request)
            if not may_pass:
                passed.append(request)
                continue
            num_kept = self._chunk_rows(request, num_left)
            for one in passed:
                one.num_yielded += num_kept
            self._kept_for[request.slot] = num_kept
            self._rows_left -= num_kept
            num_left -= num_kept
            if num_left == 0:
                return

    def _num_free(self) -> int:
        return self._runner.num_free_pages - self._num_pages_taken

    def _place(self, request: Request, num_new: int, num_pages: int) -> None:
        self._requests.append(request)
        self._num_new.append(num_new)
        self._num_pages_taken += num_pages

    def _place_decode(self, request: Request) -> None:
        needed = self._runner.num_pages_needed(request.slot, 1)
        while needed > self._num_free():
            last = self._queue.running[-1]
            if request.num_steps_in_flight > 0 or last is self._queue.running[0]:
                # Steps in flight hold pages that they may not need, or not any more.
                self._rows_left += 1
                return
            self._queue.preempt(last)
            if last is request:
                self._rows_left += 1
                return
        self._place(request, 1, needed)

    def _place_chunk(self, request: Request, may_preempt: bool = True) -> None:
        """Places as much of the prompt as rows and pages allow, perhaps nothing."""
        num_new = self._chunk_rows(request, self._rows_left)
        if num_new <= 0:
            return
        needed = self._runner.num_pages_needed
        fits = self._largest_fit(request, num_new)
        while fits == 0:
            last = self._queue.running[-1]
            if last is request or not may_preempt:
                return
            self._queue.preempt(last)
            fits = self._largest_fit(request, num_new)
        self._place(request, fits, needed(request.slot, fits))
        self._rows_left -= fits

    def _chunk_rows(self, request: Request, most: int) -> int:
        num_left = request.num_tokens - request.num_scheduled
        num_rows = min(num_left, most)
        if num_rows < num_left:
            # Chunks end on page boundaries where they can.
            end = request.num_scheduled + num_rows
            aligned = end - end % self._config.page_size
            if aligned > request.num_scheduled:
                num_rows = aligned - request.num_scheduled
        wanted = self._runner.wanted_end(request.slot) - request.num_scheduled
        return wanted if 0 < wanted < num_rows else num_rows

    def _largest_fit(self, request: Request, num_rows: int) -> int:
        """The most rows, up to `num_rows`, whose pages are free."""
        num_free = self._num_free()
        needed = self._runner.num_pages_needed
        if needed(request.slot, num_rows) <= num_free:
            return num_rows
        low, high = 0, num_rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            if needed(request.slot, middle) <= num_free:
                low = middle
            else:
                high = middle - 1
        return low

    def _spans_with_drafts(self) -> list[tuple[int, int, int]]:
        """Shares what rows and pages are left among the sequences that want drafts."""
        spans = []
        num_to_serve = len(self._requests)
        for request, num_new in zip(self._requests, self._num_new, strict=True):
            num_drafts = 0
            if request.phase is Phase.DECODING or (
                request.num_scheduled + num_new == request.num_tokens
            ):
                share = -(-self._rows_left // num_to_serve)
                num_drafts = min(request.max_drafts, share)
            if num_drafts > 0:
                num_drafts = self._fit_drafts(request, num_new, num_drafts)
                self._rows_left -= num_drafts
            num_to_serve -= 1
            spans.append((request.slot, num_new, num_drafts))
        return spans

    def _fit_drafts(self, request: Request, num_new: int, num_drafts: int) -> int:
        needed = self._runner.num_pages_needed
        base = needed(request.slot, num_new)
        num_free = self._num_free()
        while num_drafts > 0:
            extra = needed(request.slot, num_new + num_drafts) - base
            if extra <= num_free:
                self._num_pages_taken += extra
                return num_drafts
            num_drafts -= 1
        return 0
