"""From the engine's tokens to what a caller sees: text, stop strings, logprobs, statistics."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from openspec.messages import (
    EngineOutput,
    EngineRequest,
    SpecDecodeStats,
    TokenLogprobs,
    acceptance_rate,
    mean_acceptance_length,
    record_answer_step,
    total_speculation,
)
from openspec.step_detail import StepDetail, steps_of
from openspec.text.detokenizer import IncrementalDetokenizer
from openspec.text.logprobs import LogprobRows, PositionLogprobs
from openspec.text.parsers.reasoning import ThinkingSpan
from openspec.text.stop_strings import StopStrings
from openspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times on the monotonic clock, in seconds, and speculation."""

    arrival_time: float
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    spec_decode: SpecDecodeStats | None
    """The engine's counters; None while it has not sent any. `openspec.messages` has the ratios."""

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts; 1 where nothing was drafted."""
        return mean_acceptance_length(self.spec_decode or SpecDecodeStats())

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return acceptance_rate(self.spec_decode or SpecDecodeStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] | None
    """One for each of token_ids, if asked for."""
    text_offsets: list[int]
    """Where the text of each token begins in the text, or would, were it not cut."""
    cumulative_logprob: float | None
    finish_reason: str | None
    """None while running, "stop", "length", "abort" or "error"."""
    stop_reason: int | str | None
    """The stop string or stop id that ended it; None for the model's own end of sequence."""
    metrics: RequestMetrics
    steps: list[StepDetail] | None
    """What brought these tokens, step by step, if asked for."""
    token_texts: list[str]
    """With steps: what each of token_ids adds to the text, stop strings left in."""

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request with all its sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One for each prompt token, None for the first, if asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one engine output added to a request."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[PositionLogprobs] | None = None
    text_offsets: Sequence[int] = ()
    steps: Sequence[StepDetail] | None = None
    token_texts: Sequence[str] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    abort: bool = False
    """The request ended here, but the engine does not know: abort it there."""
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last one."""
        return self.finish_reason is not None


class RequestOutputProcessor:
    """Follows one engine request from its first token to its end.

    The result is a function of the tokens alone, never of how they were grouped into steps: an
    accepted run is read token by token, and what comes after a stop is not there.
    """

    def __init__(
        self,
        request: EngineRequest,
        tokenizer: Tokenizer,
        *,
        index: int = 0,
        eos_token_ids: Collection[int] = (),
        shown_token_ids: Collection[int] = (),
        stop_strings: StopStrings | None = None,
        thinking: ThinkingSpan | None = None,
        arrival_time: float | None = None,
        keeps_details: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop_strings` may be given to share one automaton between the sequences of a request.

        Stop strings begin after `thinking`. `shown_token_ids` are special tokens that the text has
        even where it skips special ones. Without `keeps_details` only the deltas have steps and
        log-probabilities: those of a long answer are many objects.
        """
        self.request = request
        self.index = index
        self.num_cached_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._tokenizer = tokenizer
        self._params = request.sampling
        self._eos_token_ids = frozenset(eos_token_ids)
        self._thinking = thinking
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, self._params.skip_special_tokens, shown_token_ids
        )
        if stop_strings is None and self._params.stop:
            stop_strings = StopStrings(self._params.stop)
        self._stop = stop_strings
        self._stop_state = 0
        self._held = ""  # the end of the text, which may become a stop string
        self._texts: list[str] = []
        self._num_chars = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text_offsets: list[int] = []
        self._cumulative_logprob = 0.0
        self._wants_steps, self._keeps_details = request.speculative.detailed, keeps_details
        self._steps: list[StepDetail] = []
        self._token_texts: list[str] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._spec_decode: SpecDecodeStats | None = None
        self._clock = clock
        self._arrival_time = clock() if arrival_time is None else arrival_time
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None
        self._finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the last delta has been given."""
        return self._finish_reason is not None

    @property
    def prompt_logprobs(self) -> Sequence[PositionLogprobs | None] | None:
        """One for each prompt token, None for the first; None while there are none."""
        if self._prompt_logprobs is None:
            return None
        return LogprobRows(self._tokenizer, [None, *self._prompt_logprobs])

    @property
    def num_output_tokens(self) -> int:
        """Tokens so far: the completion tokens of the usage."""
        return len(self._token_ids)

    def process(self, output: EngineOutput) -> OutputDelta:
        """Takes the engine's next output; one that comes after the end adds nothing."""
        if self._finish_reason is not None:
            return OutputDelta()
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        first, first_entry = len(self._token_ids), len(self._logprobs)
        text, stop = self._read_tokens(output)
        self._count(output, len(self._token_ids) - first)
        finish_reason = output.finish_reason
        if stop is not None:
            finish_reason, self._stop_reason = "stop", stop
        elif finish_reason is not None:
            text += self._held
            self._held = ""
            if finish_reason == "stop" and output.token_ids:
                last = output.token_ids[-1]
                self._stop_reason = None if last in self._eos_token_ids else last
        if text:
            self._texts.append(text)
        steps = None
        if self._wants_steps:
            steps = output.steps or []
            if stop is not None:  # nothing else ends within a step
                steps = steps_of(steps, len(self._token_ids) - first)
            if self._keeps_details:
                self._steps += steps
        logprobs = self._rows(first_entry)
        if not self._keeps_details:
            self._logprobs.clear()
        now = self._clock()
        if len(self._token_ids) > first:
            self._last_token_time = now
            if self._first_token_time is None:
                self._first_token_time = now
        if finish_reason is not None:
            self._finish_reason = finish_reason
            self._finished_time = now
        return OutputDelta(
            text=text,
            token_ids=self._token_ids[first:],
            logprobs=logprobs,
            text_offsets=self._text_offsets[first:],
            steps=steps,
            token_texts=self._token_texts[first:],
            finish_reason=finish_reason,
            stop_reason=self._stop_reason,
            abort=stop is not None and output.finish_reason is None,
            error=output.error,
        )

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            logprobs=self._rows(0) if self._keeps_details else None,
            text_offsets=list(self._text_offsets),
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            metrics=self.metrics(),
            steps=list(self._steps) if self._wants_steps and self._keeps_details else None,
            token_texts=list(self._token_texts),
        )

    def metrics(self) -> RequestMetrics:
        """Times and speculation so far."""
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_token_time=self._first_token_time,
            last_token_time=self._last_token_time,
            finished_time=self._finished_time,
            spec_decode=self._spec_decode,
        )

    def _count(self, output: EngineOutput, num_tokens: int) -> None:
        """Takes the engine's counts, or with stop strings those of the tokens that are left."""
        if self._stop is None:
            self._spec_decode = output.spec_decode or self._spec_decode
            return
        if self._spec_decode is None:
            self._spec_decode = SpecDecodeStats()
        for step in output.step_counts or ():
            if num_tokens == 0:
                break
            kept = step.first(num_tokens)
            record_answer_step(self._spec_decode, kept, self._wants_steps)
            num_tokens -= kept.num_tokens

    @property
    def _wants_logprobs(self) -> bool:
        return self._params.logprobs is not None

    def _read_tokens(self, output: EngineOutput) -> tuple[str, str | None]:
        """Takes tokens up to a stop string; returns the text to give out and the stop string."""
        is_plain = self._stop is None and not self._wants_logprobs
        if is_plain and output.finish_reason is None:
            return self._read_plain(output.token_ids), None
        texts: list[str] = []
        num_tokens = len(output.token_ids)
        for position, token_id in enumerate(output.token_ids):
            is_last = position + 1 == num_tokens and output.finish_reason is not None
            # The text of a stop id is not part of the answer, its id is.
            is_silent = (
                is_last
                and output.finish_reason == "stop"
                and not self._params.include_stop_str_in_output
            )
            piece = "" if is_silent else self._detokenizer.append(token_id)
            if is_last:
                piece += self._detokenizer.finish()
            self._token_ids.append(token_id)
            self._text_offsets.append(self._num_chars)
            if self._wants_steps:
                self._token_texts.append(piece)
            if self._wants_logprobs and output.logprobs is not None:
                entry = output.logprobs[position]
                self._logprobs.append(entry)
                self._cumulative_logprob += entry.logprobs[0]
            text, stop = self._release(piece)
            texts.append(text)
            if stop is not None:
                return "".join(texts), stop
        if num_tokens == 0 and output.finish_reason is not None:
            text, stop = self._release(self._detokenizer.finish())
            texts.append(text)
            return "".join(texts), stop
        return "".join(texts), None

    def _read_plain(self, token_ids: Sequence[int]) -> str:
        """Text of tokens where nothing else is wanted and nothing ends here: most of all tokens."""
        append, offsets, num_chars = self._detokenizer.append, self._text_offsets, self._num_chars
        texts: list[str] = []
        for token_id in token_ids:
            offsets.append(num_chars)
            piece = append(token_id)
            num_chars += len(piece)
            texts.append(piece)
        self._token_ids += token_ids
        if self._wants_steps:
            self._token_texts += texts
        self._num_chars = num_chars
        return "".join(texts)

    def _release(self, piece: str) -> tuple[str, str | None]:
        """The text that is certain after one more piece, and the stop string it completes."""
        self._num_chars += len(piece)
        if self._stop is None:
            return piece, None
        begin = 0  # of the text that may stop the answer
        if self._thinking is not None and not self._thinking.is_over:
            piece, self._held = self._held + piece, ""
            num_thinking = self._thinking.push(piece)
            if num_thinking is None:
                self._held = piece
                return "", None
            begin = num_thinking
        # Before min_tokens are out nothing stops the text, but what is there may begin a stop.
        is_deaf = len(self._token_ids) <= self._params.min_tokens
        self._stop_state, match = self._stop.advance(
            self._stop_state, piece[begin:], len(piece) if is_deaf else 0
        )
        text = self._held + piece
        if match is not None:
            keep = match.end if self._params.include_stop_str_in_output else match.begin
            keep += begin
            text = text[: len(self._held) + keep]
            self._held = ""
            return text, match.text
        num_held = 0
        if not self._params.include_stop_str_in_output:
            num_held = self._stop.depth(self._stop_state)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def _rows(self, first: int) -> LogprobRows[PositionLogprobs] | None:
        if not self._wants_logprobs:
            return None
        return LogprobRows(self._tokenizer, self._logprobs[first:])


def request_output(
    request_id: str, prompt: str | None, processors: Sequence[RequestOutputProcessor]
) -> RequestOutput:
    """The state of a request from its sequences (`n` of them, same prompt)."""
    outputs = [_described(processor.output()) for processor in processors]
    prompt_logprobs = processors[0].prompt_logprobs
    parts = [output.metrics for output in outputs]
    stats = [part.spec_decode for part in parts if part.spec_decode is not None]
    finished = all(output.finished for output in outputs)
    first = [part.first_token_time for part in parts if part.first_token_time is not None]
    last = [part.last_token_time for part in parts if part.last_token_time is not None]
    ends = [part.finished_time for part in parts if part.finished_time is not None]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=list(processors[0].request.prompt_token_ids),
        prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
        outputs=outputs,
        finished=finished,
        num_cached_tokens=max(processor.num_cached_tokens for processor in processors),
        metrics=RequestMetrics(
            arrival_time=min(part.arrival_time for part in parts),
            first_token_time=min(first, default=None),
            last_token_time=max(last, default=None),
            finished_time=max(ends) if finished and ends else None,
            spec_decode=total_speculation(stats) if stats else None,
        ),
    )


def _described(output: CompletionOutput) -> CompletionOutput:
    if output.logprobs is None:
        return output
    return dataclasses.replace(output, logprobs=list(output.logprobs))
