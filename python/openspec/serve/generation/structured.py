"""What requests of every API ask of the form of their answers, in one place."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from openspec.errors import RequestError
from openspec.grammar.formats import Format, source_of
from openspec.messages import StructuredOutputs
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.chat import ChatCompletionRequest, GenerationFields, ResponseFormat, Tool
from openspec.text.answer_grammar import (
    GrammarTool,
    ToolUse,
    answer_source,
    content_format,
    strict_schema_format,
)
from openspec.text.json_values import plain_json

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Older names of vLLM's, each of a field of `structured_outputs`."""


def content_of(
    body: GenerationFields, given: ResponseFormat | None, param: str = "response_format"
) -> tuple[Format | None, str]:
    """What the answer's content must be, and the field that says so.

    Raises:
        RequestError: two fields say something, or it cannot be enforced.
    """
    wanted = [name for name in (*GUIDED, "structural_tag", "structured_outputs")
              if getattr(body, name) is not None]  # fmt: skip
    if given is not None and given.type != "text":
        wanted.append(param)
    if not wanted:
        return None, param
    if len(wanted) > 1:
        raise RequestError(
            f"{' and '.join(wanted)} exclude each other; leave out all but one", wanted[0]
        )
    if body.ignore_eos:
        raise RequestError(f"ignore_eos and {wanted[0]} exclude each other", "ignore_eos")
    name = wanted[0]
    if name == param and given is not None:
        return _of_response_format(given, param), param
    if name == "structured_outputs":
        fields = plain_json(body.structured_outputs, name)
    else:
        fields = {name.removeprefix("guided_"): plain_json(getattr(body, name), name)}
    try:
        structured = msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}: {error}", name) from None
    known = set(StructuredOutputs.__struct_fields__)
    if isinstance(fields, Mapping) and (unknown := set(fields) - known):
        raise RequestError(
            f"{name}: unknown key {min(unknown)[:64]!r}; known are {', '.join(sorted(known))}", name
        )
    return content_format(structured, name), name


def _of_response_format(given: ResponseFormat, param: str) -> Format:
    if given.type == "json_object":
        return content_format(StructuredOutputs(json_object=True), param)
    if given.type == "structural_tag":
        tag = plain_json(given.model_extra, param)
        return content_format(msgspec.convert({"structural_tag": tag}, StructuredOutputs), param)
    if given.type != "json_schema":
        raise RequestError(
            f"{param}: type {given.type[:64]!r} is not supported; known are text, json_object, "
            "json_schema and structural_tag",
            param,
        )
    inner = given.json_schema
    if inner is None or inner.schema_ is None:
        raise RequestError(f"{param}: json_schema.schema is missing", param)
    return strict_schema_format(plain_json(inner.schema_, param), bool(inner.strict), param)


def chosen_tools(chat: ChatCompletionRequest) -> tuple[str, list[Tool]]:
    """How calls are chosen ("none", "auto", "required" or "named"), and among which tools.

    Raises:
        RequestError: `tool_choice` is none, or asks for a tool that is not there.
    """
    wanted, tools = chat.tool_choice, chat.tools or []
    names = [tool.function.name for tool in tools]
    choice = wanted if isinstance(wanted, str) else "auto"
    if isinstance(wanted, dict):
        function = wanted.get("function")
        name = function.get("name") if isinstance(function, dict) else wanted.get("name")
        if wanted.get("type") != "function" or not isinstance(name, str):
            raise RequestError(
                "tool_choice: an object must be {'type': 'function', 'function': {'name': ...}}.",
                "tool_choice",
            )
        if name not in names:
            raise RequestError(f"tool_choice: no tool is called {name[:100]!r}.", "tool_choice")
        tools, choice = [tools[names.index(name)]], "named"
    elif choice not in ("none", "auto", "required"):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or name a function.", "tool_choice"
        )
    if choice != "none" and wanted is not None and not tools:
        raise RequestError(f"tool_choice {choice!r} needs tools.", "tool_choice")
    if choice != "none" and len(set(names)) < len(names):
        raise RequestError("tools: two have the same name.", "tools")
    return choice, tools


def tool_use(chat: ChatCompletionRequest) -> ToolUse | None:
    """Which calls the answer may hold; None for none.

    Raises:
        RequestError: as `chosen_tools`, or a schema is nested too deeply.
    """
    choice, tools = chosen_tools(chat)
    if choice == "none" or not tools:
        return None
    listed = [
        GrammarTool(
            tool.function.name,
            plain_json(tool.function.parameters, "tools"),
            tool.function.strict,
        )
        for tool in tools
    ]
    return ToolUse(listed, choice, chat.parallel_tool_calls is not False)


def chat_source(
    context: ServerContext,
    body: GenerationFields,
    chat: ChatCompletionRequest,
    thinking: bool | None,
    param: str,
) -> tuple[str | None, str]:
    """The source of the grammar of a chat's answer, and the field that asks for it.

    Raises:
        RequestError: naming the field.
    """
    content, content_param = content_of(body, chat.response_format, param)
    tools = tool_use(chat)
    if content is not None and tools is not None and tools.choice != "auto":
        raise RequestError(
            f"{content_param} asks for text, and tool_choice for a call; leave out one of them, or "
            "say tool_choice 'auto'",
            content_param,
        )
    source = answer_source(context.answer_form, thinking, content, tools, content_param)
    if source is not None and body.ignore_eos:
        raise RequestError(
            "ignore_eos and strict or required tools exclude each other", "ignore_eos"
        )
    return source, content_param if content is not None else "tools"


def completion_source(
    body: GenerationFields, given: ResponseFormat | None
) -> tuple[str | None, str]:
    """The source of the grammar of a completion's text, and the field that asks for it.

    Raises:
        RequestError: naming the field.
    """
    content, param = content_of(body, given)
    return (None if content is None else source_of(content, param)), param
