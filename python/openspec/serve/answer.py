"""What answers of both kinds share: whole or streamed, usage, metrics, log-probabilities."""

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
    Sequence,
)
from functools import partial
from typing import TypeVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openspec.messages import acceptance_rate, mean_acceptance_length
from openspec.serve.api import GenerationFields
from openspec.serve.context import ServerContext
from openspec.serve.job import Job, Prompt
from openspec.serve.wire import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    RequestMetrics,
    SpeculationMetrics,
    TokenLogprob,
    Usage,
    error_bytes,
    event,
    json_response,
    to_api_error,
)
from openspec.text.outputs import (
    Logprob,
    OutputDelta,
    PositionLogprobs,
    RequestOutputProcessor,
    top_logprobs,
)
from openspec.text.pool import MAX_INLINE_CHARS
from openspec.text.tokenizer import Tokenizer

T = TypeVar("T")

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""
KEEP_ALIVE_S = 15.0
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(ABC):
    """Builds the answer of one request, whole or in chunks."""

    def __init__(self, context: ServerContext, body: GenerationFields, job: Job) -> None:
        self.context = context
        self.job = job
        self.created = int(time.time())
        self._body = body

    @abstractmethod
    def whole(self) -> Completion | ChatCompletion:
        """The finished answer, without usage and metrics."""

    @abstractmethod
    def chunks(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool
    ) -> Sequence[Completion | ChatChunk]:
        """What one output of the engine adds, perhaps nothing; `is_first` of its choice."""

    @abstractmethod
    def last_chunk(self) -> Completion | ChatChunk:
        """The chunk without choices that carries the usage."""

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
        if self._body.stream:
            return EventStream(self._events(), job.hang_up)
        with job.shares():
            async with watch_connection(request.receive, job.hang_up), job:
                await job.run()
            return await self.context.text_pool.run(self._size(), self._full)

    def _full(self) -> Response:
        answer = self.whole()
        answer.usage = self.usage()
        answer.metrics = self._metrics()
        return json_response(answer)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """The chunks of a job that runs while they are read."""
        options = self._body.stream_options
        has_last = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        num_open = len(self.job.processors)
        started = [False] * num_open

        def events_of(processor: RequestOutputProcessor, delta: OutputDelta, first: bool) -> bytes:
            chunks = self.chunks(processor, delta, first)
            for chunk in chunks:
                if continuous or has_last:
                    chunk.usage = self.usage() if continuous else None
            if num_open == 0 and not has_last:
                chunks[-1].metrics = self._metrics()
            return b"".join(map(event, chunks))

        with self.job.shares():
            async with self.job:
                async for processor, delta in self.job.outputs():
                    index = processor.index
                    is_first, started[index] = not started[index], True
                    num_open -= delta.finished
                    # With the prompt's log-probabilities a first chunk is as long as the prompt;
                    # what the engine made while a slow client read is as long as that.
                    size = self._prompt_size(self.job.prompt_of(index)) if is_first else 0
                    size += self._output_size(len(delta.token_ids))
                    work = partial(events_of, processor, delta, is_first)
                    if events := await self.context.text_pool.run(size, work):
                        yield events
                if has_last:
                    last = self.last_chunk()
                    last.usage = self.usage()
                    last.metrics = self._metrics()
                    yield event(last)

    def _size(self) -> int:
        """How much work it is to write the answer, in characters (see `TextPool.run`)."""
        num_tokens = sum(processor.num_output_tokens for processor in self.job.processors)
        return self._output_size(num_tokens) + sum(map(self._prompt_size, self.job.prompts))

    def _output_size(self, num_tokens: int) -> int:
        num_logprobs = self.job.sampling.logprobs
        return num_tokens if num_logprobs is None else num_tokens * (8 + 4 * num_logprobs)

    def _prompt_size(self, prompt: Prompt) -> int:
        """How much of that is the log-probabilities of a prompt."""
        num_logprobs = self.job.sampling.prompt_logprobs
        return 0 if num_logprobs is None else len(prompt.token_ids) * (8 + 4 * num_logprobs)

    def _metrics(self) -> RequestMetrics:
        """Times and speculation of a request whose sequences have ended."""
        first_s = self.job.first_token_s()
        return RequestMetrics(
            time_to_first_token_ms=None if first_s is None else round(first_s * 1000, 3),
            speculative_decoding=_speculation(self.context, self.job),
        )


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


async def _or_error(event: Awaitable[bytes | None]) -> bytes | None:
    try:
        return await event
    except Exception as exc:
        return b"data: " + error_bytes(to_api_error(exc)) + b"\n\n"


class EventStream(Response):
    """A stream of events that are already encoded; ends with `[DONE]`.

    Every stream writes on its own, so one slow reader delays nobody; what the engine makes in the
    meantime is joined into its next chunk. A comment is sent in long silences. An error is a
    refusal if it comes before everything else, within KEEP_ALIVE_S, and otherwise the last event.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_disconnect: Callable[[], None]
    ) -> None:
        super().__init__()
        self._events = events
        self._on_disconnect = on_disconnect
        self._num_sent = 0

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
                event = await _or_error(first)
                while event is not None:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    event = await _or_error(anext(self._events, None))
            finally:
                keep_alive.cancel()
                await self._events.aclose()
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def _speculation(context: ServerContext, job: Job) -> SpeculationMetrics | None:
    stats = job.speculation() if context.config.speculative_stats else None
    if stats is None:
        return None
    info = context.engine.info
    depth = max(info.num_speculative_tokens, len(stats.num_accepted_tokens_per_pos))
    per_pos = list(stats.num_accepted_tokens_per_pos)
    per_pos += [0] * (depth - len(per_pos))
    at_least = [stats.num_drafts, *per_pos, 0]
    return SpeculationMetrics(
        method=info.method,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=per_pos,
        acceptance_rate=acceptance_rate(stats),
        mean_acceptance_length=mean_acceptance_length(stats),
        acceptance_histogram=[at_least[k] - at_least[k + 1] for k in range(depth + 1)],
        num_spec_steps=stats.num_drafts,
        num_steps=stats.num_steps,
        num_accepted_tokens_per_step=stats.num_accepted_tokens_per_step or UNSET,
    )


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)


def token_name(token_id: int, data: bytes, as_id: bool) -> str:
    """A token as text that no other token has: bytes that are no text are spelt out."""
    if as_id or not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    num_top: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """In the form of /v1/completions; `num_top` candidates beside the token itself.

    The token is in its own candidates, with the very same float.
    """
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        names.append(token_name(token_id, tokenizer.token_bytes(token_id), as_ids))
        if position is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(finite(position[token_id].logprob))
        candidates = {names[-1]: finite(position[token_id].logprob)}
        for other, entry in top_logprobs(position, num_top):
            name = token_name(other, entry.token_bytes, as_ids)
            if other != token_id and name in candidates:
                name = f"token_id:{other}"
            candidates[name] = finite(entry.logprob)
        tops.append(candidates)
    return CompletionLogprobs(
        text_offset=list(offsets), token_logprobs=values, tokens=names, top_logprobs=tops
    )


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int, as_ids: bool
) -> ChatLogprobs:
    """In the form of /v1/chat/completions."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        token = _token_logprob(token_id, position[token_id], as_ids)
        tops = top_logprobs(position, num_top)
        token.top_logprobs = [_token_logprob(other, entry, as_ids) for other, entry in tops]
        content.append(token)
    return ChatLogprobs(content)


def _token_logprob(token_id: int, entry: Logprob, as_id: bool) -> TokenLogprob:
    shown = f"token_id:{token_id}" if as_id else entry.decoded_token
    return TokenLogprob(shown, finite(entry.logprob), list(entry.token_bytes))


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, num_top: int
) -> PromptLogprobs | None:
    """VLLM's `prompt_logprobs`: for each prompt token its candidates by id; None for the first."""
    if positions is None:
        return None
    result: PromptLogprobs = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        token_id = next(iter(position))
        chosen = {token_id: position[token_id]} | dict(top_logprobs(position, num_top))
        result.append(
            {
                str(other): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
                for other, entry in chosen.items()
            }
        )
    return result
