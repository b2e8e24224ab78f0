"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.generation.answer import ChunkedAnswer, grammar_of, unless_gone
from openspec.serve.generation.body import received_request
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.job import (
    Job,
    Prompt,
    check_length,
    job_size,
    room_for_output,
    sampling_params,
    truncated,
)
from openspec.serve.generation.structured import encoded_completion_demand
from openspec.serve.shapes.chat import MAX_SEQUENCES, CompletionRequest
from openspec.serve.shapes.logprobs import completion_logprobs, prompt_logprobs
from openspec.serve.shapes.steps import shown_steps
from openspec.serve.shapes.wire import Completion, CompletionChoice, CompletionLogprobs
from openspec.text.chat_template import Segment
from openspec.text.detokenizer import IncrementalDetokenizer
from openspec.text.logprobs import PositionLogprobs
from openspec.text.outputs import (
    CompletionOutput,
    OutputDelta,
    RequestOutputProcessor,
)


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as part of its answer."""

    text: str
    token_ids: list[int]
    offsets: list[int]


async def create_completion(context: ServerContext, request: Request) -> Response:
    """Completes prompts."""
    async with received_request(context, request, CompletionRequest) as (arrival, body):
        _check(body)
        num_choices = body.n or 1
        prompts = await unless_gone(
            request, arrival.num_bytes, _prompts(context, body, arrival.num_bytes)
        )
        if len(prompts) * num_choices > MAX_SEQUENCES:
            raise RequestError(
                f"{len(prompts)} prompts times n = {num_choices} is more than {MAX_SEQUENCES}.", "n"
            )
        wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
        most_logprobs = max((num for num in wanted if num is not None), default=None)
        sampling = await context.text_pool.run(
            arrival.num_bytes,
            lambda: sampling_params(
                context,
                body,
                max_tokens=16 if body.max_tokens is None else body.max_tokens,
                logprobs=body.logprobs,
                prompt_logprobs=most_logprobs,
            ),
        )
        demand, name = await context.text_pool.run(
            arrival.num_bytes, lambda: encoded_completion_demand(body, body.response_format)
        )
    grammar = await grammar_of(context, request, demand, name)
    answer = await context.text_pool.run(
        job_size(prompts, sampling),
        lambda: _Answer(
            context, body, Job(context, "cmpl", arrival, prompts, body, sampling, (), grammar)
        ),
    )
    return await answer.respond(request)


class _Answer(ChunkedAnswer):
    """Builds the answer of one request."""

    chunk_type = Completion

    def __init__(self, context: ServerContext, body: CompletionRequest, job: Job) -> None:
        super().__init__(context, body, job)
        self._request = body
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._echoes: list[_Echo] = []
        if body.echo:
            has_offsets = body.logprobs is not None
            self._echoes = [_echo(context, prompt, has_offsets) for prompt in job.prompts]

    def whole(self) -> Completion:
        """All choices."""
        choices = [self._choice(one, one.output(), True) for one in self.job.processors]
        return self.answer_of(Completion, choices)

    def chunks(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool
    ) -> list[Completion]:
        """One choice, if there is anything to say."""
        if not (is_first or delta.token_ids or delta.text or delta.finished):
            return []
        return [self.answer_of(Completion, [self._choice(processor, delta, is_first)])]

    def _choice(
        self,
        processor: RequestOutputProcessor,
        delta: OutputDelta | CompletionOutput,
        with_prompt: bool,
    ) -> CompletionChoice:
        body, index = self._request, processor.index
        echo = self._echoes[index // self.job.sampling.n] if self._echoes else None
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
        choice.steps = shown_steps(self.context.tokenizer, delta.steps, delta.token_texts)
        if body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            if with_prompt:
                choice.prompt_token_ids = self.job.prompt_of(index).token_ids
        if with_prompt and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                self._prompt_positions(index), body.prompt_logprobs
            )
        return choice

    def _logprobs(
        self,
        processor: RequestOutputProcessor,
        delta: OutputDelta | CompletionOutput,
        echo: _Echo | None,
        with_prompt: bool,
    ) -> CompletionLogprobs:
        token_ids, offsets = list(delta.token_ids), list(delta.text_offsets)
        prompt_positions: Sequence[PositionLogprobs | None] = ()
        if echo is not None:
            offsets = [len(echo.text) + offset for offset in offsets]
            if with_prompt:
                token_ids = echo.token_ids + token_ids
                offsets = echo.offsets + offsets
                # There are none where the request was aborted before its prompt was computed.
                known = self._prompt_positions(processor.index)
                prompt_positions = known or [None] * len(echo.token_ids)
        return completion_logprobs(
            self.context.tokenizer,
            token_ids,
            lambda: chain(prompt_positions, delta.logprobs or ()),
            offsets,
            self._request.logprobs or 0,
            self._as_ids,
        )

    def _prompt_positions(self, index: int) -> Sequence[PositionLogprobs | None] | None:
        # Asked of the first of the n completions only, for all of them.
        num_choices = self.job.sampling.n
        return self.job.processors[index // num_choices * num_choices].prompt_logprobs


def _check(body: CompletionRequest) -> None:
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


async def _prompts(context: ServerContext, body: CompletionRequest, num_bytes: int) -> list[Prompt]:
    """The prompts of a body of so many bytes as token ids."""
    pool, tokenizer = context.text_pool, context.tokenizer
    max_model_len, limit = context.engine.info.max_model_len, body.truncate_prompt_tokens

    def listed() -> list[str | list[int]]:
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        ids = [one for one in given if isinstance(one, int)]
        return [ids] if ids else [one for one in given if not isinstance(one, int)]

    def segments(one: str) -> list[Segment]:
        if limit is None:
            check_length(tokenizer, one, max_model_len, "prompt")
        return tokenizer.segments(one)

    def cut_to_fit(one: str | list[int], token_ids: list[int]) -> Prompt:
        cut = truncated(token_ids, limit, max_model_len)
        room_for_output(context, len(cut), "prompt")
        if isinstance(one, list):
            tokenizer.check_token_ids(one)
        text = one if isinstance(one, str) and len(cut) == len(token_ids) else None
        return Prompt(cut, text)

    given = await pool.run(num_bytes, listed)
    texts = [one for one in given if isinstance(one, str)]
    lists = [one for one in given if isinstance(one, list)]
    if texts:
        lists = await pool.encode(
            await pool.run(num_bytes, lambda: [segments(text) for text in texts])
        )
        if body.add_special_tokens is not False:
            lists = [tokenizer.with_surroundings(token_ids) for token_ids in lists]
    return await pool.run(num_bytes, lambda: list(map(cut_to_fit, given, lists)))


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
