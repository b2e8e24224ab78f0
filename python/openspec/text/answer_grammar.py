"""The grammar of a whole answer: thinking, then calls, then content, as a request demands.

It is one grammar, so that the engine needs to know of no parts: where thinking ends within a run of
drafts, the mask of the next row is the schema's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.grammar.formats import (
    ANY_OBJECT,
    Format,
    any_text,
    choice,
    choice_format,
    grammar_format,
    json_of,
    optional,
    pattern,
    regex_format,
    rewritten,
    schema_format,
    sequence,
    source_of,
    structural_tag_format,
    text,
)
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.strict import check_strict
from openspec.messages import StructuredOutputs
from openspec.text.json_values import plain_json
from openspec.text.parsers.call_grammars import (
    NO_ARGUMENTS,
    CallRule,
    calls_format,
    text_or_calls_format,
)
from openspec.text.parsers.message import AnswerForm
from openspec.text.parsers.reasoning import THINK_CLOSE, THINK_OPEN

GAP = r"\u{a}{0,2}"
"""Line ends between thinking, calls and content."""


@dataclass(frozen=True, slots=True)
class GrammarTool:
    """A tool, as a request has it."""

    name: str
    parameters: JsonValue
    strict: bool | None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which calls an answer may or must hold."""

    tools: Sequence[GrammarTool]
    choice: str
    """`auto`, `required`, or `named`: exactly one call of the only tool."""
    parallel: bool


def content_format(given: StructuredOutputs, param: str) -> Format:
    """What `structured_outputs` asks of an answer's content.

    Raises:
        RequestError: nothing, several things at once, or what cannot be enforced.
    """
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    wanted = [kind for kind in kinds if getattr(given, kind) not in (None, False)]
    if len(wanted) != 1:
        found = " and ".join(wanted) or "none of them"
        raise RequestError(
            f"{param}: it takes exactly one of {', '.join(kinds)}, got {found}; leave out the "
            "others",
            param,
        )
    if given.whitespace_pattern is not None:
        raise RequestError(
            f"{param}: whitespace_pattern is not supported; disable_any_whitespace keeps JSON on "
            "one line",
            param,
        )
    kind = wanted[0]
    layout = "line" if given.disable_any_whitespace else "indented"
    if kind == "json":
        try:
            schema = json.loads(given.json) if isinstance(given.json, str) else given.json
        except (ValueError, RecursionError):
            raise RequestError(f"{param}: json is no JSON schema", param) from None
        return json_of(rewritten(plain_json(schema, param), param), layout)
    if kind == "json_object":
        return json_of(ANY_OBJECT, layout)
    if kind == "regex":
        return regex_format(given.regex or "", param)
    if kind == "choice":
        return choice_format(given.choice or (), param)
    if kind == "grammar":
        return grammar_format(given.grammar or "", param)
    return structural_tag_format(plain_json(given.structural_tag, param), param)


def strict_schema_format(schema: JsonValue, strict: bool, param: str) -> Format:
    """JSON of the schema in a `response_format`.

    Raises:
        RequestError: it cannot be enforced, or breaks the rules of strict ones.
    """
    if strict:
        _check_strict(schema, param, param)
    return schema_format(schema, param)


def answer_source(
    form: AnswerForm,
    thinking: bool | None,
    content: Format | None,
    tools: ToolUse | None,
    param: str,
) -> str | None:
    """The source of an answer's grammar; None where the answer is free.

    `thinking` as in `MessageParser`; `param` names the content's field in errors.

    Raises:
        RequestError: a tool's parameters cannot be enforced, or all together are too large.
    """
    body = content
    if tools is not None and (tools.choice != "auto" or content or _any_strict(tools)):
        rules = [_rule(tool, tools.choice) for tool in tools.tools]
        parallel = tools.parallel and tools.choice != "named"
        shape = {"has_names": form.names_calls, "parallel": parallel}
        if tools.choice == "auto" and content is None:
            body = text_or_calls_format(form.calls, rules, **shape)
        else:
            body = calls_format(form.calls, rules, **shape)
            if content is not None:
                body = choice(content, sequence(body, optional(sequence(pattern(GAP), content))))
            param = "tools"
    if body is None:
        return None
    return source_of(_after_thinking(form, thinking, body), param)


def _after_thinking(form: AnswerForm, thinking: bool | None, body: Format) -> Format:
    rest = sequence(any_text([THINK_CLOSE]), text(THINK_CLOSE), pattern(GAP))
    if thinking is None or not (thinking or form.may_think):
        return body
    if thinking:
        return sequence(rest, body)
    block = sequence(text(THINK_OPEN), rest)
    if form.reasoning == "deepseek_r1":  # its first tag may be missing, the last may not
        return sequence(optional(text(THINK_OPEN)), rest, body)
    return sequence(optional(block), body)


def _any_strict(tools: ToolUse) -> bool:
    return any(tool.strict for tool in tools.tools)


def _rule(tool: GrammarTool, chosen: str) -> CallRule:
    """A call's grammar: by its schema where that is asked for, else any object."""
    place = f"tools: {tool.name[:100]}"
    if tool.parameters is None:
        return CallRule(tool.name, None, NO_ARGUMENTS)
    if tool.strict:
        _check_strict(tool.parameters, "tools", place)
    if tool.strict is False or (not tool.strict and chosen == "auto"):
        return CallRule(tool.name, tool.parameters, ANY_OBJECT)
    try:
        arguments = rewritten(tool.parameters, "tools", place)
    except RequestError as error:
        if tool.strict:
            raise
        raise RequestError(
            f"{error}; or send strict: false, which asks for any JSON object", "tools"
        ) from None
    return CallRule(tool.name, tool.parameters, arguments)


def _check_strict(schema: JsonValue, param: str, place: str) -> None:
    try:
        check_strict(schema)
    except Unenforceable as error:
        raise RequestError(f"{place}: {error}", param) from None
