"""What every form of a chat shares: messages to token ids, the job, the parser of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from starlette.requests import Request

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.serve.generation.answer import grammar_of, unless_gone
from openspec.serve.generation.body import Arrival, forget
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
from openspec.serve.generation.structured import encoded_chat_demand, must_call
from openspec.serve.shapes.chat import (
    THOUGHT_PARTS,
    ChatCompletionRequest,
    ChatMessage,
    GenerationFields,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from openspec.text.chat_template import EFFORT_KWARG, TEMPLATE_REFUSES, THINKING_KWARGS, Segment
from openspec.text.json_reader import MAX_VALUES, TOO_MANY_VALUES, NotJson, num_values, read_json
from openspec.text.json_values import plain_json
from openspec.text.parsers.call_parser import ToolTypes
from openspec.text.parsers.message import MessageParser
from openspec.text.parsers.pieces import THINK_CLOSE, THINK_OPEN
from openspec.text.parsers.reasoning import thinking_of
from openspec.text.tokenizer import Tokenizer
from openspec.text.worker import to_json

_ROLES = {"developer": "system", "function": "tool"}
"""Templates know the other names."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    token_ids: list[int]
    thinking: bool | None
    """Whether the answer starts within a thinking block; None where it cannot think at all."""


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat that is ready to run."""

    job: Job
    thinking: bool | None
    """Of the `RenderedChat`."""
    tools: ToolTypes | None
    """None where the answer may hold no calls."""
    max_calls: int | None

    def parser(self, context: ServerContext) -> MessageParser:
        """A parser for one choice of the answer."""
        return MessageParser(
            context.tokenizer,
            context.answer_form,
            thinking=self.thinking,
            tools=self.tools,
            max_calls=self.max_calls,
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
    longest = info.max_model_len if body.truncate_prompt_tokens is None else None
    chat = await unless_gone(
        request,
        num_bytes,
        render_chat(context, chat_request, num_bytes, param=param, max_tokens=longest),
    )
    token_ids = truncated(chat.token_ids, body.truncate_prompt_tokens, info.max_model_len)
    room = room_for_output(context, len(token_ids), param)
    # Clients declare more than there is room for, so a limit is no more than a wish.
    fits = max(1, min(room, info.num_pages * info.page_size - len(token_ids)))
    if limit is None:
        limit = context.config.default_max_tokens
    max_tokens = fits if limit is None else min(limit, fits)
    if must_call(chat_request):
        body.stop = None  # the grammar ends the call, and its tags are no text of the answer
    sampling = await pool.run(
        num_bytes,
        lambda: sampling_params(
            context,
            body,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
        ),
    )
    has_calls = bool(chat_request.tools) and chat_request.tool_choice != "none"
    shown = context.answer_form.shown_ids(chat.thinking, has_calls)
    demand, name = await pool.run(
        num_bytes,
        lambda: encoded_chat_demand(context, body, chat_request, chat.thinking, format_param),
    )
    types = None
    if has_calls:
        types = await pool.run(num_bytes, lambda: _tool_types(context, chat_request.tools or ()))
    arrival.held.callback(forget, chat_request)
    arrival.held.close()
    grammar = await grammar_of(context, request, demand, name)
    prompts = [Prompt(token_ids, None)]
    job = await pool.run(
        job_size(prompts, sampling),
        lambda: Job(context, kind, arrival, prompts, body, sampling, shown, grammar, chat.thinking),
    )
    return ChatJob(
        job, chat.thinking, types, 1 if chat_request.parallel_tool_calls is False else None
    )


async def render_chat(
    context: ServerContext,
    request: ChatCompletionRequest | TokenizeRequest,
    num_bytes: int,
    *,
    param: str = "messages",
    max_tokens: int | None = None,
) -> RenderedChat:
    """Renders the messages of a body of `num_bytes`, where they may have fewer than `max_tokens`.

    The conversation came in the field `param`.

    Raises:
        RequestError: naming what the template or the server refuses.
        EngineError: the process that renders ended.
    """
    pool, tokenizer = context.text_pool, context.tokenizer
    goes_on = bool(request.continue_final_message)
    prefill = _open_thinking(request) if goes_on else None
    if prefill is not None:
        # The thinking goes on behind the prompt of a new answer, which every template writes.
        before = (request.messages or [])[:-1]
        request = request.model_copy(update={"messages": before, "continue_final_message": None})
        goes_on = False

    async def rendered(one: ChatCompletionRequest | TokenizeRequest) -> list[Segment]:
        defaults = context.config.default_chat_template_kwargs
        make = partial(_render_request, one, param, defaults)
        return await pool.render(await pool.run(num_bytes, make))

    try:
        segments = await rendered(request)
    except RequestError as error:
        if error.code != TEMPLATE_REFUSES:
            raise
        merged = await pool.run(num_bytes, lambda: _with_one_system(request))
        if merged is None:
            raise
        segments = await rendered(merged)
    if prefill is not None:
        segments = _with_thinking(tokenizer, segments, prefill)
    text = "".join(segment.text for segment in segments)
    if max_tokens is not None:
        await pool.run(len(text), lambda: check_length(tokenizer, text, max_tokens, "messages"))
    token_ids = (await pool.encode([segments]))[0]
    if goes_on:
        text, token_ids = await pool.run(
            len(text), lambda: _reopened(tokenizer, text, token_ids, request.messages or [])
        )
    thinking = None if goes_on else prefill is not None or thinking_of(text)
    return RenderedChat(tokenizer.with_prefix(token_ids), thinking)


def _open_thinking(request: ChatCompletionRequest | TokenizeRequest) -> str | None:
    """The thinking that the last message ends within; None where it does not."""
    message = request.messages[-1] if request.messages else None
    if message is None or message.role != "assistant" or message.tool_calls:
        return None
    content = _content(message).lstrip()
    if not content:
        return message.reasoning_content or message.reasoning
    if content.startswith(THINK_OPEN) and THINK_CLOSE not in content:
        return content.removeprefix(THINK_OPEN)
    return None


def _with_thinking(
    tokenizer: Tokenizer, segments: Sequence[Segment], thinking: str
) -> list[Segment]:
    """The prompt of an answer that begins with thinking."""
    text = "".join(segment.text for segment in segments)
    if text.rstrip().endswith(THINK_CLOSE):
        raise _no_way_on()
    opening = [] if text.rstrip().endswith(THINK_OPEN) else [
        Segment(THINK_OPEN, THINK_OPEN in tokenizer.special_tokens)
    ]  # fmt: skip
    gap = "" if text.endswith("\n") and not opening else "\n"
    return [*segments, *opening, Segment(gap + thinking.lstrip("\n"), False)]


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


def _render_request(
    request: ChatCompletionRequest | TokenizeRequest,
    param: str,
    defaults: Mapping[str, bool | str],
) -> bytes:
    """The arguments of `ChatTemplates.render`, in JSON; the request goes before the defaults."""
    arguments = _Arguments(param)
    messages = [_message(message, arguments) for message in request.messages or ()]
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
    wish = request.wants_thinking()
    if wish is not None and not any(name in kwargs for name in THINKING_KWARGS):
        kwargs[THINKING_KWARGS[0]] = wish
    effort = request.wanted_effort()
    if effort is not None:
        kwargs.setdefault(EFFORT_KWARG, effort)
    tools = request.tools if request.tool_choice != "none" else None
    return to_json(
        {
            "messages": messages,
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "add_generation_prompt": adds_prompt,
            "kwargs": {**_in_every_spelling(defaults), **_in_every_spelling(kwargs)},
        }
    )


def _in_every_spelling(kwargs: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Whether to think under each of its names, of which templates read one."""
    known = [kwargs[name] for name in THINKING_KWARGS if isinstance(kwargs.get(name), bool)]
    return {**dict.fromkeys(THINKING_KWARGS, known[0]), **kwargs} if known else kwargs


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
        raise _no_way_on()
    return body, token_ids[:start]


def _no_way_on() -> RequestError:
    return RequestError(
        "messages: the answer cannot go on with the last message, an assistant's: the model's "
        "template, or thinking that is off, leaves no way.",
        "messages",
    )


def _message(message: ChatMessage, arguments: _Arguments) -> dict[str, JsonValue]:
    result: dict[str, JsonValue] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _content(message),
    }
    parts = message.content if isinstance(message.content, list) else []
    thoughts = [part.thinking for part in parts if part.type in THOUGHT_PARTS and part.thinking]
    if thoughts:
        result["reasoning_content"] = "".join(thoughts)
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = message.__dict__[key]
        if value is not None:
            result[key] = value
    calls = message.tool_calls
    if not calls and message.function_call is not None:
        calls = [ToolCall(function=message.function_call)]
    if calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments.read(call.function.arguments),
                },
            }
            for call in calls
        ]
    return result


def _content(message: ChatMessage) -> str:
    if message.content is None:
        if message.role in ("assistant", "tool", "function"):
            return message.refusal or ""
        raise RequestError("messages: content is missing.", "messages")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if message.role == "assistant" and part.type in THOUGHT_PARTS:
            continue
        text = part.said()
        if text is None:
            raise RequestError(
                f"messages: a part of type {part.type[:64]!r} has no text, and only text is "
                'supported; a part must be {"type": "text", "text": ...}.',
                "messages",
            )
        texts.append(text)
    return "\n".join(texts)


class _Arguments:
    """Reads the arguments of past calls, which all together have no more values than a body."""

    def __init__(self, param: str) -> None:
        self._param, self._num_values = param, 0

    def read(self, given: str | dict[str, object] | None) -> JsonValue:
        """Arguments as an object where they are one.

        Templates write objects as JSON and texts as they are.

        Raises:
            RequestError: they are JSON that no body may hold, or too large.
        """
        if not isinstance(given, str):
            return plain_json(given or {}, self._param)
        if not given.strip():
            return {}  # how some clients write that there are none
        data = given.encode()
        self._num_values += num_values(data)
        what = f"{self._param}: the arguments of a call"
        if self._num_values > MAX_VALUES:
            raise RequestError(
                f"{self._param}: the arguments of all calls have {TOO_MANY_VALUES}.", self._param
            )
        try:
            value = read_json(data, what, self._param)
        except NotJson:
            return given  # as a model may have written it
        return plain_json(value, self._param) if isinstance(value, dict) else given


def _tool(tool: Tool) -> dict[str, JsonValue]:
    dumped = plain_json(tool.model_dump(exclude_unset=True))
    return {"type": "function", **dumped} if isinstance(dumped, dict) else {}


def _tool_types(context: ServerContext, tools: Sequence[Tool]) -> ToolTypes:
    return context.answer_form.tool_types(
        {tool.function.name: cast("JsonValue", tool.function.parameters) for tool in tools}
    )
