"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve import answer_parts as parts
from openspec.serve.context import ServerContext
from openspec.serve.event_stream import EventStream, abort_on_disconnect
from openspec.serve.generation import Job, Prompt
from openspec.serve.handling import (
    answer_size,
    json_response,
    prompt_size,
    receive_request,
    stream_events,
)
from openspec.serve.request_models import MAX_SEQUENCES, CompletionRequest, refuse_unsupported
from openspec.serve.request_options import (
    check_stream_options,
    generation_options,
    room_for_output,
    truncated,
)
from openspec.serve.wire import Completion, CompletionChoice, CompletionLogprobs, event
from openspec.text.detokenizer import IncrementalDetokenizer
from openspec.text.outputs import OutputDelta, PositionLogprobs, RequestOutputProcessor


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as part of its answer."""

    text: str
    token_ids: list[int]
    offsets: list[int]


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Handles a request."""
    arrival, body = await receive_request(context, request, CompletionRequest)
    _check(body)
    num_choices = body.n or 1
    prompts = await context.text_pool.run(_size(body), lambda: _prompts(context, body))
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts times n = {num_choices} is more than {MAX_SEQUENCES}.", "n"
        )
    wants_echo_logprobs = bool(body.echo) and body.logprobs is not None
    wanted = [body.prompt_logprobs, body.logprobs if wants_echo_logprobs else None]
    options = generation_options(
        context,
        body,
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((num for num in wanted if num is not None), default=None),
    )
    job = Job(
        context, f"cmpl-{arrival.unique}", arrival.external_id, prompts, options, arrival.time
    )
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    answer = await context.text_pool.run(num_prompt_tokens, lambda: _Answer(context, body, job))
    if body.stream:
        return EventStream(stream_events(job, answer.events()), job.abort)
    async with abort_on_disconnect(request.receive, job.abort), job:
        await job.run()
    return await context.text_pool.run(answer_size(job), lambda: json_response(answer.full()))


class _Answer:
    """Builds the answer of one request, whole or in pieces."""

    def __init__(self, context: ServerContext, body: CompletionRequest, job: Job) -> None:
        self._context = context
        self._body = body
        self._job = job
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._created = int(time.time())
        self._echoes: list[_Echo] = []
        if body.echo:
            has_offsets = body.logprobs is not None
            self._echoes = [_echo(context, prompt, has_offsets) for prompt in job.prompts]

    def full(self) -> Completion:
        """The whole answer."""
        answer = self._completion([self._full_choice(p) for p in self._job.processors])
        answer.usage = parts.usage_of(self._job)
        answer.metrics = parts.metrics_of(self._context, self._job)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in chunks, one for each output of the engine."""
        options = self._body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        num_open = len(self._job.processors)
        started = [False] * num_open
        async for processor, delta in self._job.outputs():
            is_first = not started[processor.index]
            if not (is_first or delta.token_ids or delta.text or delta.finished):
                continue
            started[processor.index] = True
            # With the prompt's log-probabilities a first chunk is as long as the prompt.
            prompt = self._job.prompt_of(processor.index)
            size = prompt_size(self._job, prompt) if is_first else 0
            choice = await self._context.text_pool.run(
                size, partial(self._choice, processor, delta, with_prompt=is_first)
            )
            chunk = self._completion([choice])
            if continuous:
                chunk.usage = parts.usage_of(self._job)
            elif include_usage:
                chunk.usage = None
            if delta.finished:
                num_open -= 1
                if num_open == 0 and not include_usage:
                    chunk.metrics = parts.metrics_of(self._context, self._job)
            yield await self._context.text_pool.run(size, partial(event, chunk))
        if include_usage:
            last = self._completion([])
            last.usage = parts.usage_of(self._job)
            last.metrics = parts.metrics_of(self._context, self._job)
            yield event(last)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._job.request_id,
            created=self._created,
            model=self._context.model_name,
            choices=choices,
        )

    def _full_choice(self, processor: RequestOutputProcessor) -> CompletionChoice:
        output = processor.output()
        return self._choice(
            processor,
            OutputDelta(
                text=output.text,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                text_offsets=output.text_offsets,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
            ),
            with_prompt=True,
        )

    def _choice(
        self, processor: RequestOutputProcessor, delta: OutputDelta, with_prompt: bool
    ) -> CompletionChoice:
        body, index = self._body, processor.index
        echo = self._echoes[index // self._job.sampling.n] if self._echoes else None
        shown_echo = echo if with_prompt else None
        choice = CompletionChoice(
            index=index,
            text=shown_echo.text + delta.text if shown_echo else delta.text,
            logprobs=None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if body.logprobs is not None:
            choice.logprobs = self._logprobs(processor, delta, echo, with_prompt)
        if body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            if with_prompt:
                choice.prompt_token_ids = self._job.prompt_of(index).token_ids
        if with_prompt and body.prompt_logprobs is not None:
            choice.prompt_logprobs = parts.prompt_logprobs(
                self._prompt_positions(index), body.prompt_logprobs
            )
        return choice

    def _logprobs(
        self,
        processor: RequestOutputProcessor,
        delta: OutputDelta,
        echo: _Echo | None,
        with_prompt: bool,
    ) -> CompletionLogprobs:
        token_ids, offsets = list(delta.token_ids), list(delta.text_offsets)
        positions: list[PositionLogprobs | None] = list(delta.logprobs or ())
        if echo is not None:
            offsets = [len(echo.text) + offset for offset in offsets]
            if with_prompt:
                token_ids = echo.token_ids + token_ids
                offsets = echo.offsets + offsets
                positions = [*(self._prompt_positions(processor.index) or ()), *positions]
        return parts.completion_logprobs(
            self._context.tokenizer,
            token_ids,
            positions,
            offsets,
            self._body.logprobs or 0,
            self._as_ids,
        )

    def _prompt_positions(self, index: int) -> list[PositionLogprobs | None] | None:
        # Asked of the first of the n completions only, for all of them.
        num_choices = self._job.sampling.n
        return self._job.processors[index // num_choices * num_choices].prompt_logprobs


def _check(body: CompletionRequest) -> None:
    refuse_unsupported(body)
    check_stream_options(body)
    if body.suffix:
        raise RequestError("suffix is not supported.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is supported only where it equals n.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1, or echo true.", "max_tokens")
    wants_prompt = body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
    if body.stream and wants_prompt and (body.n or 1) > 1:
        raise RequestError(
            "Log-probabilities of the prompt cannot be streamed together with n > 1.", "n"
        )


def _size(body: CompletionRequest) -> int:
    prompt = body.prompt
    return sum(len(p) if isinstance(p, (str, list)) else 1 for p in prompt)


def _prompts(context: ServerContext, body: CompletionRequest) -> list[Prompt]:
    """The prompts as token ids; runs in a thread when they are long."""
    given: Sequence[str | int | list[int]] = (
        [body.prompt] if isinstance(body.prompt, str) else body.prompt
    )
    if isinstance(given[0], int):
        given = [[token_id for token_id in given if isinstance(token_id, int)]]
    prompts = []
    for one in given:
        if isinstance(one, str):
            token_ids = context.tokenizer.encode(
                one,
                parse_special=True,
                add_special_tokens=body.add_special_tokens is not False,
            )
        elif isinstance(one, list):
            token_ids = one
            context.tokenizer.check_token_ids(one)
        else:
            raise RequestError("prompt mixes token ids with something else", "prompt")
        cut = truncated(token_ids, body.truncate_prompt_tokens, context.engine.info.max_model_len)
        room_for_output(context, len(cut), "prompt")
        text = one if isinstance(one, str) and len(cut) == len(token_ids) else None
        prompts.append(Prompt(cut, text))
    return prompts


def _echo(context: ServerContext, prompt: Prompt, has_offsets: bool) -> _Echo:
    """The prompt as it was sent; but as its tokens spell it where offsets point into it."""
    detokenizer = IncrementalDetokenizer(context.tokenizer, skip_special_tokens=False)
    pieces: list[str] = []
    offsets: list[int] = []
    offset = 0
    for token_id in prompt.token_ids:
        offsets.append(offset)
        pieces.append(detokenizer.append(token_id))
        offset += len(pieces[-1])
    pieces.append(detokenizer.finish())
    text = "".join(pieces) if prompt.text is None or has_offsets else prompt.text
    return _Echo(text, prompt.token_ids, offsets)
