"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve import answer_parts as parts
from openspec.serve.chat_message import MessageParser
from openspec.serve.chat_prompt import RenderedChat, render_chat
from openspec.serve.context import ServerContext
from openspec.serve.event_stream import EventStream, abort_on_disconnect
from openspec.serve.generation import Job, Prompt
from openspec.serve.handling import (
    answer_size,
    json_response,
    receive_request,
    stream_events,
)
from openspec.serve.request_models import ChatCompletionRequest, refuse_unsupported
from openspec.serve.request_options import (
    check_stream_options,
    generation_options,
    room_for_output,
    truncated,
)
from openspec.serve.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    FunctionText,
    PromptLogprobs,
    ToolCallDelta,
    ToolCallOut,
    Usage,
    event,
)
from openspec.text.outputs import OutputDelta, RequestOutputProcessor


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Handles a request."""
    arrival, body = await receive_request(context, request, ChatCompletionRequest)
    _check(body)
    chat = await context.text_pool.run(
        arrival.num_bytes, lambda: render_chat(context.tokenizer, body)
    )
    info = context.engine.info
    token_ids = truncated(chat.token_ids, body.truncate_prompt_tokens, info.max_model_len)
    room = room_for_output(context, len(token_ids), "messages")
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    # Without a limit the answer may fill the context, as far as there is memory for it.
    fits = max(1, min(room, info.num_pages * info.page_size - len(token_ids)))
    options = generation_options(
        context,
        body,
        max_tokens=min(limits, default=fits),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompt = Prompt(token_ids, chat.text)
    job = Job(
        context, f"chatcmpl-{arrival.unique}", arrival.external_id, [prompt], options, arrival.time
    )
    answer = _Answer(context, body, job, chat)
    if body.stream:
        return EventStream(stream_events(job, answer.events()), job.abort)
    async with abort_on_disconnect(request.receive, job.abort), job:
        await job.run()
    return await context.text_pool.run(answer_size(job), lambda: json_response(answer.full()))


class _Answer:
    """Builds the answer of one request, whole or in pieces."""

    def __init__(
        self, context: ServerContext, body: ChatCompletionRequest, job: Job, chat: RenderedChat
    ) -> None:
        self._context = context
        self._body = body
        self._job = job
        self._created = int(time.time())
        self._shows_reasoning = body.include_reasoning is not False
        has_tools = bool(body.tools) and body.tool_choice != "none"
        self._parsers = [
            MessageParser(
                context.tokenizer,
                thinking=chat.thinking,
                has_tools=has_tools,
                max_calls=1 if body.parallel_tool_calls is False else None,
            )
            for _ in job.processors
        ]

    def full(self) -> ChatCompletion:
        """The whole answer."""
        answer = ChatCompletion(
            id=self._job.request_id,
            created=self._created,
            model=self._context.model_name,
            choices=[self._full_choice(processor) for processor in self._job.processors],
        )
        answer.usage = self._usage()
        answer.metrics = parts.metrics_of(self._context, self._job)
        if self._body.return_token_ids:
            answer.prompt_token_ids = self._job.prompts[0].token_ids
        if self._body.prompt_logprobs is not None:
            answer.prompt_logprobs = self._prompt_logprobs()
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer in chunks: a role for every choice, then one for each output of the engine."""
        options = self._body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        num_open = len(self._job.processors)
        started = [False] * num_open
        async for processor, delta in self._job.outputs():
            index = processor.index
            if not started[index]:
                started[index] = True
                opening = ChatDelta(role="assistant", content="")
                chunk = self._chunk([ChatChunkChoice(index, opening, None, None)])
                if index == 0:
                    if self._body.return_token_ids:
                        chunk.prompt_token_ids = self._job.prompts[0].token_ids
                    if self._body.prompt_logprobs is not None:
                        chunk.prompt_logprobs = self._prompt_logprobs()
                self._set_usage(chunk, include_usage, continuous)
                yield event(chunk)
            choice = self._chunk_choice(processor, delta)
            if choice is None:
                continue
            chunk = self._chunk([choice])
            self._set_usage(chunk, include_usage, continuous)
            if delta.finished:
                num_open -= 1
                if num_open == 0 and not include_usage:
                    chunk.metrics = parts.metrics_of(self._context, self._job)
            yield event(chunk)
        if include_usage:
            chunk = self._chunk([])
            chunk.usage = self._usage()
            chunk.metrics = parts.metrics_of(self._context, self._job)
            yield event(chunk)

    def _full_choice(self, processor: RequestOutputProcessor) -> ChatChoice:
        output, parser = processor.output(), self._parsers[processor.index]
        pieces = parser.push(output.text, output.token_ids, is_last=True)
        reasoning = pieces.reasoning if self._shows_reasoning and pieces.reasoning else None
        message = AssistantMessage(
            content=pieces.content if pieces.content or not pieces.calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )
        if pieces.calls:
            message.tool_calls = [
                ToolCallOut(id=call.call_id, function=FunctionText(call.name, call.arguments))
                for call in pieces.calls
            ]
        choice = ChatChoice(
            processor.index,
            message,
            None,
            parser.finish_reason(output.finish_reason),
            output.stop_reason,
        )
        if output.logprobs is not None:
            choice.logprobs = parts.chat_logprobs(
                output.token_ids, output.logprobs, self._body.top_logprobs or 0, self._as_ids
            )
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def _chunk_choice(
        self, processor: RequestOutputProcessor, delta: OutputDelta
    ) -> ChatChunkChoice | None:
        """The chunk of one output; None if there is nothing to say."""
        parser = self._parsers[processor.index]
        pieces = parser.push(delta.text, delta.token_ids, is_last=delta.finished)
        out = ChatDelta()
        if pieces.content:
            out.content = pieces.content
        if pieces.reasoning and self._shows_reasoning:
            out.reasoning_content = out.reasoning = pieces.reasoning
        if pieces.calls:
            first = parser.num_calls - len(pieces.calls)
            out.tool_calls = [
                ToolCallDelta(
                    index=first + number,
                    id=call.call_id,
                    function=FunctionText(call.name, call.arguments),
                )
                for number, call in enumerate(pieces.calls)
            ]
        wants_tokens = self._body.return_token_ids or delta.logprobs is not None
        is_empty = not (pieces.content or pieces.reasoning or pieces.calls)
        if is_empty and not delta.finished and not (wants_tokens and delta.token_ids):
            return None
        logprobs: ChatLogprobs | None = None
        if delta.logprobs is not None:
            logprobs = parts.chat_logprobs(
                delta.token_ids, delta.logprobs, self._body.top_logprobs or 0, self._as_ids
            )
        choice = ChatChunkChoice(processor.index, out, logprobs, None)
        if delta.finished:
            choice.finish_reason = parser.finish_reason(delta.finish_reason)
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return choice

    @property
    def _as_ids(self) -> bool:
        return bool(self._body.return_tokens_as_token_ids)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._job.request_id,
            created=self._created,
            model=self._context.model_name,
            choices=choices,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        return parts.prompt_logprobs(
            self._job.processors[0].prompt_logprobs, self._body.prompt_logprobs or 0
        )

    def _set_usage(self, chunk: ChatChunk, include_usage: bool, continuous: bool) -> None:
        if continuous:
            chunk.usage = self._usage()
        elif include_usage:
            chunk.usage = None

    def _usage(self) -> Usage:
        usage = parts.usage_of(self._job)
        usage.completion_tokens_details = CompletionTokensDetails(
            sum(parser.num_reasoning_tokens for parser in self._parsers)
        )
        return usage


def _check(body: ChatCompletionRequest) -> None:
    refuse_unsupported(body)
    check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    if body.echo:
        raise RequestError("echo is not supported for chat.", "echo")
    if body.response_format is not None and body.response_format.type != "text":
        raise RequestError(
            f"response_format: type {body.response_format.type[:64]!r} is not supported yet, only "
            "'text'.",
            "response_format",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise RequestError("tool_choice: only 'none' and 'auto' are supported.", "tool_choice")
    if body.tool_choice == "auto" and not body.tools:
        raise RequestError("tool_choice 'auto' needs tools.", "tool_choice")
