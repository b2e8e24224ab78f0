"""The grammar of a whole answer: thinking, then calls, then content, as a request demands.

It is one grammar, so that the engine needs to know of no parts: where thinking ends within a run of
drafts, the mask of the next row is the schema's. All of this runs in the compile process.

Errors are RequestErrors without the field's name before the message. Their `param` is `tools`, or
None where it is the content's field, which only the front knows.
"""

from __future__ import annotations

from typing import cast

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
    sequence,
    text,
    with_tokens,
)
from openspec.grammar.schemas.constraints import Budget
from openspec.grammar.schemas.schema import enforceable
from openspec.grammar.schemas.strict import check_strict
from openspec.grammar.tags import structural_tag_format
from openspec.messages import StructuredOutputs
from openspec.text.grammars.call_grammars import (
    NO_ARGUMENTS,
    CallRule,
    calls_format,
    text_or_calls_format,
)
from openspec.text.grammars.demand import CallDemand, Demand, ToolDemand
from openspec.text.json_reader import read_json
from openspec.text.parsers.pieces import THINK_CLOSE, THINK_OPEN
from openspec.text.parsers.value_types import NO_TYPES, value_types

GAP = r"\u{a}{0,2}"
"""Line ends between thinking, calls and content."""
TOOLS = "tools"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def answer_format(demand: Demand) -> Format:
    """What the compiler takes.

    Raises:
        RequestError: something in it cannot be enforced.
    """
    budget, content = Budget(), None
    if demand.content is not None:
        content = content_format(demand.content, demand.strict, budget)
    if demand.calls is None:
        assert content is not None
        return _after_thinking(demand, content)
    rules = [_rule(tool, budget) for tool in demand.calls.tools]
    return _after_thinking(demand, _with_calls(demand, demand.calls, rules, content))


def content_format(
    given: StructuredOutputs, strict: bool = False, budget: Budget | None = None
) -> Format:
    """What `structured_outputs` asks of an answer's content; `strict` as in `Demand`.

    `budget` is what is left for all schemas of the request.

    Raises:
        RequestError: nothing, several things at once, or what cannot be enforced.
    """
    wanted = [kind for kind in KINDS if getattr(given, kind) not in (None, False)]
    if len(wanted) != 1:
        found = " and ".join(wanted) or "none of them"
        raise RequestError(
            f"it takes exactly one of {', '.join(KINDS)}, got {found}; leave out the others"
        )
    if given.whitespace_pattern is not None:
        raise RequestError(
            "whitespace_pattern is not supported; disable_any_whitespace keeps JSON on one line"
        )
    kind, budget = wanted[0], budget or Budget()
    layout = "line" if given.disable_any_whitespace else "indented"
    if kind == "json":
        schema = _read(given.json, "json")
        if strict:
            check_strict(schema)
        return json_of(enforceable(schema, budget), layout)
    if kind == "json_object":
        return json_of(ANY_OBJECT, layout)
    if kind == "regex":
        return regex_format(given.regex or "")
    if kind == "choice":
        return choice_format(given.choice or ())
    if kind == "grammar":
        return grammar_format(given.grammar or "")
    return structural_tag_format(_read(given.structural_tag, "structural_tag"), budget)


def _read(given: object, name: str) -> JsonValue:
    """A schema or a tag, which may come as text."""
    if not isinstance(given, str):
        return cast("JsonValue", given)
    return cast("JsonValue", read_json(given.encode(), name))


def _with_calls(
    demand: Demand, calls: CallDemand, rules: list[CallRule], content: Format | None
) -> Format:
    shape = {"has_names": demand.names_calls, "parallel": calls.parallel}
    if not calls.must_come and content is None:
        free = text_or_calls_format(demand.form, rules, **shape)
        return with_tokens(free, demand.tags)
    body = with_tokens(calls_format(demand.form, rules, **shape), demand.tags)
    if content is None:
        return body
    return choice(content, sequence(body, optional(sequence(pattern(GAP), content))))


def _after_thinking(demand: Demand, body: Format) -> Format:
    opening, closing = (with_tokens(text(tag), demand.tags) for tag in (THINK_OPEN, THINK_CLOSE))
    rest = sequence(any_text([THINK_CLOSE]), closing, pattern(GAP))
    if demand.thinking is None or not (demand.thinking or demand.may_think):
        return body
    if demand.thinking:
        return sequence(rest, body)
    if demand.reasoning == "deepseek_r1":  # its first tag may be missing, the last may not
        return sequence(optional(opening), rest, body)
    return sequence(optional(sequence(opening, rest)), body)


def _rule(tool: ToolDemand, budget: Budget) -> CallRule:
    """A call's grammar: by its schema where that is asked for, else any object."""
    if tool.free:
        return CallRule(tool.name, NO_TYPES, ANY_OBJECT)
    if tool.parameters is None:
        return CallRule(tool.name, NO_TYPES, NO_ARGUMENTS)
    schema = _read(tool.parameters, tool.name)
    try:
        if tool.strict:
            check_strict(schema)
        arguments = enforceable(_of_objects(schema), budget)
        return CallRule(tool.name, value_types(schema), arguments, tool.lenient)
    except RequestError as error:
        if tool.lenient:
            return CallRule(tool.name, NO_TYPES, ANY_OBJECT)
        hint = "" if tool.strict else "; or send strict: false, which then allows any JSON object"
        raise RequestError(f"{tool.name[:100]}: {error}{hint}", TOOLS) from None


def _of_objects(schema: JsonValue) -> JsonValue:
    """The part of a schema that allows objects alone: arguments are always one."""
    if not isinstance(schema, dict):
        return schema
    given = schema.get("type")
    names = ["object"] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return schema
    if "object" not in names:
        raise RequestError("#/type: the arguments of a call are an object; it must be 'object'")
    return {**schema, "type": "object", "nullable": None}
