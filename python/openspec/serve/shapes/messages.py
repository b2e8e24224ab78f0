"""What requests to /v1/messages may contain, and what they mean as a chat."""

from __future__ import annotations

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
    JsonSchemaFormat,
    Model,
    ResponseFormat,
    TextPart,
    ThinkingField,
    Tool,
    ToolCall,
    function_tool,
)
from openspec.serve.shapes.joined import Parts, joined
from openspec.serve.shapes.responses import refuse_choices

BILLING = "x-anthropic-billing-header"
"""Begins a line that Claude Code puts first and changes every time: no prefix would be cached."""


class ContentBlock(TextPart):
    """A part of a message: text, thinking, a call of a tool, or its result."""

    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: Content | None = None


class InputMessage(Model):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[ContentBlock], Field(fail_fast=True)]


class MessagesTool(Model):
    """A tool of the client's; tools of other types are skipped."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None


class ToolChoice(Model):
    """Whether to call tools: auto, any, tool (the one named) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None
    """True keeps only the first call."""


class OutputFormat(Model):
    """The form of the text: JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema")


class OutputConfig(Model):
    """Degrees of effort are accepted without effect."""

    format: OutputFormat | None = None


class MessagesFields(Model):
    """What makes up the prompt."""

    messages: Annotated[
        list[InputMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Content | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: ThinkingField | None = None
    """Default: as the model's template does."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""

    @property
    def form(self) -> tuple[OutputFormat | None, str]:
        """What the text must be, and the field that says so."""
        if self.output_format is not None:
            return self.output_format, "output_format"
        config = self.output_config
        return config.format if config is not None else None, "output_config.format"


class CountTokensRequest(MessagesFields):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Field(max_length=1024)] | None = None


class MessagesRequest(MessagesFields, GenerationFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE]
    """Capped at what the context leaves."""
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None


def check(body: MessagesRequest) -> None:
    """Refuses by name what would have to be ignored.

    Raises:
        RequestError: naming the field.
    """
    refuse_choices(body, "messages")
    if body.stop is not None and body.stop_sequences is not None:
        raise RequestError("stop is another name of stop_sequences; send one of them.", "stop")
    config, name = body.output_config, "output_format"
    if body.output_format and config and config.format not in (None, body.output_format):
        raise RequestError(f"{name} and output_config.format differ; send one of them.", name)
    if (body.model_extra or {}).get("thread") is not None:
        raise RequestError(
            "thread is not supported: this server keeps no messages. Send the whole conversation "
            "(with Anthropic's SDK: unsupported_request_behavior='continue_unthreaded').",
            "thread",
            "thread_unsupported_request",  # with it the SDK's tool runner does so by itself
        )


def as_chat(body: MessagesFields) -> ChatCompletionRequest:
    """The conversation of a Messages request as a chat request.

    Raises:
        RequestError: naming a block, a tool or an option that this server cannot take.
    """
    choice = body.tool_choice.type if body.tool_choice is not None else None
    if choice not in (None, "none", "auto", "any", "tool"):
        raise RequestError(
            f"tool_choice: type {choice[:64]!r} is not known, only auto, any, tool and none.",
            "tool_choice",
        )
    if choice == "tool" and not (body.tool_choice and body.tool_choice.name):
        raise RequestError("tool_choice: type 'tool' needs the name of a tool.", "tool_choice")
    messages = _messages(body)
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise RequestError("messages: a tool_use needs its tool_result after it.", "messages")
    # An answer that ends the conversation is the beginning of the one that is asked for.
    if last.role == "assistant" and not (_content_of(last) or last.reasoning_content):
        messages = messages[:-1] or [ChatMessage(role="user", content="")]
    goes_on = messages[-1].role == "assistant"
    return ChatCompletionRequest.model_construct(
        messages=messages,
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.tool_choice is None
        or not body.tool_choice.disable_parallel_tool_use,
        response_format=_response_format(body.form[0]),
        thinking=body.thinking,
        continue_final_message=goes_on,
    )


def _content_of(message: ChatMessage) -> str:
    return message.content.strip() if isinstance(message.content, str) else ""


def _tool_choice(given: ToolChoice | None) -> str | dict[str, object] | None:
    """tool_choice in the form of /v1/chat/completions."""
    if given is None or given.type in ("none", "auto"):
        return None if given is None else given.type
    if given.type == "any":
        return "required"
    return {"type": "function", "function": {"name": given.name}}


def _response_format(given: OutputFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    schema = JsonSchemaFormat.model_construct(schema_=given.schema_, strict=None)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def skipped_tools(body: MessagesFields) -> set[str]:
    """Types of the tools that are not the client's own."""
    return {tool.type for tool in body.tools or () if tool.type not in (None, "custom")} - {None}


def _tools(body: MessagesFields) -> list[Tool] | None:
    result = []
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            continue
        if not 1 <= len(tool.name) <= 256:
            raise RequestError("tools: a tool needs a name of 1 to 256 characters.", "tools")
        if tool.input_schema is None:
            raise RequestError("tools: input_schema is missing.", "tools")
        result.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return result or None


def _messages(body: MessagesFields) -> list[ChatMessage]:
    """Messages of one role in a row are one, as Anthropic's API has it."""
    parts: list[Parts] = []
    system = _system(body.system) if body.system is not None else ""
    if system:
        parts.append(Parts("system", [system]))
    for message in body.messages:
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [ContentBlock(type="text", text=blocks)]
        if message.role == "assistant":
            if not parts or parts[-1].role != "assistant":
                parts.append(Parts("assistant"))
            for block in blocks:
                _add_to_answer(parts[-1], block)
        else:
            for block in blocks:
                _add_to_turn(parts, message.role, block)
    return joined(parts, "\n")


def _system(system: Content) -> str:
    texts = [system] if isinstance(system, str) else [_text(block, "system") for block in system]
    kept = [text.partition("\n")[2] if text.startswith(BILLING) else text for text in texts]
    return "\n".join(text for text in kept if text.strip())


def _add_to_turn(parts: list[Parts], role: Literal["system", "user"], block: ContentBlock) -> None:
    if block.type == "tool_result" and role == "user":
        if block.tool_use_id is None:
            raise RequestError("messages: a tool_result needs tool_use_id.", "messages")
        given = block.content or ""
        texts = [given] if isinstance(given, str) else [_text(part, "messages") for part in given]
        parts.append(Parts("tool", texts or [""], block.tool_use_id))
        return
    text = _text(block, "messages")
    if role == "user" and parts and parts[-1].role == "user":
        parts[-1].texts.append(text)
    else:
        parts.append(Parts(role, [text]))


def _add_to_answer(answer: Parts, block: ContentBlock) -> None:
    if block.type == "redacted_thinking":
        return  # another server's, which only that one can read
    if block.type == "thinking":
        answer.thinking.append(block.thinking or "")
    elif block.type == "tool_use":
        if block.id is None or block.name is None:
            raise RequestError("messages: a tool_use needs id and name.", "messages")
        function = FunctionCall(name=block.name, arguments=block.input or {})
        answer.calls.append(ToolCall(id=block.id, type="function", function=function))
    else:
        answer.texts.append(_text(block, "messages"))


def _text(block: TextPart, where: str) -> str:
    text = block.said()
    if text is None:
        raise RequestError(
            f"{where}: blocks of type {block.type[:64]!r} are not supported here, only text.", where
        )
    return text
