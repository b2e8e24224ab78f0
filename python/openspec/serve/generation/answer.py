"""What answers of all kinds share: whole or streamed, usage, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openspec.grammar.compiler import CompiledGrammar
from openspec.messages import acceptance_rate, mean_acceptance_length
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.job import SEQUENCE_CHARS, Job, Prompt
from openspec.serve.shapes.chat import GenerationFields
from openspec.serve.shapes.wire import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    ChatChunk,
    ChatCompletion,
    Completion,
    RequestMetrics,
    SpeculationMetrics,
    Usage,
    error_bytes,
    event,
    json_response,
    send_body,
    to_api_error,
)
from openspec.text.outputs import (
    OutputDelta,
    RequestOutputProcessor,
)
from openspec.text.pool import MAX_INLINE_CHARS

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Completion | ChatCompletion | ChatChunk)

KEEP_ALIVE_S = 15.0
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(ABC):
    """Builds the answer of one request, whole or as events."""

    stream_end = DONE
    """What follows the last event of a stream."""
    num_echo_bytes = 0
    """What the answer, and each end of a stream, repeats of the request."""

    def __init__(self, context: ServerContext, body: GenerationFields, job: Job) -> None:
        self.context = context
        self.job = job
        self.created = int(time.time())
        self.body = body

    @abstractmethod
    def full(self) -> Response:
        """The answer of a job that has ended."""

    def begin(self) -> bytes:
        """Events before the first output."""
        return b""

    @abstractmethod
    def events_of(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool, is_last: bool
    ) -> bytes:
        """The events that one output of the engine adds.

        `is_first`: the output is the first of its choice; `is_last`: it is the last of all.
        """

    def end(self) -> bytes:
        """Events after the last output."""
        return b""

    def on_error(self, error: Exception) -> bytes:
        """The last event of a stream that breaks."""
        return b"data: " + error_bytes(to_api_error(error)) + b"\n\n"

    def usage(self) -> Usage:
        """Token counts so far. A prompt counts once, however many completions it has."""
        job = self.job
        num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
        num_output = sum(processor.num_output_tokens for processor in job.processors)
        num_cached = sum(p.num_cached_tokens for p in job.processors[:: job.sampling.n])
        details = {"cached_tokens": num_cached}
        return Usage(num_prompt, num_output, num_prompt + num_output, details)

    async def respond(self, request: Request) -> Response:
        """Runs the job and answers, streamed if the request asks for it."""
        job = self.job
        if self.body.stream:
            return EventStream(self._events(), job.hang_up, self.on_error, self.stream_end)
        with self._shares():
            async with watch_connection(request.receive, job.hang_up), job:
                async for _ in job.outputs():
                    pass
            return await self.context.text_pool.run(self._size(), self.full)

    @contextlib.contextmanager
    def _shares(self) -> Iterator[None]:
        """Holds what the answer takes of the server's budgets; raises as `Job.shares`."""
        with self.job.shares(), self.context.echo_bytes.share() as take:
            take(self.num_echo_bytes)
            yield

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The events of a job that runs while they are read."""
        num_open = len(self.job.processors)
        started = [False] * num_open
        with self._shares():
            async with self.job:
                begin = await self.context.text_pool.run(self.num_echo_bytes, self.begin)
                async for processor, delta in self.job.outputs():
                    index = processor.index
                    is_first, started[index] = not started[index], True
                    num_open -= delta.finished
                    # With the prompt's log-probabilities a first chunk is as long as the prompt;
                    # what the engine made while a slow client read is as long as that.
                    size = self._prompt_size(self.job.prompt_of(index)) if is_first else 0
                    size += self._output_size(len(delta.token_ids))
                    if num_open == 0:
                        size += self.num_echo_bytes
                    work = partial(self.events_of, processor, delta, is_first, num_open == 0)
                    if events := begin + await self.context.text_pool.run(size, work):
                        begin = b""
                        yield events
                if events := self.end():
                    yield events

    def _size(self) -> int:
        """How much work it is to write the answer, in characters (see `TextPool.run`)."""
        num_tokens = sum(processor.num_output_tokens for processor in self.job.processors)
        num_chars = self._output_size(num_tokens) + sum(map(self._prompt_size, self.job.prompts))
        num_chars += SEQUENCE_CHARS * len(self.job.processors)
        return num_chars + self.num_echo_bytes

    def _output_size(self, num_tokens: int) -> int:
        num_logprobs = self.job.sampling.logprobs
        if self.job.is_detailed:
            num_tokens *= 16
        return num_tokens if num_logprobs is None else num_tokens * (8 + 4 * num_logprobs)

    def _prompt_size(self, prompt: Prompt) -> int:
        """How much of that is the log-probabilities of a prompt."""
        num_logprobs = self.job.sampling.prompt_logprobs
        return 0 if num_logprobs is None else len(prompt.token_ids) * (8 + 4 * num_logprobs)

    def metrics(self) -> RequestMetrics:
        """Times and speculation of a request whose sequences have ended."""
        first_s = self.job.first_token_s()
        return RequestMetrics(
            time_to_first_token_ms=None if first_s is None else round(first_s * 1000, 3),
            speculative_decoding=_speculation(self.context, self.job),
        )


class ChunkedAnswer(Answer):
    """An answer whose stream consists of chunks in the shape of the whole."""

    chunk_type: type[Completion] | type[ChatChunk]

    @abstractmethod
    def whole(self) -> Completion | ChatCompletion:
        """The finished answer, without usage and metrics."""

    @abstractmethod
    def chunks(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool
    ) -> Sequence[Completion | ChatChunk]:
        """The chunks that one output of the engine adds, perhaps none.

        `is_first`: the output is the first of its choice.
        """

    def answer_of(self, kind: type[AnswerT], choices: list[Any]) -> AnswerT:
        """The whole answer, or a chunk of it, with these choices."""
        return kind(
            id=self.job.request_id,
            created=self.created,
            model=self.context.model_name,
            choices=choices,
        )

    def full(self) -> Response:
        """The whole answer with usage and metrics."""
        answer = self.whole()
        answer.usage = self.usage()
        answer.metrics = self.metrics()
        return json_response(answer)

    def events_of(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool, is_last: bool
    ) -> bytes:
        """The chunks, the last one with the metrics where nothing follows it."""
        options = self.body.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        chunks = self.chunks(processor, delta, is_first)
        for chunk in chunks:
            if continuous or self._has_last:
                chunk.usage = self.usage() if continuous else None
        if is_last and not self._has_last:
            chunks[-1].metrics = self.metrics()
        return b"".join(map(event, chunks))

    def end(self) -> bytes:
        """The chunk with the usage, if it is asked for."""
        if not self._has_last:
            return b""
        last = self.answer_of(self.chunk_type, [])
        last.usage = self.usage()
        last.metrics = self.metrics()
        return event(last)

    @property
    def _has_last(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


@contextlib.asynccontextmanager
async def watch_connection(
    receive: Receive, on_disconnect: Callable[[], object]
) -> AsyncIterator[None]:
    """Watches the connection while the body runs."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def unless_gone(request: Request, num_bytes: int, work: Coroutine[None, None, T]) -> T:
    """The result of `work` on a body of so many bytes, dropped if the client leaves meanwhile.

    Raises:
        ApiError: 400, the client left.
    """
    if num_bytes <= MAX_INLINE_CHARS:
        return await work
    task = asyncio.ensure_future(work)
    try:
        async with watch_connection(request.receive, task.cancel):
            await asyncio.wait({task})
    finally:
        task.cancel()
    if task.cancelled():
        raise ApiError(400, "The client went away.")
    return task.result()


async def grammar_of(
    context: ServerContext, request: Request, demand: bytes | None, param: str
) -> CompiledGrammar | None:
    """The compiled grammar of a demand, if there is one; dropped if the client leaves meanwhile.

    Raises:
        RequestError: it is refused, naming `param`.
        ApiError: 400, the client left; 503, too many grammars wait, or the compile process ended.
    """
    if demand is None:
        return None
    work = context.grammars.compiled(demand, param)
    return await unless_gone(request, MAX_INLINE_CHARS + 1, work)


class EventStream(Response):
    """A stream of events that are already encoded.

    Every stream writes on its own, so one slow reader delays nobody; what the engine makes in the
    meantime is joined into its next chunk. A comment is sent in long silences. An error is a
    refusal if it comes before everything else, within KEEP_ALIVE_S, and otherwise the last event.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_disconnect: Callable[[], None],
        on_error: Callable[[Exception], bytes],
        end: bytes,
    ) -> None:
        super().__init__()
        self._events = events
        self._on_disconnect = on_disconnect
        self._on_error = on_error
        self._end = end
        self._num_sent = 0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything. The status waits for the first event, which may be a refusal."""
        async with watch_connection(receive, self._on_disconnect):
            first = asyncio.ensure_future(anext(self._events, None))
            await asyncio.wait({first}, timeout=KEEP_ALIVE_S)
            if first.done() and (error := first.exception()) is not None:
                raise error
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            keep_alive = asyncio.create_task(self._keep_alive(send))
            try:
                event = await self._or_error(first)
                while event is not None:
                    self._num_sent += 1
                    self._is_sending = True
                    await send_body(send, event, is_last=False)
                    self._is_sending = False
                    event = await self._or_error(anext(self._events, None))
            finally:
                keep_alive.cancel()
                await self._events.aclose()
            await send({"type": "http.response.body", "body": self._end, "more_body": False})

    async def _or_error(self, event: Awaitable[bytes | None]) -> bytes | None:
        try:
            return await event
        except Exception as exc:
            return self._on_error(exc)

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_sent == self._num_sent and not self._is_sending:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def _speculation(context: ServerContext, job: Job) -> SpeculationMetrics | None:
    stats = job.speculation()
    if stats is None:
        return None
    info = context.engine.info
    depth = max(info.num_speculative_tokens, len(stats.num_accepted_tokens_per_pos))
    per_pos, reached = (
        counts + [0] * (depth - len(counts))
        for counts in (stats.num_accepted_tokens_per_pos, stats.num_drafts_per_pos)
    )
    at_least = [stats.num_drafts, *per_pos, 0]
    return SpeculationMetrics(
        method=info.method,
        drafter_version=job.drafter_version(),
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_forced_tokens=stats.num_forced_tokens,
        num_accepted_forced_tokens=stats.num_accepted_forced_tokens,
        num_copied_tokens=stats.num_copied_tokens,
        num_accepted_copied_tokens=stats.num_accepted_copied_tokens,
        num_accepted_tokens_per_pos=per_pos,
        num_drafts_per_pos=reached,
        acceptance_rate=acceptance_rate(stats),
        mean_acceptance_length=mean_acceptance_length(stats),
        acceptance_histogram=[at_least[k] - at_least[k + 1] for k in range(depth + 1)],
        num_spec_steps=stats.num_drafts,
        num_steps=stats.num_steps,
        num_accepted_tokens_per_step=stats.num_accepted_tokens_per_step or UNSET,
    )
