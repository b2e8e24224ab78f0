"""Scheduler: which rows the next step computes. Pure host logic: plans out, results in.

Continuous batching. Every decoding sequence has its row in every step; prompt chunks fill what the
row budget leaves, and drafts share it with them. Pages are given in order of rank (priority, then
arrival); when they run out, drafts shrink first, then the lowest rank is preempted: it gives all
its pages back and later computes its prompt and output again. The first in rank always advances, so
every request finishes.

A step may be planned while earlier ones are in flight. What is planned is counted when the step is
scheduled, what is computed when its results are taken; a request that has left its slot in between
has no part in those results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from openspec.engine.core.executor import Runner
from openspec.engine.core.fan_out import fan_out
from openspec.engine.core.planner import plan_step
from openspec.engine.core.request import Phase, Request, StepPlan
from openspec.engine.core.run_queue import RunQueue
from openspec.errors import EngineError, RequestError
from openspec.messages import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    SamplingParams,
    StepCounts,
    TokenLogprobs,
    record_answer_step,
    record_step,
)
from openspec.specs.runner import RunnerConfig
from openspec.step_detail import StepDetail, depth_of, steps_of

if TYPE_CHECKING:
    from openspec import _C
    from openspec._C import SpanResult


NOTHING_LEFT = (
    "allowed_token_ids, bad_words and min_tokens of this request leave no token that may follow "
    "this text"
)


class Scheduler:
    """Owns all requests; the only one that decides who runs."""

    def __init__(self, config: RunnerConfig, runner: Runner, displaces: bool = False) -> None:
        """`displaces`: whether priority may take a running sequence's place."""
        self._config = config
        self._runner = runner
        self._queue = RunQueue(config, runner, displaces)
        self._num_arrivals = 0
        self._depth = config.draft_depth
        self._held: list[Request] = []
        self._stats = EngineStats(
            num_accepted_tokens_per_pos=[0] * self._depth, num_drafts_per_pos=[0] * self._depth
        )

    # Submission and cancellation

    def add(
        self, source: EngineRequest, vocab_size: int, grammar: Future[Any] | None = None
    ) -> list[EngineOutput]:
        """Queues the sequences of a request, which run once its grammar is there.

        Returns their only outputs if nothing is to compute.

        Raises:
            RequestError: for a request that can never run, with the numbers.
        """
        sequences = fan_out(source)
        for sequence in sequences:
            if self._queue.get(sequence.request_id) is not None:
                raise RequestError(f"request id {sequence.request_id!r} is in use", "request_id")
        max_tokens = self._check(source, vocab_size)
        limit = max(self._config.max_draft_tokens, self._config.max_copied_drafts)
        if limit == 0 and source.grammar:
            limit = self._config.max_grammar_drafts
        if not source.speculative.enabled:
            limit = 0
        if source.speculative.num_speculative_tokens is not None:
            limit = max(0, min(limit, source.speculative.num_speculative_tokens))
        depth = min(limit, self._depth)
        outputs = []
        tally = None if grammar is None else self._runner.new_grammar_tally()
        for sequence in sequences:
            request = Request(
                sequence, self._num_arrivals, max_tokens, limit, depth, grammar, tally
            )
            self._num_arrivals += 1
            if max_tokens == 0 and not request.needs_prompt_logprobs:
                outputs.append(request.last_output("length"))
            else:
                self._queue.enqueue(request)
        return outputs

    def abort(self, request_id: str) -> EngineOutput | None:
        """Ends a request now; None if it is unknown or finished."""
        request = self._queue.get(request_id)
        if request is None:
            return None
        self._queue.finish(request)
        return request.last_output("abort")

    def fail(self, requests: Iterable[Request], error: str) -> list[EngineOutput]:
        """Ends requests whose step failed."""
        outputs = []
        for request in requests:
            if request.phase is not Phase.FINISHED:
                self._queue.finish(request)
                outputs.append(request.last_output("error", error))
        return outputs

    # The step

    def schedule(self) -> StepPlan:
        """The next step, as if all those in flight had landed; no spans: nothing to launch.

        Raises:
            NotAdmitted: if a request could not be given a slot; nothing is planned.
        """
        self._queue.take_ready()
        if self._held:
            self._poll_held()
        plan = plan_step(self._config, self._runner, self._queue)
        self._queue.advance(plan)
        return plan

    def await_work(self, wait_s: float) -> None:
        """Waits for the mask or grammar of a request that cannot run before, if there is one."""
        if self._held:
            self._runner.await_masks(wait_s)
        else:
            self._queue.await_grammars(wait_s)

    def fall_back(self) -> None:
        """All steps in flight were given up; what they had planned is to be planned anew."""
        self._queue.fall_back()

    def schedule_again(self, plan: StepPlan) -> StepPlan:
        """A step that was given up, as the next one: without drafts and without who has left since.

        It need not have been the oldest: no span is longer than what is left to compute.
        """
        plan = plan.plain()
        self._queue.advance(plan)
        return plan

    def update(self, plan: StepPlan, results: Sequence[SpanResult]) -> list[EngineOutput]:
        """Takes the results of the oldest step in flight, in the order of its spans.

        Raises:
            EngineError: if they do not belong to this plan.
        """
        if len(results) != len(plan.spans):
            raise EngineError(f"{len(results)} results for {len(plan.spans)} spans")
        outputs: list[EngineOutput] = []
        for request, stay, span, result in zip(
            plan.requests, plan.stays, plan.spans, results, strict=True
        ):
            if result.slot != span[0]:
                raise EngineError(f"result of slot {result.slot} where slot {span[0]} was due")
            if request.stay != stay:
                continue
            if request.num_computed < request.num_scheduled:
                self._advance_prefill(request, span[1], result)
                if request.num_computed < request.num_tokens:
                    continue
            request.num_steps_in_flight -= 1
            if request.grammar is not None:
                self._hold(request, result.is_held)
                if result.failure is not None:
                    self._queue.finish(request)
                    outputs.append(request.last_output("error", *result.failure))
                    continue
                if not result.token_ids:
                    continue
            outputs.append(self._take_tokens(request, result))
        return outputs

    def preempt_last(self) -> bool:
        """Sends the lowest rank back to the queue, unless it is the only one that runs."""
        if len(self._queue.running) < 2:
            return False
        self._queue.preempt(self._queue.running[-1])
        return True

    # What there is

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return len(self._queue) > 0

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, with the scheduler's gauges; the caller's own fields are 0."""
        self._stats.num_running = len(self._queue.running)
        self._stats.num_waiting = self._queue.num_waiting
        self._stats.num_preemptions = self._queue.num_preemptions
        self._stats.prefix_cache_queries = self._queue.num_prefix_queries
        self._stats.prefix_cache_hits = self._queue.num_prefix_hits
        return self._stats

    # Parts

    def _check(self, source: EngineRequest, vocab_size: int) -> int:
        """Refuses what can never run; returns the output budget that the model's length leaves."""
        config, prompt = self._config, source.prompt_token_ids
        source.sampling.check(vocab_size, has_eos=True)
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        if len(prompt) >= config.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with at least one token of output the "
                f"maximum is {config.max_model_len - 1} (max_model_len {config.max_model_len})",
                "prompt",
                "context_length_exceeded",
            )
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= vocab_size:
            outside = lowest if lowest < 0 else highest
            raise RequestError(
                f"prompt token id {outside} is outside the vocabulary [0, {vocab_size})", "prompt"
            )
        if source.grammar and source.sampling.min_tokens > 0:
            raise RequestError(
                "min_tokens cannot stand beside a grammar, which says where the output ends",
                "min_tokens",
            )
        _check_limits(source.sampling)
        max_tokens = min(source.sampling.max_tokens, config.max_model_len - len(prompt))
        num_pages = -(-(len(prompt) + max(max_tokens, 1)) // config.page_size)
        if num_pages > self._runner.num_pages:
            raise RequestError(
                f"{len(prompt)} prompt tokens and up to {max_tokens} more need {num_pages} KV "
                f"pages of {config.page_size} tokens; there are {self._runner.num_pages}",
                "max_tokens",
            )
        return max_tokens

    def _hold(self, request: Request, is_held: bool) -> None:
        if is_held and not request.is_held:
            self._held.append(request)
        request.is_held = is_held

    def _poll_held(self) -> None:
        for request in self._held:
            request.is_held = request.is_held and self._runner.is_held(request.slot)
        self._held = [request for request in self._held if request.is_held]

    def _advance_prefill(self, request: Request, num_new: int, result: SpanResult) -> None:
        request.num_computed += num_new
        self._stats.num_prompt_tokens += num_new
        if request.needs_prompt_logprobs:
            request.prompt_logprobs += _logprobs(result.prompt_logprobs)
        if request.num_computed < request.num_tokens and result.token_ids:
            raise EngineError(f"slot {result.slot} chose tokens before its prompt was computed")

    def _take_tokens(self, request: Request, result: SpanResult) -> EngineOutput:
        token_ids = result.token_ids  # read once: the core makes a new list each time
        num_left = request.max_tokens - len(request.output_token_ids)
        if not 0 < len(token_ids) <= max(num_left, 1):
            raise EngineError(f"{len(token_ids)} tokens where 1 to {num_left} were due")
        is_stuck = False
        if num_left > 0 and request.allowed_ids is not None:
            num_permitted = request.num_permitted(token_ids)
            is_stuck, token_ids = num_permitted < len(token_ids), token_ids[:num_permitted]
        output = EngineOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            num_cached_tokens=request.num_cached_tokens,
        )
        if num_left == 0:
            # Only log-probabilities of the prompt were wanted; the runner chose one token anyway.
            output.token_ids = []
            output.finish_reason = "length"
        else:
            if not request.output_token_ids:
                self._stats.num_served_prompt_tokens += request.prompt_len
            request.append(token_ids)
            counts = self._count(request, len(token_ids), result)
            if request.source.sampling.stop:
                output.step_counts = [counts]
            if request.source.speculative.detailed:
                output.steps = steps_of([_step_detail(result)], len(token_ids))
            if request.source.sampling.logprobs is not None:
                output.logprobs = _logprobs(result.logprobs)[: len(token_ids)]
            output.finish_reason = result.finish_reason or None
            if is_stuck:
                output.finish_reason, output.error, output.is_refused = "error", NOTHING_LEFT, True
            elif output.finish_reason is None and len(token_ids) == num_left:
                output.finish_reason = "length"
        if request.needs_prompt_logprobs:
            request.needs_prompt_logprobs = False
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        if output.finish_reason is not None:
            output.spec_decode = request.spec_decode
            self._queue.finish(request)
        return output

    def _count(self, request: Request, num_tokens: int, result: SpanResult) -> StepCounts:
        self._stats.num_generation_tokens += num_tokens
        forced, copied, _ = result.drafts_by_source
        detail = result.detail
        if detail is not None:
            depth = depth_of(detail[1])
        else:
            # A grammar's drafts are a chain in front of others; copies are a chain, too.
            depth = forced[0] + (copied[0] or self._depth)
        counts = StepCounts(
            num_tokens=len(result.token_ids),
            num_draft_tokens=result.num_draft_tokens,
            num_accepted_tokens=result.num_accepted_tokens,
            depth=depth,
            num_forced_tokens=forced[0],
            num_accepted_forced_tokens=forced[1],
            num_copied_tokens=copied[0],
            num_accepted_copied_tokens=copied[1],
        ).first(num_tokens)
        record_step(self._stats, counts)
        record_answer_step(request.spec_decode, counts, request.source.speculative.detailed)
        return counts


def _step_detail(result: SpanResult) -> StepDetail:
    detail = result.detail
    if detail is None:
        raise EngineError(f"slot {result.slot} did not report its step")
    return StepDetail(result.token_ids, *detail)


def _check_limits(sampling: SamplingParams) -> None:
    """Refuses limits that leave no first token."""
    if sampling.allowed_token_ids is None:
        return
    allowed = set(sampling.allowed_token_ids)
    if sampling.min_tokens > 0 and allowed.issubset(sampling.stop_token_ids):
        raise RequestError(
            "allowed_token_ids has only tokens that end the answer, and min_tokens forbids these "
            "at its beginning: allow another token, or set min_tokens to 0",
            "min_tokens",
        )
    allowed -= {word[0] for word in sampling.bad_word_ids if len(word) == 1}
    if sampling.min_tokens > 0:
        allowed.difference_update(sampling.stop_token_ids)
    if not allowed:
        raise RequestError(
            "bad_words forbids every token that allowed_token_ids leaves at the beginning",
            "bad_words",
        )


def _logprobs(entries: Sequence[_C.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in entries]
