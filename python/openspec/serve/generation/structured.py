"""What requests of every API ask of the form of their answers, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from pydantic import ValidationError

from openspec.errors import RequestError, wrong_type
from openspec.messages import StructuredOutputs
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.chat import (
    ChatCompletionRequest,
    FunctionDefinition,
    GenerationFields,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
)
from openspec.text.grammars.demand import CallDemand, Demand, ToolDemand, chat_demand

OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Older names of vLLM's and names of SGLang's, each with its key in `structured_outputs`."""

_BESIDE_TYPE = {
    "schema": "an object",
    "name": "a text of at most 256 characters",
    "description": "a text",
    "strict": "true or false",
}
"""What may stand beside the type of a form of JSON."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the answer's content must be."""

    content: StructuredOutputs | None
    """None: it is free."""
    param: str
    """The field that says so."""
    strict: bool = False
    """Its schema must keep the rules of strict ones."""


def content_of(
    body: GenerationFields, given: ResponseFormat | None, param: str = "response_format"
) -> Wanted:
    """What a body wants of the content; `given` came in its field `param`.

    Raises:
        RequestError: two fields say something, or one of them what no answer can be.
    """
    names = (*OTHER_NAMES, "structured_outputs")
    wanted = [name for name in names if getattr(body, name) is not None]
    if given is not None and given.type != "text":
        wanted.append(param)
    if not wanted:
        return Wanted(None, param)
    demands = [_demand_of(body, name) for name in wanted if name != param]
    if len(wanted) > 1 and (param in wanted or any(one != demands[0] for one in demands)):
        raise RequestError(
            f"{' and '.join(wanted)} exclude each other; leave out all but one", wanted[0]
        )
    name = wanted[-1]
    _check_ends(body, name)
    if name == param and given is not None:
        return _of_response_format(given, param)
    fields, known = demands[-1], set(StructuredOutputs.__struct_fields__)
    if unknown := set(fields) - known:
        raise RequestError(
            f"{name}: unknown key {min(unknown)[:64]!r}; known are {', '.join(sorted(known))}", name
        )
    return Wanted(_structured(fields, name), name)


def _demand_of(body: GenerationFields, name: str) -> dict[str, object]:
    """What a field says, by the keys of `structured_outputs`."""
    if name in OTHER_NAMES:
        return {OTHER_NAMES[name]: getattr(body, name)}
    return body.structured_outputs or {}


def _check_ends(body: GenerationFields, name: str) -> None:
    """Refuses what would have the answer end elsewhere than its grammar."""
    for other in ("ignore_eos", "min_tokens"):
        if getattr(body, other):
            raise RequestError(f"{other} and {name} exclude each other", other)


def _structured(fields: object, param: str) -> StructuredOutputs:
    try:
        return msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise RequestError(f"{param}: {wrong_type(error)}", param) from None


def _of_response_format(given: ResponseFormat, param: str) -> Wanted:
    if given.type == "structural_tag":
        return Wanted(_structured({"structural_tag": given.model_extra}, param), param)
    if given.type not in ("json_schema", "json_object"):
        raise RequestError(
            f"{param}: type {given.type[:64]!r} is not supported; known are text, json_object, "
            "json_schema and structural_tag; structured_outputs takes a regex, a choice or a "
            "grammar",
            param,
        )
    inner = _schema_of(given, param)
    if given.type == "json_object" and inner.schema_ is None:
        return Wanted(StructuredOutputs(json_object=True), param)
    if inner.schema_ is None:
        where = "json_schema.schema" if param == "response_format" else "schema"
        raise RequestError(f"{param}: {where} is missing", param)
    return Wanted(StructuredOutputs(json=inner.schema_), param, bool(inner.strict))


def _schema_of(given: ResponseFormat, param: str) -> JsonSchemaFormat:
    """A schema in an object of its own, or beside the type as Responses and llama.cpp have it."""
    beside = {key: value for key, value in (given.model_extra or {}).items() if value is not None}
    if unknown := beside.keys() - _BESIDE_TYPE:
        known = ", ".join(_BESIDE_TYPE)
        raise RequestError(f"{param}: unknown key {min(unknown)[:64]!r}; known are {known}", param)
    if given.json_schema is not None:
        if "schema" in beside:
            raise RequestError(f"{param}: send schema or json_schema, not both", param)
        return given.json_schema
    try:
        return JsonSchemaFormat.model_validate(beside)
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        raise RequestError(f"{param}: {name} must be {_BESIDE_TYPE[str(name)]}", param) from None


def chosen_tools(chat: ChatCompletionRequest) -> tuple[str, list[Tool]]:
    """How calls are chosen ("none", "auto", "required" or "named"), and among which tools.

    "auto" without tools is text, as in OpenAI's API.

    Raises:
        RequestError: `tool_choice` is no choice, or asks for a tool that is not there.
    """
    tools = chat.tools or []
    known = {tool.function.name: tool for tool in tools}
    choice, names = _choice(chat.tool_choice)
    if choice != "none" and len(known) < len(tools):
        raise RequestError("tools: two have the same name.", "tools")
    for name in names or ():
        if name not in known:
            raise RequestError(
                f"tool_choice: no usable tool is called {name[:100]!r}.", "tool_choice"
            )
    if names is not None:
        tools = [known[name] for name in dict.fromkeys(names)]
    if choice == "required" and not tools:
        raise RequestError(
            "tool_choice: a call that must come needs tools, and there is no function among them; "
            "send one, or leave out tool_choice.",
            "tool_choice",
        )
    return choice, tools


def must_call(chat: ChatCompletionRequest) -> bool:
    """Whether a call must come.

    Raises:
        RequestError: as `chosen_tools`.
    """
    return chosen_tools(chat)[0] in ("required", "named")


def _choice(wanted: str | dict[str, object] | None) -> tuple[str, list[str] | None]:
    """How calls are chosen, and the names of the tools to choose among; None: all."""
    if not isinstance(wanted, dict):
        if wanted not in (None, "none", "auto", "required"):
            raise RequestError(
                "tool_choice must be 'none', 'auto', 'required' or name a function.", "tool_choice"
            )
        return wanted or "auto", None
    if wanted.get("type") == "function":
        return "named", [_function_name(wanted, "an object")]
    inner = wanted.get("allowed_tools", wanted)  # chats have an object in the object
    mode = inner.get("mode") if isinstance(inner, dict) else None
    tools = inner.get("tools") if isinstance(inner, dict) else None
    if wanted.get("type") != "allowed_tools" or mode not in ("auto", "required") or not tools:
        raise RequestError(
            "tool_choice: an object must be {'type': 'function', 'function': {'name': ...}}, or "
            "have the type 'allowed_tools', the mode 'auto' or 'required', and tools.",
            "tool_choice",
        )
    listed = tools if isinstance(tools, list) else [tools]
    return mode, [_function_name(tool, "each of allowed_tools") for tool in listed]


def _function_name(given: object, what: str) -> str:
    """The name in the object that names a function, in the form of chats or of responses."""
    function = given.get("function", given) if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice: {what} must be {{'type': 'function', 'function': {{'name': ...}}}}.",
            "tool_choice",
        )
    return name


def call_demand(chat: ChatCompletionRequest) -> CallDemand | None:
    """Which calls the answer may hold; None for none.

    Raises:
        RequestError: as `chosen_tools`.
    """
    choice, tools = chosen_tools(chat)
    if choice == "none" or not tools:
        return None
    calls = [_tool_demand(tool.function, is_forced=choice != "auto") for tool in tools]
    parallel = chat.parallel_tool_calls is not False and choice != "named"
    return CallDemand(
        tools=calls,
        must_come=choice != "auto",
        parallel=parallel,
        closed=choice == "auto" and len(tools) < len(chat.tools or ()),
    )


def _tool_demand(tool: FunctionDefinition, is_forced: bool) -> ToolDemand:
    """Arguments keep to the schema where that is asked for, or where the call is."""
    is_free = not tool.strict and not is_forced and tool.parameters is not None
    return ToolDemand(
        name=tool.name,
        parameters=None if is_free else tool.parameters,
        strict=bool(tool.strict),
        free=is_free,
        lenient=tool.strict is False,
    )


def encoded_chat_demand(
    context: ServerContext,
    body: GenerationFields,
    chat: ChatCompletionRequest,
    thinking: bool | None,
    param: str,
) -> tuple[bytes | None, str]:
    """What the compiler takes for a chat's answer (None: it is free), and the field that asks.

    Raises:
        RequestError: naming the field.
    """
    wanted, calls = content_of(body, chat.response_format, param), call_demand(chat)
    if calls is not None and calls.must_come:
        # The call comes now. The form of the content is for a later turn, which repeats the demand.
        wanted = Wanted(None, wanted.param)
    if chat.continue_final_message and thinking is None and wanted.content is not None:
        raise RequestError(
            f"{wanted.param} and an assistant's last message with which the answer goes on exclude "
            "each other: no grammar made that text",
            wanted.param,
        )
    demand = chat_demand(context.answer_form, thinking, wanted.content, calls, wanted.strict)
    if demand is None:
        return None, wanted.param
    field = wanted.param if wanted.content is not None else "tools"
    _check_ends(body, "strict or required tools")
    return demand.encoded(field), field


def encoded_completion_demand(
    body: GenerationFields, given: ResponseFormat | None
) -> tuple[bytes | None, str]:
    """The same for a completion's text.

    Raises:
        RequestError: naming the field.
    """
    wanted = content_of(body, given)
    if wanted.content is None:
        return None, wanted.param
    demand = Demand(content=wanted.content, strict=wanted.strict)
    return demand.encoded(wanted.param), wanted.param
