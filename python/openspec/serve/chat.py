"""POST /v1/chat/completions: messages to a prompt through the model's template, and the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.serve.answer import Answer, chat_logprobs, prompt_logprobs, unless_gone
from openspec.serve.api import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from openspec.serve.body import receive_request
from openspec.serve.context import ServerContext
from openspec.serve.job import (
    Job,
    Prompt,
    check_length,
    room_for_output,
    sampling_params,
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
    FunctionText,
    ToolCallOut,
    Usage,
)
from openspec.text.chat_parsers import THINK_CLOSE, THINK_OPEN, MessageParser, ParsedCall
from openspec.text.chat_template import MAX_DEPTH
from openspec.text.outputs import OutputDelta, PositionLogprobs, RequestOutputProcessor
from openspec.text.tokenizer import Tokenizer
from openspec.text.worker import to_json


async def create_chat_completion(context: ServerContext, request: Request) -> Response:
    """Answers a conversation."""
    arrival, body = await receive_request(context, request, ChatCompletionRequest)
    _check(body)
    info, num_bytes = context.engine.info, arrival.num_bytes
    max_tokens = info.max_model_len if body.truncate_prompt_tokens is None else None
    chat = await unless_gone(
        request, num_bytes, render_chat(context, body, num_bytes, max_tokens=max_tokens)
    )
    token_ids = truncated(chat.token_ids, body.truncate_prompt_tokens, info.max_model_len)
    room = room_for_output(context, len(token_ids), "messages")
    limits = [n for n in (body.max_completion_tokens, body.max_tokens) if n is not None]
    # Without a limit the answer may fill the context, as far as there is memory for it.
    fits = max(1, min(room, info.num_pages * info.page_size - len(token_ids)))
    sampling = sampling_params(
        context,
        body,
        max_tokens=min(limits, default=fits),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    prompts = [Prompt(token_ids, chat.text)]
    job = await context.text_pool.run(
        num_bytes, lambda: Job(context, "chatcmpl", arrival, prompts, body, sampling)
    )
    return await _Answer(context, body, job, chat).respond(request)


class _Answer(Answer):
    """Builds the answer of one request."""

    def __init__(
        self, context: ServerContext, body: ChatCompletionRequest, job: Job, chat: RenderedChat
    ) -> None:
        super().__init__(context, body, job)
        self._request = body
        self._shows_reasoning = body.include_reasoning is not False
        self._parsers = [
            MessageParser(
                context.tokenizer,
                thinking=chat.thinking,
                has_tools=bool(body.tools) and body.tool_choice != "none",
                max_calls=1 if body.parallel_tool_calls is False else None,
            )
            for _ in job.processors
        ]

    def whole(self) -> ChatCompletion:
        """All choices."""
        answer = ChatCompletion(
            id=self.job.request_id,
            created=self.created,
            model=self.context.model_name,
            choices=[self._full_choice(processor) for processor in self.job.processors],
        )
        self._add_prompt(answer)
        return answer

    def chunks(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool
    ) -> list[ChatChunk]:
        """A role where a choice begins, and what the output adds to it."""
        chunks = []
        if is_first:
            opening = ChatDelta(role="assistant", content="")
            chunks.append(self._chunk([ChatChunkChoice(processor.index, opening, None, None)]))
            if processor.index == 0:
                self._add_prompt(chunks[0])
        choice = self._chunk_choice(processor, delta)
        if choice is not None:
            chunks.append(self._chunk([choice]))
        return chunks

    def last_chunk(self) -> ChatChunk:
        """No choices."""
        return self._chunk([])

    def usage(self) -> Usage:
        """With the tokens of thinking."""
        usage = super().usage()
        num_reasoning = sum(parser.num_reasoning_tokens for parser in self._parsers)
        usage.completion_tokens_details = {"reasoning_tokens": num_reasoning}
        return usage

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.job.request_id,
            created=self.created,
            model=self.context.model_name,
            choices=choices,
        )

    def _add_prompt(self, answer: ChatCompletion | ChatChunk) -> None:
        if self._request.return_token_ids:
            answer.prompt_token_ids = self.job.prompts[0].token_ids
        if self._request.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self.job.processors[0].prompt_logprobs, self._request.prompt_logprobs
            )

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs] | None
    ) -> ChatLogprobs | None:
        if positions is None:
            return None
        request = self._request
        as_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(token_ids, positions, request.top_logprobs or 0, as_ids)

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
            message.tool_calls = [_tool_call(call) for call in pieces.calls]
        choice = ChatChoice(
            processor.index,
            message,
            self._logprobs(output.token_ids, output.logprobs),
            parser.finish_reason(output.finish_reason),
            output.stop_reason,
        )
        if self._request.return_token_ids:
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
                _tool_call(call, first + number) for number, call in enumerate(pieces.calls)
            ]
        wants_tokens = self._request.return_token_ids or delta.logprobs is not None
        is_empty = not (pieces.content or pieces.reasoning or pieces.calls)
        if is_empty and not delta.finished and not (wants_tokens and delta.token_ids):
            return None
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        choice = ChatChunkChoice(processor.index, out, logprobs, None)
        if delta.finished:
            choice.finish_reason = parser.finish_reason(delta.finish_reason)
            choice.stop_reason = delta.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return choice


def _tool_call(call: ParsedCall, index: int | UnsetType = UNSET) -> ToolCallOut:
    function = FunctionText(call.name, call.arguments)
    return ToolCallOut(index=index, id=call.call_id, function=function)


def _check(body: ChatCompletionRequest) -> None:
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


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    text: str
    token_ids: list[int]
    thinking: bool | None
    """Whether the answer starts within a thinking block; None where it cannot think at all."""


async def render_chat(
    context: ServerContext,
    request: ChatCompletionRequest | TokenizeRequest,
    num_bytes: int,
    *,
    max_tokens: int | None = None,
) -> RenderedChat:
    """Renders the messages of a body of `num_bytes`, where they may have fewer than `max_tokens`.

    Raises:
        RequestError: naming what the template or the server refuses.
        EngineError: the process that renders ended.
    """
    pool, tokenizer = context.text_pool, context.tokenizer
    goes_on = bool(request.continue_final_message)
    segments = await pool.render(await pool.run(num_bytes, lambda: _render_request(request)))
    text = "".join(segment.text for segment in segments)
    if max_tokens is not None:
        await pool.run(len(text), lambda: check_length(tokenizer, text, max_tokens, "messages"))
    token_ids = (await pool.encode([segments]))[0]
    if goes_on:
        text, token_ids = await pool.run(
            len(text), lambda: _reopened(tokenizer, text, token_ids, request.messages or [])
        )
    end = text.rstrip()
    thinking = None if goes_on or end.endswith(THINK_CLOSE) else end.endswith(THINK_OPEN)
    return RenderedChat(text, tokenizer.with_prefix(token_ids), thinking)


def _render_request(request: ChatCompletionRequest | TokenizeRequest) -> bytes:
    """The arguments of `ChatTemplates.render`, in JSON."""
    messages = [_message(message) for message in request.messages or ()]
    adds_prompt = request.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not request.continue_final_message
    if request.continue_final_message and adds_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            "continue_final_message",
        )
    kwargs: dict[str, JsonValue] = {
        key: _plain(value) for key, value in (request.chat_template_kwargs or {}).items()
    }
    tools = request.tools
    if isinstance(request, ChatCompletionRequest):
        if request.reasoning_effort is not None:
            kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
        if request.tool_choice == "none":
            tools = None
    return to_json(
        {
            "messages": messages,
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "add_generation_prompt": adds_prompt,
            "kwargs": kwargs,
        }
    )


def _reopened(
    tokenizer: Tokenizer, text: str, token_ids: list[int], messages: Sequence[ChatMessage]
) -> tuple[str, list[int]]:
    """The chat without what the template puts after the last message's content."""
    content = _content(messages[-1]).lstrip()
    # The closing starts with a special token, the last one of all, so the content's last token ends
    # where it starts. It is not looked for by the content, which may be in the closing: "|", "end".
    special = frozenset(tokenizer.special_tokens.values())
    start = max((i for i, token_id in enumerate(token_ids) if token_id in special), default=0)
    closing = token_ids[start:]
    end = text.rfind(tokenizer.token_text(closing[0])) if closing else -1
    body = text[: max(end, 0)]
    is_clean = tokenizer.encode(text[len(body) :], parse_special=True) == closing
    # Templates may trim the end of a message, or keep it: spaces there are the client's to choose.
    if not (is_clean and content and body.endswith((content, content.rstrip()))):
        raise RequestError(
            "continue_final_message: the template leaves no way to go on with this message.",
            "continue_final_message",
        )
    return body, token_ids[:start]


def _message(message: ChatMessage) -> dict[str, JsonValue]:
    result: dict[str, JsonValue] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message),
    }
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = message.__dict__[key]
        if value is not None:
            result[key] = value
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return result


def _content(message: ChatMessage) -> str:
    if message.content is None:
        if message.role in ("assistant", "tool"):
            return ""
        raise RequestError("messages: content is missing.", "messages")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestError(
                "messages: only text content is supported; a part must be "
                '{"type": "text", "text": ...}.',
                "messages",
            )
        texts.append(part.text)
    return "\n".join(texts)


def _arguments(given: str | dict[str, object] | None) -> JsonValue:
    """As an object where it is one: templates write objects as JSON and texts as they are."""
    if not isinstance(given, str):
        return _plain(given or {})
    if not given.strip():
        return {}  # how some clients write that there are none
    try:
        value: object = json.loads(given)
        if "\\u" in given:
            # An escape that is half a character is JSON, but only as an escape.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return given
    return _plain(value) if isinstance(value, dict) else given


def _tool(tool: Tool) -> dict[str, JsonValue]:
    dumped = _plain(tool.model_dump(exclude_unset=True))
    return {"type": "function", **dumped} if isinstance(dumped, dict) else {}


def _plain(value: object, depth: int = 0) -> JsonValue:
    """What came out of a JSON parser, typed."""
    if depth > MAX_DEPTH:
        raise RequestError(f"The request is nested deeper than {MAX_DEPTH} levels.", "messages")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    raise RequestError("The request holds something that is not JSON.")
