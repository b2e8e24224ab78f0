"""What requests to /v1/responses may contain, and what they mean as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from openspec.errors import RequestError
from openspec.serve.shapes.chat import (
    MAX_MESSAGES,
    WHOLE,
    ChatCompletionRequest,
    ChatMessage,
    Content,
    FunctionCall,
    GenerationFields,
    Model,
    ReasoningField,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    function_tool,
)
from openspec.serve.shapes.joined import Parts, joined

_THOUGHTS = ("reasoning_text", "summary_text")


class InputItem(Model):
    """A message, a call of a function, its result, or the reasoning of an earlier answer.

    Or the `id` of such an item of an answer that is kept.
    """

    type: str | None = None
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class ResponseTool(Model):
    """A function; tools of other types are skipped."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ReasoningOptions(ReasoningField):
    """Whether to think."""

    summary: str | None = None
    """Accepted; answers carry the thinking itself."""


class TextOptions(Model):
    """The form of the text, with a schema beside its type."""

    format: ResponseFormat | None = None


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    """Goes before everything else as a system message."""
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = None
    """Capped at what the context leaves."""
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = (
        None
    )
    tool_choice: str | dict[str, object] | None = None
    """"none", "auto", "required", or the function to call."""
    parallel_tool_calls: bool | None = None
    """False keeps only the first call."""
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    """As in chats."""
    store: bool | None = None
    """False: later requests cannot refer to the answer."""
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    """An answer that is kept: its conversation goes before the input."""
    background: bool | None = None
    """Not supported."""


INCLUDES = (
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What may be asked for in `include`: thinking is in the answer anyway, and not encrypted.

The others are parts of items that no answer has, since the tools that make them are skipped.
"""


def check(body: ResponsesRequest) -> None:
    """Refuses by name what would have to be ignored.

    Raises:
        RequestError: naming the field.
    """
    if body.background:
        raise RequestError("background is not supported.", "background")
    if body.reasoning is not None and body.reasoning.exclude:
        raise RequestError("reasoning.exclude is not supported for responses.", "reasoning")
    refuse_choices(body, "responses")
    check_include(body.include or ())


def check_include(names: Sequence[str]) -> None:
    """Refuses to include what would have to be left out.

    Raises:
        RequestError: naming it.
    """
    for name in names:
        if name not in INCLUDES:
            raise RequestError(f"include: {name[:64]!r} is not supported.", "include")


def refuse_choices(body: GenerationFields, what: str) -> None:
    """Refuses what has no place in answers of one message without token ids.

    Raises:
        RequestError: naming the field.
    """
    if body.n not in (None, 1):
        raise RequestError(f"n is not supported for {what}.", "n")
    if body.speculative is not None and body.speculative.detailed:
        raise RequestError(
            f"speculative.detailed is not supported for {what}: /v1/chat/completions and "
            "/v1/completions report steps.",
            "speculative",
        )
    if body.prompt_logprobs is not None:
        raise RequestError(f"prompt_logprobs is not supported for {what}.", "prompt_logprobs")
    for name in ("return_token_ids", "return_tokens_as_token_ids"):
        if body.__dict__[name]:
            raise RequestError(f"{name} is not supported for {what}.", name)


def referred_items(body: ResponsesRequest) -> list[str]:
    """The ids of the items that the input only refers to."""
    items = () if isinstance(body.input, str) else body.input
    return [item.id for item in items if _is_reference(item) and item.id is not None]


def add_kept(body: ResponsesRequest, earlier: Sequence[bytes], known: Mapping[str, bytes]) -> None:
    """Makes the input the whole conversation: items in JSON for what it refers to.

    `earlier` are those before it, `known` has those that it refers to by their ids.

    Raises:
        RequestError: too many items.
    """
    given = body.input
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    whole = [InputItem.model_validate_json(item) for item in earlier]
    for item in items:
        if _is_reference(item):
            if item.id is None:
                raise RequestError("input: an item without content needs an id.", "input")
            item = InputItem.model_validate_json(known[item.id])
        whole.append(item)
    if len(whole) > MAX_MESSAGES:
        raise RequestError(f"input: the conversation has over {MAX_MESSAGES} items.", "input")
    body.input = whole


def _is_reference(item: InputItem) -> bool:
    is_bare = item.type is None and item.role is None and item.content is None
    return item.type == "item_reference" or is_bare


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The conversation of a Responses request as a chat request.

    Raises:
        RequestError: naming an item, a part or a tool that this server cannot take.
    """
    return ChatCompletionRequest.model_construct(
        messages=_messages(body),
        tools=functions(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=body.text.format if body.text is not None else None,
        reasoning=body.reasoning,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def functions(body: ResponsesRequest) -> list[Tool] | None:
    """The tools that are functions; None if there are none.

    Raises:
        RequestError: one without a name.
    """
    result = []
    for tool in body.tools or ():
        if tool.type != "function":
            continue
        if tool.name is None or not 1 <= len(tool.name) <= 256:
            raise RequestError("tools: a function needs a name of 1 to 256 characters.", "tools")
        result.append(function_tool(tool.name, tool.description, tool.parameters, tool.strict))
    return result or None


def _tool_choice(body: ResponsesRequest) -> str | dict[str, object] | None:
    """The choice; of `allowed_tools` those are skipped that are skipped in `tools`."""
    choice = body.tool_choice
    listed = choice.get("tools") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(listed, list):
        return choice
    skipped = skipped_types(body)
    kept = [one for one in listed if not isinstance(one, dict) or one.get("type") not in skipped]
    is_text = listed and not kept and choice.get("mode") == "auto"
    return "none" if is_text else {**choice, "tools": kept}


def skipped_types(body: ResponsesRequest) -> set[str]:
    """Types of the tools that are no functions."""
    return {tool.type for tool in body.tools or () if tool.type != "function"}


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Items as messages. Those of one answer become one message, as the model wrote it."""
    parts: list[Parts] = []
    if body.instructions:
        parts.append(Parts("system", [body.instructions]))
    items = body.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    is_open = False  # whether the last message is an answer that goes on
    is_begin = True  # whether there are only system messages
    for item in items:
        kind = item.type or "message"
        if kind == "message" and item.role == "assistant":
            if not is_open or any(parts[-1].texts) or parts[-1].calls:
                parts.append(Parts("assistant"))
            parts[-1].texts = [_text(item.content, "content")]
            is_open = True
        elif kind == "message":
            _add_message(parts, item, is_begin)
            is_open = False
        elif kind in ("reasoning", "function_call"):
            goes_on = is_open and (kind == "function_call" or not any(parts[-1].texts))
            if not goes_on:
                parts.append(Parts("assistant"))
            _add_to_answer(parts[-1], item)
            is_open = True
        elif kind == "function_call_output":
            parts.append(Parts("tool", [_text(item.output, "output")], item.call_id))
            is_open = False
        else:
            raise RequestError(
                f"input: items of type {kind[:64]!r} are not supported, only messages, reasoning, "
                "function_call, function_call_output and item_reference.",
                "input",
            )
        is_begin = is_begin and parts[-1].role == "system"
    return joined(parts, "\n\n")


def _add_message(parts: list[Parts], item: InputItem, is_begin: bool) -> None:
    if item.role is None:
        raise RequestError("input: a message needs a role.", "input")
    content = _text(item.content, "content")
    if item.role == "user":
        parts.append(Parts("user", [content]))
    elif is_begin and parts:
        parts[-1].texts.append(content)  # templates take one system message in front
    else:
        parts.append(Parts("system", [content]))


def _add_to_answer(answer: Parts, item: InputItem) -> None:
    if item.type == "reasoning":
        answer.thinking.append(_text(item.content or item.summary or "", "reasoning"))
        return
    if item.name is None or item.call_id is None:
        raise RequestError("input: a function_call needs call_id and name.", "input")
    function = FunctionCall(name=item.name, arguments=item.arguments)
    answer.calls.append(ToolCall(id=item.call_id, type="function", function=function))


def _text(content: Content | None, where: str) -> str:
    if content is None:
        raise RequestError(f"input: {where} is missing.", "input")
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.text if part.type in _THOUGHTS else part.said()
        if text is None:
            raise RequestError(
                f"input: parts of type {part.type[:64]!r} are not supported, only text.", "input"
            )
        texts.append(text)
    return "\n".join(texts)
