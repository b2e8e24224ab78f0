"""From chat messages to a prompt, through the model's own template."""

from __future__ import annotations

import json
from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.serve.reasoning import THINK_CLOSE, THINK_OPEN
from openspec.serve.request_models import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from openspec.text.chat_template import MAX_DEPTH
from openspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    text: str
    token_ids: list[int]
    thinking: bool | None
    """Whether the answer starts within a thinking block; None where it cannot think at all."""


def render_chat(
    tokenizer: Tokenizer, request: ChatCompletionRequest | TokenizeRequest
) -> RenderedChat:
    """Renders the messages; runs in a thread when they are long.

    Raises:
        RequestError: naming what the template or the server refuses.
    """
    messages = [_message(message) for message in request.messages or ()]
    goes_on = bool(request.continue_final_message)
    adds_prompt = request.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not goes_on
    if goes_on and adds_prompt:
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
    prompt = tokenizer.render_chat(
        messages,
        tools=[_tool(tool) for tool in tools] if tools else None,
        add_generation_prompt=adds_prompt,
        chat_template_kwargs=kwargs,
    )
    text, token_ids = prompt.text, prompt.token_ids
    if goes_on:
        text, token_ids = _reopened(tokenizer, text, token_ids, messages[-1])
    end = text.rstrip()
    thinking = None if goes_on or end.endswith(THINK_CLOSE) else end.endswith(THINK_OPEN)
    return RenderedChat(text, token_ids, thinking)


def _reopened(
    tokenizer: Tokenizer, text: str, token_ids: list[int], last: dict[str, JsonValue]
) -> tuple[str, list[int]]:
    """The chat without what the template puts after the last message's content."""
    given = last.get("content")
    content = given.lstrip() if isinstance(given, str) else ""
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
