"""A generation request in flight: its sequences in the engine, their outputs as they come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from openspec.engine.core.fan_out import engine_request, fan_out
from openspec.engine.processes.output_stream import OutputStream
from openspec.errors import EngineError, RequestError
from openspec.grammar.compiler import CompiledGrammar
from openspec.messages import (
    SamplingParams,
    SpecDecodeStats,
    SpeculativeOptions,
    total_speculation,
)
from openspec.serve.generation.body import Arrival
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.chat import GenerationFields, SpeculativeField
from openspec.serve.shapes.wire import ApiError
from openspec.text.outputs import OutputDelta, RequestOutputProcessor
from openspec.text.stop_strings import StopStrings
from openspec.text.tokenizer import Tokenizer

SEQUENCE_CHARS = 64
"""One sequence takes about as long as so many characters, to be made and to be answered."""
MIN_CHECKED_CHARS = 1 << 16
"""Shorter texts are encoded as soon as looked at."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is completed."""

    token_ids: list[int]
    text: str | None
    """None where the client sent ids."""


class Job:
    """The sequences of one request, from submission to their ends.

    Use as an async context manager: leaving it ends in the engine whatever still runs there.
    """

    def __init__(
        self,
        context: ServerContext,
        kind: str,
        arrival: Arrival,
        prompts: Sequence[Prompt],
        body: GenerationFields,
        sampling: SamplingParams,
        shown_token_ids: Collection[int] = (),
        grammar: CompiledGrammar | None = None,
        thinking: bool | None = None,
    ) -> None:
        """`kind` begins the answer's id; `shown_token_ids` as in `RequestOutputProcessor`.

        `thinking` as in `MessageParser`.
        """
        if grammar is not None:
            # What the grammar has spelled is shown, or its text would be another.
            shown_token_ids = {*shown_token_ids, *context.answer_form.spelled_ids}
        self._grammar = grammar
        self._held = contextlib.ExitStack()
        self.request_id = f"{kind}-{arrival.unique}"
        self.external_id = arrival.external_id
        self.owner = arrival.owner
        self.prompts = prompts
        self.sampling = sampling
        self.arrival_time = arrival.time
        self.processors: list[RequestOutputProcessor] = []
        """By choice index: the completions of the first prompt, then of the second, ..."""
        self._context = context
        self._stream: OutputStream | None = None
        self._is_aborted = self._is_gone = False
        self._named_engine = arrival.engine
        stops = StopStrings(sampling.stop) if sampling.stop else None
        speculative = _speculative(context, body.speculative)
        self.is_detailed = speculative.detailed
        bad_word_ids = context.tokenizer.ids_of_bad_words(sampling.bad_words)
        self._requests = [
            engine_request(
                f"{self.request_id}-{number}",
                prompt.token_ids,
                sampling,
                context.model.eos_token_ids,
                bad_word_ids=bad_word_ids,
                default_seed=context.engine_config.seed,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                owner=sha256(arrival.owner).hexdigest() if arrival.owner is not None else "",
                speculative=speculative,
                grammar="" if grammar is None else grammar.key,
            )
            for number, prompt in enumerate(prompts)
        ]
        sequences = [sequence for request in self._requests for sequence in fan_out(request)]
        for index, sequence in enumerate(sequences):
            self.processors.append(
                RequestOutputProcessor(
                    sequence,
                    context.tokenizer,
                    index=index,
                    eos_token_ids=context.model.eos_token_ids,
                    shown_token_ids=shown_token_ids,
                    stop_strings=stops,
                    thinking=context.answer_form.span(thinking),
                    arrival_time=arrival.time,
                    keeps_details=not body.stream,
                )
            )
        self._by_id = {processor.request.request_id: processor for processor in self.processors}
        self._last_times = [arrival.time] * len(self.processors)
        recorder = context.recorder if arrival.is_recorded else None
        self._recorder = recorder if recorder and recorder.takes(self.request_id) else None
        self._written: list[list[int]] = [[] for _ in self.processors]
        """Token ids that came so far, where they are recorded."""

    async def __aenter__(self) -> Job:
        context, num_sequences, num_prompt_tokens = self._context, *self._size()
        context.check_capacity(num_sequences, num_prompt_tokens)
        context.check_engine(self._named_engine)
        with contextlib.ExitStack() as held:
            held.enter_context(context.grammars.loaded(self._grammar))
            self._stream = context.engine.submit(*self._requests, engine=self._named_engine)
            self._held = held.pop_all()
        context.num_sequences += num_sequences
        context.num_prompt_tokens += num_prompt_tokens
        context.lifecycle.enter(self)
        context.metrics.load.inc()
        if self._is_aborted:
            self.abort()
        if self._is_gone:
            self.hang_up()
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        context, num_sequences, num_prompt_tokens = self._context, *self._size()
        context.num_sequences -= num_sequences
        context.num_prompt_tokens -= num_prompt_tokens
        context.lifecycle.leave(self)
        context.metrics.load.dec()
        if self._stream is not None:
            await self._stream.aclose()
        self._held.close()
        if isinstance(error, RequestError) and not any(one.finished for one in self.processors):
            return  # the engine refused the request, so none of it ran
        reason = "error" if isinstance(error, EngineError) else "abort"
        for processor in self.processors:
            if not processor.finished:
                context.metrics.success.labels(self._engine_of(processor), reason).inc()

    @contextlib.contextmanager
    def shares(self) -> Iterator[None]:
        """Holds the request's parts of the server's budgets until its answer is written.

        Raises:
            RequestError: it alone exceeds one.
            ApiError: 503, others have taken too much.
        """
        context, sampling = self._context, self.sampling
        with context.logprobs.share() as take, context.allowed_ids.share() as take_ids:
            take(self._num_logprobs())
            take_ids(len(self.processors) * len(sampling.allowed_token_ids or ()))
            yield

    def _num_logprobs(self) -> int:
        """Entries of the prompts' and the answers' log-probabilities, at most."""
        sampling, room = self.sampling, self._context.engine.info.max_model_len
        per_prompt, per_output = (
            0 if num is None else sampling.n * (1 + num)
            for num in (sampling.prompt_logprobs, sampling.logprobs)
        )
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        most = [min(sampling.max_tokens, room - length) for length in lengths]
        return sum(lengths) * per_prompt + sum(most) * per_output

    def _size(self) -> tuple[int, int]:
        """Sequences and prompt tokens; a prompt counts once, however often it is completed."""
        return len(self.processors), sum(len(prompt.token_ids) for prompt in self.prompts)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that a choice completes."""
        return self.prompts[index // self.sampling.n]

    def abort(self) -> None:
        """Ends every sequence within a step; their last outputs say "abort"."""
        self._is_aborted = True
        if self._stream is not None:
            self._context.engine.abort(*self._stream.open_ids)

    def hang_up(self) -> None:
        """The client is gone: ends every sequence, and waits for no last output."""
        self._is_gone = True
        if self._stream is not None:
            self._stream.end(ApiError(400, "The client went away."))

    async def outputs(self) -> AsyncIterator[tuple[RequestOutputProcessor, OutputDelta]]:
        """What the sequences add, in order of arrival, until all have ended.

        Raises:
            RequestError: the engine cannot serve the request, or cannot go on with it.
            EngineError: the engine failed on it, or is gone.
        """
        if self._stream is None:
            return
        num_open = len(self.processors)
        async for output in self._stream:
            processor = self._by_id[output.request_id]
            if processor.finished:
                continue  # by a stop string, before the engine knew
            delta = processor.process(output)
            self._observe(processor, delta)
            if delta.finish_reason == "error":
                message = delta.error or "unknown"
                if output.is_refused:
                    code = "no_token_left" if self._grammar is None else "grammar_failed"
                    raise RequestError(message, code=code)
                raise EngineError(message)
            if delta.abort:
                self._context.engine.abort(output.request_id)
            yield processor, delta
            num_open -= delta.finished
            if num_open == 0:
                return

    def speculation(self) -> SpecDecodeStats | None:
        """The speculation of all sequences that have ended, together; None: nobody counted."""
        parts = [processor.metrics().spec_decode for processor in self.processors]
        known = [part for part in parts if part is not None]
        return total_speculation(known) if known else None

    def first_token_s(self) -> float | None:
        """Seconds from arrival to the first token of any sequence; None: there is none yet."""
        times = [processor.metrics().first_token_time for processor in self.processors]
        return min((t - self.arrival_time for t in times if t is not None), default=None)

    def drafter_version(self) -> int:
        """Of the head that drafts now where the first sequence ran; 1: the first."""
        state = self._context.engine.all[self._engine_of(self.processors[0])].drafter
        return 1 if state is None else state.version

    def _engine_of(self, processor: RequestOutputProcessor) -> int:
        """The number of the engine that runs a sequence."""
        sources = {} if self._stream is None else self._stream.sources
        return sources.get(processor.request.request_id, 0)

    def _observe(self, processor: RequestOutputProcessor, delta: OutputDelta) -> None:
        index = processor.index
        metrics, now, last = self._context.metrics, time.monotonic(), self._last_times[index]
        engine = self._engine_of(processor)
        num_new, num_out = len(delta.token_ids), processor.num_output_tokens
        self._record(processor, delta)
        if num_new:
            self._last_times[index] = now
            metrics.received_tokens[engine].inc(num_new)
            if num_new == num_out:
                metrics.time_to_first_token.observe(now - self.arrival_time, 1, engine)
            else:
                metrics.inter_token_latency.observe((now - last) / num_new, num_new, engine)
        if delta.finish_reason is not None:
            metrics.success.labels(engine, delta.finish_reason).inc()
            metrics.e2e_latency.observe(now - self.arrival_time, 1, engine)
            metrics.prompt_tokens.observe(len(processor.request.prompt_token_ids), 1, engine)
            metrics.generation_tokens.observe(num_out, 1, engine)
            first = processor.metrics().first_token_time
            if first is not None and num_out > 1:
                metrics.time_per_output_token.observe((now - first) / (num_out - 1), 1, engine)

    def _record(self, processor: RequestOutputProcessor, delta: OutputDelta) -> None:
        """Keeps a text that has come to its end, where texts are kept."""
        if self._recorder is None:
            return
        written = self._written[processor.index]
        written += delta.token_ids
        if delta.finish_reason not in ("stop", "length"):
            return
        request, metrics = processor.request, self._context.metrics
        prompt = request.prompt_token_ids
        if self._recorder.offer([*prompt, *written], len(prompt), request.sampling.temperature):
            metrics.captured_tokens.inc(len(prompt) + len(written))
        else:
            metrics.capture_dropped.inc()


def job_size(prompts: Sequence[Prompt], sampling: SamplingParams) -> int:
    """How much work it is to make a job, in characters (see `TextPool.run`)."""
    texts = [*sampling.bad_words, *sampling.stop]
    num_ids = len(sampling.allowed_token_ids or ()) + sum(len(one.token_ids) for one in prompts)
    return SEQUENCE_CHARS * sampling.n * len(prompts) + num_ids + 16 * sum(map(len, texts))


def sampling_params(
    context: ServerContext,
    body: GenerationFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The fields of a request that have their parameter's name, over the model's own advice.

    Raises:
        RequestError: naming the field.
    """
    takes_advice = context.config.generation_config == "auto"
    fields: dict[str, object] = dict(context.model.sampling.given() if takes_advice else {})
    for name in SamplingParams.__struct_fields__:
        value = body.__dict__.get(name)
        if value is not None and name != "structured_outputs":  # becomes a grammar
            fields[name] = list(dict.fromkeys(value)) if name.endswith("token_ids") else value
    fields |= {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logprobs_mode": (body.logprobs_mode or "raw").removesuffix("_logprobs"),
        "logit_bias": _logit_bias(body.logit_bias or {}),
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
    }
    sampling = msgspec.convert(fields, SamplingParams)
    sampling.check(context.engine.info.vocab_size)
    return sampling


def room_for_output(context: ServerContext, num_prompt_tokens: int, param: str) -> int:
    """Tokens that may follow a prompt, which came in the field `param`.

    Raises:
        RequestError: the prompt is empty or fills the context.
    """
    info = context.engine.info
    if num_prompt_tokens == 0:
        raise RequestError("The prompt is empty.", param)
    if num_prompt_tokens >= info.max_model_len:
        # OpenAI's words: clients such as LiteLLM know by them that a shorter prompt would do.
        raise RequestError(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your "
            f"{param} resulted in {num_prompt_tokens} tokens, and the answer needs room too.",
            param,
            "context_length_exceeded",
        )
    return info.max_model_len - num_prompt_tokens


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int, param: str) -> None:
    """Refuses a text that is too long for the context by its length alone, without encoding it.

    Raises:
        RequestError: with the fewest tokens that it can have.
    """
    if len(text) < MIN_CHECKED_CHARS:
        return
    num_tokens = tokenizer.min_num_tokens(text)
    if num_tokens >= max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
            f"of {len(text)} characters resulted in {num_tokens} tokens at least, and the answer "
            "needs room too.",
            param,
            "context_length_exceeded",
        )


def truncated(token_ids: list[int], limit: int | None, max_model_len: int) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` leaves."""
    if limit is None:
        return token_ids
    keep = max_model_len - 1 if limit == -1 else limit
    return token_ids[max(0, len(token_ids) - keep) :]


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise RequestError("logit_bias: every key must be a token id", "logit_bias")
        if int(key) in result:
            raise RequestError(f"logit_bias: token id {int(key)} is given twice", "logit_bias")
        result[int(key)] = bias
    return result


def _speculative(context: ServerContext, given: SpeculativeField | None) -> SpeculativeOptions:
    if given is None:
        return SpeculativeOptions()
    method = context.engine.info.method
    if given.method not in (None, "none", method):
        raise RequestError(
            f"speculative.method: this server runs {method!r}; a request can ask for that or "
            "'none'.",
            "speculative",
        )
    enabled = (
        given.enabled is not False and given.method != "none" and given.num_speculative_tokens != 0
    )
    return SpeculativeOptions(
        enabled=enabled,
        num_speculative_tokens=given.num_speculative_tokens or None,
        detailed=bool(given.detailed),
    )
