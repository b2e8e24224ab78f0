"""POST /v1/chat/completions: messages to a prompt through the model's template, and the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.generation.answer import ChunkedAnswer
from openspec.serve.generation.body import received_request
from openspec.serve.generation.chat_prompt import ChatJob, chat_job
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.structured import chosen_tools
from openspec.serve.shapes import wire
from openspec.serve.shapes.chat import ChatCompletionRequest
from openspec.serve.shapes.logprobs import chat_logprobs, prompt_logprobs
from openspec.serve.shapes.steps import shown_steps
from openspec.text.logprobs import PositionLogprobs
from openspec.text.outputs import OutputDelta, RequestOutputProcessor
from openspec.text.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Answers a conversation."""
    async with received_request(context, request, ChatCompletionRequest) as (arrival, body):
        _check(body)
        limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
        chat = await chat_job(
            context,
            request,
            arrival,
            body,
            body,
            kind="chatcmpl",
            limit=min(limits, default=None),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
    return await _Answer(context, body, chat).respond(request)


class _Answer(ChunkedAnswer):
    """Builds the answer of one request."""

    chunk_type = wire.ChatChunk

    def __init__(self, context: ServerContext, body: ChatCompletionRequest, chat: ChatJob) -> None:
        super().__init__(context, body, chat.job)
        self._request = body
        excludes = body.reasoning is not None and body.reasoning.exclude
        self._shows_reasoning = body.include_reasoning is not False and not excludes
        field = context.config.reasoning_field
        names = ("reasoning_content", "reasoning")
        self._reasoning_fields = names if field == "both" else (field,)
        self._parsers = [chat.parser(context) for _ in chat.job.processors]
        self._num_chars = [0] * len(self._parsers)

    def whole(self) -> wire.ChatCompletion:
        """All choices."""
        choices = [self._full_choice(processor) for processor in self.job.processors]
        answer = self.answer_of(wire.ChatCompletion, choices)
        self._add_prompt(answer)
        return answer

    def chunks(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool
    ) -> list[wire.ChatChunk]:
        """A role where a choice begins, and what the output adds to it."""
        chunks = []
        if is_first:
            opening = wire.ChatDelta(role="assistant", content="")
            first = wire.ChatChunkChoice(processor.index, opening, None, None)
            chunks.append(self.answer_of(wire.ChatChunk, [first]))
            if processor.index == 0:
                self._add_prompt(chunks[0])
        for part in self._parts(processor.index, delta):
            for choice in self._chunk_choices(processor, part):
                chunks.append(self.answer_of(wire.ChatChunk, [choice]))
        return chunks

    def _parts(self, index: int, delta: OutputDelta) -> Iterator[OutputDelta]:
        """An output as its chunks carry it: with logprobs, token by token.

        Clients take a chunk's text from its logprobs, where tokens of thinking, of tags and the
        last one would stand between those of the content.
        """
        past, num_chars, begin = self._num_chars[index], len(delta.text), 0
        self._num_chars[index] += num_chars
        if delta.logprobs is None or len(delta.token_ids) < 2:
            yield delta
            return
        for place, following in enumerate([*delta.text_offsets[1:], None]):
            end = num_chars if following is None else min(max(begin, following - past), num_chars)
            yield dataclasses.replace(
                OutputDelta() if following is not None else delta,
                text=delta.text[begin:end],
                token_ids=delta.token_ids[place : place + 1],
                logprobs=delta.logprobs[place : place + 1],
            )
            begin = end

    def usage(self) -> wire.Usage:
        """Tokens of prompt and answer, with those of thinking."""
        usage = super().usage()
        num_reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers)
        usage.completion_tokens_details = {"reasoning_tokens": num_reasoning}
        return usage

    def _add_prompt(self, answer: wire.ChatCompletion | wire.ChatChunk) -> None:
        if self._request.return_token_ids:
            answer.prompt_token_ids = self.job.prompts[0].token_ids
        if self._request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self.job.processors[0].prompt_logprobs, self._request.prompt_logprobs
            )

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs] | None
    ) -> wire.ChatLogprobs | None:
        if positions is None:
            return None
        request = self._request
        as_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(token_ids, positions, request.top_logprobs or 0, as_ids)

    def _full_choice(self, processor: RequestOutputProcessor) -> wire.ChatChoice:
        output, parser = processor.output(), self._parsers[processor.index]
        delta = _delta(
            parser.push(
                output.text, output.token_ids, True, output.finish_reason, output.stop_reason
            )
        )
        reasoning = delta.reasoning or None if self._shows_reasoning else None
        message = wire.AssistantMessage(
            content=delta.content if delta.content or not delta.calls else None,
        )
        for name in self._reasoning_fields:
            setattr(message, name, reasoning)
        if delta.calls:
            message.tool_calls = [
                msgspec.structs.replace(call, index=UNSET) for call in delta.calls
            ]
        choice = wire.ChatChoice(
            processor.index,
            message,
            self._logprobs(output.token_ids, output.logprobs),
            parser.finish_reason(output.finish_reason),
            output.stop_reason,
        )
        if self._request.return_token_ids:
            choice.token_ids = output.token_ids
        choice.steps = shown_steps(self.context.tokenizer, output.steps, output.token_texts)
        return choice

    def _chunk_choices(
        self, processor: RequestOutputProcessor, delta: OutputDelta
    ) -> list[wire.ChatChunkChoice]:
        """The chunks of one output; none if there is nothing to say."""
        parser = self._parsers[processor.index]
        added = _delta(
            parser.push(
                delta.text, delta.token_ids, delta.finished, delta.finish_reason, delta.stop_reason
            )
        )
        out = wire.ChatDelta()
        if added.content:
            out.content = added.content
        if added.reasoning and self._shows_reasoning:
            for name in self._reasoning_fields:
                setattr(out, name, added.reasoning)
        if added.calls:
            out.tool_calls = added.calls
        wants_tokens = (
            self._request.return_token_ids or delta.logprobs is not None or delta.steps is not None
        )
        is_empty = not (added.content or added.reasoning or added.calls)
        if is_empty and not delta.finished and not (wants_tokens and delta.token_ids):
            return []
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        choices = [wire.ChatChunkChoice(processor.index, out, logprobs, None)]
        if self._request.return_token_ids:
            choices[0].token_ids = list(delta.token_ids)
        choices[0].steps = shown_steps(self.context.tokenizer, delta.steps, delta.token_texts)
        if delta.finished:
            if added.calls:
                # The openai client ends a call only at a chunk that follows it.
                choices.append(wire.ChatChunkChoice(processor.index, wire.ChatDelta(), None, None))
            choices[-1].finish_reason = parser.finish_reason(delta.finish_reason)
            choices[-1].stop_reason = delta.stop_reason
        return choices


@dataclasses.dataclass(slots=True)
class _Delta:
    """Pieces in the form of this API, which has one text and one list of calls."""

    reasoning: str
    content: str
    calls: list[wire.ToolCallDelta]


def _delta(pieces: Sequence[Piece]) -> _Delta:
    """Joins pieces; a call has its id and its name where it begins."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, wire.ToolCallDelta] = {}
    for piece in pieces:
        if isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, CallStart):
            function = wire.FunctionDelta(name=piece.name)
            calls[piece.index] = wire.ToolCallDelta(
                index=piece.index, id=piece.call_id, type="function", function=function
            )
        elif isinstance(piece, CallArguments):
            call = calls.setdefault(piece.index, wire.ToolCallDelta(index=piece.index))
            call.function.arguments += piece.text
    return _Delta("".join(reasoning), "".join(content), list(calls.values()))


def _check(body: ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.echo:
        raise RequestError("echo is not supported for chat.", "echo")
    last = body.messages[-1]
    if last.role == "assistant" and (last.prefix or last.partial):
        body.continue_final_message = True
    chosen_tools(body)
