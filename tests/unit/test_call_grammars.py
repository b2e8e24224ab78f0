"""What a grammar of calls allows, the parser of the same form reads as calls that fit the tools."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest

from openspec import _grammar
from openspec.errors import RequestError
from openspec.grammar.formats import Format
from openspec.grammar.schemas.schema import enforceable
from openspec.messages import StructuredOutputs
from openspec.text.grammars.answer_grammar import answer_format
from openspec.text.grammars.call_grammars import (
    NO_ARGUMENTS,
    CallRule,
    calls_format,
    text_or_calls_format,
)
from openspec.text.grammars.demand import CallDemand, Demand, ToolDemand, chat_demand
from openspec.text.parsers.message import CALL_PARSERS, AnswerForm, MessageParser
from openspec.text.parsers.pieces import CallArguments, CallStart, Content, Reasoning
from openspec.text.parsers.value_types import types_of_tools, value_types
from tests.unit.grammar_walks import accepts, answers, compiled, tokenizer, vocabulary, walk

TOOLS = {
    "get": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
            "at": {"$ref": "#/$defs/at"},
            "day": {"type": "string", "format": "date"},
            "note": {"type": ["string", "null"]},
            "code": {"type": "string", "pattern": "^[a-z<]{2,4}$"},
        },
        "required": ["city", "n", "at"],
        "$defs": {
            "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
        },
    },
    "now": {"type": "object", "properties": {}},
    "free": {"type": "object"},
}


def rule_of(name: str, schema: dict) -> CallRule:
    return CallRule(name, value_types(schema), enforceable(schema))


RULES = [rule_of(name, schema) for name, schema in TOOLS.items()]
FORMS = [
    ("hermes", True),
    ("llama3_json", True),
    ("mistral", True),
    ("mistral", False),
    ("qwen3_coder", True),
]


def parsed(
    form: str, text: str, thinking: bool | None = None, tools: dict = TOOLS
) -> tuple[list, str, str]:
    answer_form = AnswerForm(form, "qwen3", frozenset(), frozenset())
    parser = MessageParser(
        tokenizer(),
        answer_form,
        thinking=thinking,
        tools=answer_form.tool_types(tools),
        max_calls=None,
    )
    calls: dict[int, list[str]] = {}
    content = reasoning = ""
    for piece in parser.push(text, [], is_last=True):
        if isinstance(piece, CallStart):
            calls[piece.index] = [piece.name, ""]
        elif isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
        elif isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
    return list(calls.values()), content, reasoning


@pytest.mark.parametrize(("form", "has_names"), FORMS)
@pytest.mark.parametrize("parallel", [True, False])
def test_guaranteed_calls_parse(form: str, has_names: bool, parallel: bool) -> None:
    data = compiled(calls_format(form, RULES, has_names=has_names, parallel=parallel))
    found = answers(data, 16 if form == "qwen3_coder" else 6)
    assert found
    for text in found:
        calls, content, _ = parsed(form, text)
        assert calls and not content.strip(), text
        assert parallel or len(calls) == 1, text
        for name, arguments in calls:
            jsonschema.Draft202012Validator(TOOLS[name]).validate(json.loads(arguments))


@pytest.mark.parametrize(("form", "has_names"), FORMS)
@pytest.mark.parametrize("parameters", [None, TOOLS["now"]], ids=["none", "empty"])
def test_a_tool_without_parameters_ends(form: str, has_names: bool, parameters: object) -> None:
    """Whatever a model prefers, its call is over within a few characters, and reads as `{}`."""
    arguments = NO_ARGUMENTS if parameters is None else enforceable(CLOSED)
    rule = CallRule("now", value_types(parameters), arguments)
    data = compiled(calls_format(form, [rule], has_names=has_names, parallel=False))
    rng = random.Random(3)
    for _ in range(10):
        text = walk(data, rng, 120)
        assert text is not None and len(text) < 120
        assert parsed(form, text)[0] == [["now", text_of_nothing(form, text)]]


CLOSED = {**TOOLS["now"], "additionalProperties": False}


def text_of_nothing(form: str, text: str) -> str:
    """The arguments in the text of a call without any: an empty object, with white space or not."""
    if form == "qwen3_coder":
        return "{}"
    [found] = re.findall(r"\{\s*\}", text)
    return found


@pytest.mark.parametrize("value", [{"maxLength": 2_000_000_000}, {"pattern": "^<+$"}], ids=str)
def test_what_bare_text_cannot_enforce_is_refused(value: dict) -> None:
    """In a form that writes bare text, lengths have a limit, and no `<` can come."""
    schema = {"type": "object", "properties": {"a": {"type": "string", **value}}, "required": ["a"]}
    rule = rule_of("get", schema)
    with pytest.raises(RequestError, match="get: 'a' cannot be enforced"):
        calls_format("qwen3_coder", [rule], has_names=True, parallel=False)


@pytest.mark.parametrize(
    ("form", "name"),
    [("qwen3_coder", one) for one in ("a>b", "a\nb", "</tool_call>", " a")]
    + [("mistral", one) for one in ("a b", "a[ARGS]{", "{")],
)
def test_names_that_the_parser_would_not_read_are_refused(form: str, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be a tool's name") as caught:
        calls_format(form, [rule_of(name, {"type": "object"})], has_names=True, parallel=False)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", ["", "a>b", "a" * 257])
def test_parameters_that_the_parser_would_not_read_are_refused(name: str) -> None:
    rule = rule_of("get", value_of(name, type="integer"))
    with pytest.raises(RequestError, match="cannot be a parameter's name"):
        calls_format("qwen3_coder", [rule], has_names=True, parallel=False)


NODE = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}


def value_of(name: str, **value: object) -> dict:
    return {"type": "object", "properties": {name: value}, "required": [name]}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        # A union that holds itself is its other options.
        (value_of("a", anyOf=[{"$ref": "#/properties/a"}, {"type": "string"}]), {"a": "x"}),
        (
            value_of("a", anyOf=[{"$ref": "#/properties/a"}] * 100 + [{"type": "string"}]),
            {"a": "x"},
        ),
        # Roots that refer or combine.
        ({"$defs": {"N": NODE}, "$ref": "#/$defs/N"}, {"id": 5}),
        ({"anyOf": [NODE]}, {"id": 5}),
        ({"oneOf": [NODE]}, {"id": 5}),
        ({"allOf": [NODE]}, {"id": 5}),
        # Values that look like tags, but are none.
        (value_of("op", enum=["<", "<="]), {"op": "<="}),
        (value_of("a", type=["string", "null"], enum=["b", None]), {"a": None}),
        (value_of("a", type="string", minLength=3), {"a": "abc"}),
    ],
    ids=str,
)
def test_what_xml_calls_can_be(schema: dict, arguments: dict) -> None:
    data = compiled(
        calls_format("qwen3_coder", [rule_of("f", schema)], has_names=True, parallel=False)
    )
    parameters = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}"
        "\n</parameter>\n"
        for name, value in arguments.items()
    )
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert accepts(data, text)
    [[_, found]] = parsed("qwen3_coder", text, tools={"f": schema})[0]
    assert json.loads(found) == arguments


def test_a_union_that_doubles_by_level_has_few_options() -> None:
    defs = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    schema = {
        **value_of("a", **{"$ref": "#/$defs/a0"}),
        "$defs": {**defs, "a40": {"type": "string"}},
    }
    assert value_types(schema) == {"a": {"string"}}
    data = compiled(
        calls_format("qwen3_coder", [rule_of("f", schema)], has_names=True, parallel=False)
    )
    for text in answers(data, 4):
        assert "a" in json.loads(parsed("qwen3_coder", text, tools={"f": schema})[0][0][1])


@pytest.mark.parametrize(
    ("counts", "fewest", "most"),
    [
        ({"minProperties": 1}, 1, 5),
        ({"minProperties": 2}, 2, 5),
        ({"maxProperties": 1}, 0, 1),
        ({"minProperties": 2, "maxProperties": 3}, 2, 3),
        ({"minProperties": 1, "maxProperties": 1, "required": ["c"]}, 1, 1),
    ],
    ids=str,
)
def test_xml_calls_have_as_many_parameters_as_they_must(
    counts: dict, fewest: int, most: int
) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 1, "maximum": 9} for name in "abcde"},
        "additionalProperties": False,
        **counts,
    }
    data = compiled(
        calls_format("qwen3_coder", [rule_of("f", schema)], has_names=True, parallel=False)
    )
    seen = set()
    for text in answers(data, 40):
        found = json.loads(parsed("qwen3_coder", text, tools={"f": schema})[0][0][1])
        jsonschema.validate(found, schema)
        seen.add(len(found))
    assert fewest in seen and max(seen) <= most
    for number in range(6):
        parameters = "".join(f"<parameter={name}>\n1\n</parameter>\n" for name in "abcde"[:number])
        text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
        fits = fewest <= number <= most and "required" not in counts
        assert accepts(data, text) == fits, text


def test_other_parameters_are_texts_where_texts_may_be() -> None:
    """The parser reads what no schema names as text."""
    form = {"has_names": True, "parallel": False}
    call = "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
    for value, fits in (({"type": "integer"}, False), ({"type": "string"}, True), (True, True)):
        rule = rule_of("f", {"type": "object", "additionalProperties": value})
        assert accepts(compiled(calls_format("qwen3_coder", [rule], **form)), call) == fits


def test_value_types_take_few_steps() -> None:
    """However often schemas refer to one another, and however many are listed."""
    listed = [{"$ref": "#/properties/a"}] * 250 + [{"type": "string"}]
    many = {f"p{i}": {"$ref": "#/properties/a"} for i in range(2000)}
    schema = {"properties": {"a": {"anyOf": listed}, **many}}
    start = time.thread_time()
    found = types_of_tools(dict.fromkeys("fgh", schema))
    assert time.thread_time() - start < 0.5
    assert found["f"]["a"] == {"string"}


def test_value_types_of_a_tool_do_not_depend_on_others() -> None:
    """The parser knows all tools, the grammar those that may be called."""
    parameters = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(60)}
    schemas = {
        f"f{i}": {"properties": parameters, "$defs": {"x": {"type": "integer"}}} for i in range(200)
    }
    assert types_of_tools(schemas) == {name: value_types(one) for name, one in schemas.items()}


SETTING = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}, "unit": {"enum": ["c"]}},
    "required": ["n", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("form", "has_names"), FORMS)
def test_required_arguments_are_never_left_out(form: str, has_names: bool) -> None:
    """Neither as nothing, nor as an empty object, nor one by one."""
    rule = rule_of("get", SETTING)
    data = compiled(calls_format(form, [rule], has_names=has_names, parallel=False))
    whole = min(answers(data, 16), key=len)
    [[name, arguments]] = parsed(form, whole)[0]
    assert name == "get" and json.loads(arguments).keys() == {"n", "unit"}
    start, end = whole.index("<parameter=" if form == "qwen3_coder" else arguments), -1
    if form == "qwen3_coder":
        parameter = "<parameter=n>\n1\n</parameter>\n"
        end, empty = whole.index("</function>"), ["", parameter, f"{parameter}{parameter}"]
    else:
        end, empty = start + len(arguments), ["", "{}", "null", '""', '{"n": 1}', '{"unit": "c"}']
    assert accepts(data, whole)
    for instead in empty:
        assert not accepts(data, whole[:start] + instead + whole[end:]), instead


CALLS = {
    "hermes": ["<tool_call>\n", '{"name": "now", "arguments": {}}', "\n</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "now[ARGS]{}"],
    "qwen3_coder": ["<tool_call>\n", "<function=now>\n</function>", "\n</tool_call>"],
}


@pytest.mark.parametrize("form", CALLS)
def test_free_text_until_a_call_begins(form: str) -> None:
    data = compiled(text_or_calls_format(form, RULES, has_names=True, parallel=True))

    def fits(text: str) -> bool:
        matcher = _grammar.Matcher(vocabulary(), data)
        return all(map(matcher.accept, tokenizer().encode(text))) and matcher.accept(4074)

    call = "".join(CALLS[form])
    assert fits("Just text, {with} [brackets].") and fits(call) and fits(f"I look.\n{call}")
    assert not fits(call.replace("now", "then"))
    assert not fits(CALLS[form][0] + "and text")


FORM = AnswerForm.of(tokenizer(), "auto", "auto")
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CONTENT = StructuredOutputs(json=OBJECT)


def demand(
    content: StructuredOutputs | None, choice: str | None, thinking: bool | None, **fields: bool
) -> Demand | None:
    tool = ToolDemand(name="now", parameters={**OBJECT, "additionalProperties": False}, **fields)
    calls = CallDemand(tools=[tool], must_come=choice != "auto", parallel=choice != "named")
    return chat_demand(FORM, thinking, content, None if choice is None else calls)


def compiled_demand(*given: Any) -> bytes:
    wanted = demand(*given)
    assert wanted is not None
    return compiled(answer_format(wanted))


def test_thinking_then_calls_then_content() -> None:
    data = compiled_demand(CONTENT, "auto", True)
    rng = random.Random(1)
    for _ in range(20):
        text = walk(data, rng, 300)
        if text is None:
            continue
        calls, content, _ = parsed("hermes", text, thinking=True)
        assert "</think>" in text
        assert calls or content
        if content.strip():
            jsonschema.validate(json.loads(content), OBJECT)
    call = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    whole = f'I think.\n</think>\n\n{call}\n{{"a": 2}}'
    matcher = _grammar.Matcher(vocabulary(), data)
    assert all(map(matcher.accept, tokenizer().encode(whole, parse_special=True)))
    assert matcher.accept(4074)
    calls, content, reasoning = parsed("hermes", whole, thinking=True)
    assert (len(calls), content.strip(), reasoning) == (1, '{"a": 2}', "I think.")


@pytest.mark.parametrize(
    ("thinking", "text", "fits"),
    [
        (None, '{"a": 1}', True),
        (None, "<think>\nx\n</think>\n\n" + '{"a": 1}', False),
        (False, '{"a": 1}', True),
        (False, "<think>\nx\n</think>\n\n" + '{"a": 1}', True),
        (True, 'x {"a": "b"}</think>{"a": 1}', True),
        (True, '{"a": 1}', False),
    ],
)
def test_content_after_thinking(thinking: bool | None, text: str, fits: bool) -> None:
    data = compiled_demand(CONTENT, None, thinking)
    matcher = _grammar.Matcher(vocabulary(), data)
    ids = tokenizer().encode(text, parse_special=True)
    assert (all(map(matcher.accept, ids)) and matcher.accept(4074)) == fits


def test_when_calls_are_free() -> None:
    assert demand(None, "auto", None) is None
    assert demand(None, "auto", None, strict=True) is not None
    for choice in ("required", "named"):
        kept, free = (demand(None, choice, None, free=free) for free in (False, True))
        assert kept is not None and free is not None
        assert answer_format(kept) != answer_format(free)


def test_text_or_calls_of_allowed_tools_alone() -> None:
    tools = [ToolDemand(name="now", parameters=OBJECT, free=True)]
    calls = CallDemand(tools=tools, must_come=False, parallel=True, closed=True)
    wanted = chat_demand(FORM, False, None, calls)
    assert wanted is not None
    data = compiled(answer_format(wanted))
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"b": 1}}}}\n</tool_call>'
    assert accepts(data, "Any text.") and accepts(data, call.format("now"))
    assert accepts(data, f"Text, then {call.format('now')}")
    assert not accepts(data, call.format("then"))
    open_calls = CallDemand(tools=tools, must_come=False, parallel=True)
    assert chat_demand(FORM, False, None, open_calls) is None


def test_tools_that_cannot_be_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}

    def asked(**fields: bool) -> Demand:
        tools = [ToolDemand(name="f", parameters=schema, **fields)]
        return Demand(calls=CallDemand(tools=tools, must_come=True, parallel=True), form="hermes")

    with pytest.raises(RequestError, match=re.escape("f: #/properties/a/not")) as caught:
        answer_format(asked())
    assert "strict: false" in str(caught.value) and caught.value.param == "tools"
    assert answer_format(asked(free=True)) == answer_format(asked(lenient=True))


@pytest.mark.parametrize("form", CALL_PARSERS)
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"title": "F"},
        {"default": {}},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
        {"type": None},
        {"type": ["object", "string", "null"]},
        {"type": "object", "nullable": True},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"allOf": [{}]},
        {"$defs": {"x": {}}, "$ref": "#/$defs/x"},
    ],
    ids=str,
)
def test_arguments_are_an_object(form: str, schema: dict) -> None:
    def asked(parameters: dict) -> Format:
        tools = [ToolDemand(name="f", parameters=parameters)]
        calls = CallDemand(tools=tools, must_come=True, parallel=False)
        return answer_format(Demand(calls=calls, form=form))

    assert compiled(asked(schema)) == compiled(asked({"type": "object"}))


@pytest.mark.parametrize("kind", ["string", "array", ["string", "null"]], ids=str)
def test_arguments_that_are_no_object(kind: object) -> None:
    def asked(**fields: bool) -> Demand:
        tools = [ToolDemand(name="f", parameters={"type": kind}, **fields)]
        return Demand(calls=CallDemand(tools=tools, must_come=True, parallel=True), form="hermes")

    with pytest.raises(RequestError, match="f: #"):
        answer_format(asked())
    assert answer_format(asked(lenient=True)) == answer_format(asked(free=True))


def test_what_coder_calls_cannot_write_is_free_for_lenient_tools() -> None:
    schema = {"type": "object", "properties": {"<a>": {"type": "string"}}, "required": ["<a>"]}

    def asked(**fields: bool) -> Demand:
        tools = [ToolDemand(name="f", parameters=schema, **fields)]
        calls = CallDemand(tools=tools, must_come=True, parallel=False)
        return Demand(calls=calls, form="qwen3_coder")

    with pytest.raises(RequestError, match="parameter's name"):
        answer_format(asked())
    assert answer_format(asked(lenient=True)) == answer_format(asked(free=True))


@pytest.mark.parametrize("choice", ["auto", "required", None])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_tag_that_is_a_token_is_never_spelled_out(choice: str | None, thinking: bool) -> None:
    content = None if choice == "required" else CONTENT
    wanted = demand(content, choice, thinking)
    assert wanted is not None and wanted.tags.keys() >= {"<think>", "</think>", "<tool_call>"}
    data = compiled(answer_format(wanted))
    calls = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>' if choice else ""
    after = "" if choice == "required" else '{"a": 1}'
    parts = ["" if thinking else "<think>", "\nHm.\n", "</think>", "\n\n", calls, after]

    def fits(spelled: str | None) -> bool:
        """Whether the answer fits in which this tag is written letter by letter."""
        ids: list[int] = []
        for piece in re.split("(</?think>|</?tool_call>)", "".join(parts)):
            for text in piece if piece == spelled else [piece]:
                ids += tokenizer().encode(text, parse_special=True)
        matcher = _grammar.Matcher(vocabulary(), data)
        return all(map(matcher.accept, ids)) and matcher.accept(4074)

    assert fits(None)
    for tag in wanted.tags:
        if tag in "".join(parts):
            assert not fits(tag), tag
