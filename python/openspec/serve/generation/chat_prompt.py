"""What every form of a chat shares: messages to token ids, the job, the parser of its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.serve.generation.answer import grammar_of, unless_gone
from openspec.serve.generation.body import Arrival
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.job import (
    Job,
    Prompt,
    check_length,
    room_for_output,
    sampling_params,
    truncated,
)
from openspec.serve.generation.structured import encoded_chat_demand
from openspec.serve.shapes.chat import (
    ChatCompletionRequest,
    ChatMessage,
    GenerationFields,
    TokenizeRequest,
    Tool,
)
from openspec.text.chat_template import TEMPLATE_REFUSES
from openspec.text.json_values import plain_json
from openspec.text.parsers.call_parser import ToolTypes
from openspec.text.parsers.message import MessageParser
from openspec.text.parsers.reasoning import thinking_of
from openspec.text.tokenizer import Tokenizer
from openspec.text.worker import to_json


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    text: str
    token_ids: list[int]
    thinking: bool | None
    """Whether the answer starts within a thinking block; None where it cannot think at all."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat that is ready to run."""

    job: Job
    chat: RenderedChat
    tools: ToolTypes | None
    """None where the answer may hold no calls."""

    def parser(self, context: ServerContext, parallel_calls: bool | None) -> MessageParser:
        """A parser for one choice of the answer; without `parallel_calls` it has one call."""
        return MessageParser(
            context.tokenizer,
            context.answer_form,
            thinking=self.chat.thinking,
            tools=self.tools,
            max_calls=1 if parallel_calls is False else None,
        )


async def chat_job(
    context: ServerContext,
    request: Request,
    arrival: Arrival,
    body: GenerationFields,
    chat_request: ChatCompletionRequest,
    *,
    kind: str,
    limit: int | None,
    param: str = "messages",
    format_param: str = "response_format",
    logprobs: int | None = None,
) -> ChatJob:
    """The job of a chat, whose body came in any form.

    `kind` begins the answer's id, `limit` is the most tokens that the client wants, and the
    conversation came in the field `param`, the form of its answer in `format_param`.

    Raises:
        RequestError: naming the field.
        ApiError: 400, the client left.
    """
    info, num_bytes, pool = context.engine.info, arrival.num_bytes, context.text_pool
    max_tokens = info.max_model_len if body.truncate_prompt_tokens is None else None
    chat = await unless_gone(
        request, num_bytes, render_chat(context, chat_request, num_bytes, max_tokens=max_tokens)
    )
    token_ids = truncated(chat.token_ids, body.truncate_prompt_tokens, info.max_model_len)
    room = room_for_output(context, len(token_ids), param)
    # Clients declare more than there is room for, so a limit is no more than a wish.
    fits = max(1, min(room, info.num_pages * info.page_size - len(token_ids)))
    if limit is None:
        limit = context.config.default_max_tokens
    sampling = sampling_params(
        context,
        body,
        max_tokens=fits if limit is None else min(limit, fits),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    has_calls = bool(chat_request.tools) and chat_request.tool_choice != "none"
    shown = context.answer_form.shown_ids(chat.thinking, has_calls)
    prompts = [Prompt(token_ids, chat.text)]
    demand, name = await pool.run(
        num_bytes,
        lambda: encoded_chat_demand(context, body, chat_request, chat.thinking, format_param),
    )
    grammar = await grammar_of(context, request, demand, name)
    job = await pool.run(
        num_bytes, lambda: Job(context, kind, arrival, prompts, body, sampling, shown, grammar)
    )
    tools = chat_request.tools or () if has_calls else None
    types = await pool.run(num_bytes, lambda: _tool_types(context, tools))
    return ChatJob(job, chat, types)


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
    try:
        segments = await pool.render(await pool.run(num_bytes, lambda: _render_request(request)))
    except RequestError as error:
        merged = _with_one_system(request)
        if error.code != TEMPLATE_REFUSES or merged is None:
            raise
        segments = await pool.render(await pool.run(num_bytes, lambda: _render_request(merged)))
    text = "".join(segment.text for segment in segments)
    if max_tokens is not None:
        await pool.run(len(text), lambda: check_length(tokenizer, text, max_tokens, "messages"))
    token_ids = (await pool.encode([segments]))[0]
    if goes_on:
        text, token_ids = await pool.run(
            len(text), lambda: _reopened(tokenizer, text, token_ids, request.messages or [])
        )
    thinking = None if goes_on else thinking_of(text)
    return RenderedChat(text, tokenizer.with_prefix(token_ids), thinking)


def _with_one_system(
    request: ChatCompletionRequest | TokenizeRequest,
) -> ChatCompletionRequest | TokenizeRequest | None:
    """The request with one system message in front, as some templates demand; None if it is so."""
    messages = request.messages or []
    system = [message for message in messages if message.role in ("system", "developer")]
    if not system or (len(system) == 1 and messages[0] is system[0]):
        return None
    content = "\n\n".join(_content(message) for message in system)
    others = [message for message in messages if message.role not in ("system", "developer")]
    merged = [ChatMessage(role="system", content=content), *others]
    return request.model_copy(update={"messages": merged})


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
        key: plain_json(value) for key, value in (request.chat_template_kwargs or {}).items()
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
    """A call's arguments, as an object where they are one.

    Templates write objects as JSON and texts as they are.
    """
    if not isinstance(given, str):
        return plain_json(given or {})
    if not given.strip():
        return {}  # how some clients write that there are none
    try:
        value: object = json.loads(given)
        if "\\u" in given:
            # An escape that is half a character is JSON, but only as an escape.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return given
    return plain_json(value) if isinstance(value, dict) else given


def _tool(tool: Tool) -> dict[str, JsonValue]:
    dumped = plain_json(tool.model_dump(exclude_unset=True))
    return {"type": "function", **dumped} if isinstance(dumped, dict) else {}


def _tool_types(context: ServerContext, tools: Sequence[Tool] | None) -> ToolTypes | None:
    if tools is None:
        return None
    return context.answer_form.tool_types(
        {tool.function.name: cast("JsonValue", tool.function.parameters) for tool in tools}
    )
