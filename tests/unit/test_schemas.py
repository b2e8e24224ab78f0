"""Schemas: what is enforced stays valid however an answer goes on, and the rest is refused."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from openspec import _grammar
from openspec.errors import RequestError
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.formats import json_of, source_of
from openspec.grammar.rules.json_rules import chars_behind_quote, json_rules
from openspec.grammar.schemas.schema import enforceable
from openspec.grammar.schemas.strict import check_strict
from openspec.messages import StructuredOutputs
from openspec.text.grammars.answer_grammar import content_format
from tests.unit.grammar_walks import (
    accepts,
    answers,
    compiled,
    compiled_schema,
    tokenizer,
    tokens,
    values,
    vocabulary,
)
from tests.unit.schema_shapes import schemas

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
ENFORCED = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "minLength": 3, "maxLength": 200},
    {"type": "string", "pattern": "b+"},
    {"type": "string", "pattern": "^a|z$", "maxLength": 20},
    {"type": "string", "pattern": "^[^x]*$"},
    {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 9},
    {"type": "string", "pattern": "^a{2,3}$", "minLength": 3},
    {"type": "string", "format": "email", "maxLength": 120},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid", "minLength": 1},
    {"type": "integer", "minimum": 3, "maximum": 17},
    {"type": "integer", "minimum": -1000000007, "maximum": 999999999999},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 3, "minimum": 0.5, "maximum": 20},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 7},
    {"type": "number", "exclusiveMinimum": -3, "exclusiveMaximum": -2.5},
    {"type": "number", "multipleOf": 2},
    {"type": "boolean"},
    {"type": "null"},
    {},
    {"enum": [1, "a", None, {"x": [1]}, True]},
    {"const": {"a": 1.5, "b": 'é"\n'}},
    {"type": ["string", "integer", "null"], "enum": ["a", 1, None, 2.5]},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2},
    {"minimum": 3},
    {"type": "array"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
    {"type": "array", "items": {"type": "null"}, "maxItems": 1, "uniqueItems": True},
    {"type": "object"},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "zz"]},
    {**A, "additionalProperties": {"type": "string"}},
    {**A, "additionalProperties": True, "minProperties": 1},
    {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}, "required": ["b"]},
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "properties": {"a": {}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "minProperties": 1},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
        "minProperties": 2,
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": 1}]},
    {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [A, B]},
    {"oneOf": [{**A, "properties": {"a": {"const": one}}} for one in (1, 2)]},
    {"allOf": [A, B]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    {"$defs": {"a/b c": {"type": "integer"}}, "$ref": "#/$defs/a~1b%20c", "minimum": 5},
    {"type": "object", "properties": {"r": {"$ref": "#"}, "v": {"const": 0}}, "required": ["v"]},
    {"type": "string", "title": "t", "description": "d", "default": 1, "examples": [1], "x-y": 2},
]


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_every_answer_is_valid(schema: dict) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    found = values(schema, 8)
    assert found
    for value in found:
        validator.validate(value)


REFUSED = [
    ({"not": {}}, "#/not"),
    ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "#/properties/a/if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "#/contains"),
    ({"type": "number", "multipleOf": 0.01}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, "#/multipleOf"),
    ({"type": "integer", "minimum": 1 << 60}, "#/minimum"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "#/pattern"),
    ({"type": "string", "pattern": '^"quoted"$'}, "#/pattern"),
    ({"type": "string", "pattern": "a", "format": "date"}, "#/pattern"),
    ({"type": "string", "format": "regex"}, "#/format"),
    ({"$defs": {"a/b": {"type": "what"}}, "$ref": "#/$defs/a~1b"}, "#/$defs/a~1b/type"),
    ({"$ref": "https://example.com/schema"}, "#/$ref"),
    ({"$ref": "#/$defs/none"}, "#/$ref"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
    ({"type": "object", "minProperties": 2}, "#/minProperties"),
    ({"type": "object", "propertyNames": {"maxLength": 2_000_000_000}}, "#/propertyNames"),
    ({"const": "x", "type": "integer"}, "#"),
    ({"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": ["next"]}}}, "#"),
    ({"type": "string", "minLength": -1}, "#/minLength"),
    (False, "#"),
]


@pytest.mark.parametrize(("schema", "place"), REFUSED, ids=[json.dumps(one) for one, _ in REFUSED])
def test_refusals_name_their_place(schema: object, place: str) -> None:
    with pytest.raises(Unenforceable) as caught:
        enforceable(schema)
    assert str(caught.value).startswith(f"{place}: "), caught.value


def test_additional_names_are_other_names() -> None:
    """`{"a": 1, "a": "x"}` would be read as the second, which is of the wrong type."""
    data = compiled_schema({**A, "additionalProperties": {"type": "string"}})
    assert accepts(data, '{"a":1,"ab":"x"}')
    assert not accepts(data, '{"a":1,"a":"x"}')


def test_braces_are_not_doubled() -> None:
    data = compiled_schema({"type": "object", "properties": {"a": {"type": "object"}}})
    assert accepts(data, '{"a":{"b":{}}}')
    assert not accepts(data, '{{"a":{}}')
    assert all(text.lstrip()[1:].lstrip()[:1] in ('"', "}") for text in answers(data, 10))


def test_an_empty_object_ends() -> None:
    data = compiled_schema({"type": "object", "properties": {}})
    closed = compiled_schema({"type": "object", "additionalProperties": False})
    assert accepts(data, '{"any":1}')
    assert all(len(text) <= 40 and json.loads(text) == {} for text in answers(closed, 20))


def test_white_space_is_what_people_write() -> None:
    data = compiled_schema({"type": "array", "items": {"type": "integer"}})
    for text in ("[1,2]", "[ 1, 2 ]", "[\n  1,\n\t2\n]", "[\n" + " " * 32 + "1]", "[]", "[ ]"):
        assert accepts(data, text), text
    for text in ("[\n\n1]", "[  1]", "[1 ,2]", "[\n" + " " * 33 + "1]"):
        assert not accepts(data, text), text
    line = compiled(json_of(enforceable({"type": "object"}), "line"))
    assert accepts(line, '{"a": 1, "b":2}')
    assert not accepts(line, '{\n"a": 1}')


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 60), (2, 90), (3, 3), (0, 2000), (5, 2005)])
def test_lengths_are_kept_at_both_ends(low: int, high: int) -> None:
    """Short ones are counted by an automaton, long ones by the budget of a rule."""
    schema = {"type": "string", "minLength": low, "maxLength": high}
    data = compiled_schema({"anyOf": [schema, {"type": "integer"}]})
    for word in ("a", "é", "some text ", " "):
        text = word * high
        assert accepts(data, f'"{text[:high]}"')
        assert accepts(data, f'"{text[:low]}"')
        assert not accepts(data, f'"{text[:high]}{word[0]}"')
        assert not low or not accepts(data, f'"{text[: low - 1]}"')


def test_a_mask_is_what_may_be_accepted_up_to_a_length() -> None:
    """Each token that is allowed near the end of a long text, and after drafts are taken back."""
    data = compiled_schema({"type": "string", "maxLength": 200})
    for left in (40, 17, 16, 3, 1, 0):
        matcher = _grammar.Matcher(vocabulary(), data)
        assert matcher.accept(tokenizer().encode('"')[0])
        for token in tokenizer().encode("x")[:1] * (200 - left):
            assert matcher.accept(token)
        allowed = set(matcher.allowed())
        for token in range(4096):
            taken = matcher.accept(token)
            assert taken == (token in allowed), (left, token)
            if taken:
                matcher.rollback(1)
        assert set(matcher.allowed()) == allowed


def test_equal_lengths_share_an_automaton() -> None:
    """Each of its states takes milliseconds to compile, and schemas repeat their lengths."""
    text = {"type": "string", "maxLength": 12}
    schema = {
        "type": "object",
        "properties": {"a": text, "b": {"type": "array", "items": text}, "c": text},
        "required": ["a", "b", "c"],
    }
    node = json.dumps(enforceable(schema))
    assert json_rules(node, "line", 128, 32).count("Regex(") == 1
    data = compiled_schema(schema)
    for a, b, c in ((12, 12, 12), (0, 5, 12), (13, 1, 1), (1, 13, 1), (1, 1, 13)):
        value = {"a": "x" * a, "b": ["y", "z" * b], "c": "é" * c}
        assert accepts(data, json.dumps(value, ensure_ascii=False)) == (max(a, b, c) <= 12)


def test_many_lengths_are_budgets(request: pytest.FixtureRequest) -> None:
    """Where automata of all lengths would take too long, a budget keeps some as exactly."""
    assert chars_behind_quote([b'a"b"cd', b'"\xc3\xa9', b"xxxxxxx"]) == 4
    ends = [(i % 3, 90 - i) for i in range(6)]
    schema = {
        "type": "object",
        "properties": {
            f"f{i}": {"type": "string", "minLength": low, "maxLength": high}
            for i, (low, high) in enumerate(ends)
        },
        "required": [f"f{i}" for i in range(6)],
    }
    node = json.dumps(enforceable(schema))
    behind = chars_behind_quote(tokens())
    assert "max_chars" not in json_rules(node, "line", 128, 128)
    rules = json_rules(node, "line", 128, behind)
    assert sorted(re.findall(r"max_chars=(\d+)", rules)) == ["87", "88", "89", "90"]
    assert rules.count("Regex(") == 2
    data = compiled({"type": "grammar", "grammar": rules})
    fitting = {f"f{i}": "x" * low for i, (low, _) in enumerate(ends)}
    assert accepts(data, json.dumps(fitting))
    for i, (low, high) in enumerate(ends):
        for word in ("a", "é", "some text "):
            full = (word * high)[:high]
            given = [full, full[:low], full + "a"] + ([full[: low - 1]] if low else [])
            for text in given:
                answer = json.dumps({**fitting, f"f{i}": text}, ensure_ascii=False)
                assert accepts(data, answer) == (low <= len(text) <= high), (i, text)
    # At every place a mask holds what may be accepted.
    stride = 4 if request.config.getoption("--full") else 16
    matcher = _grammar.Matcher(vocabulary(), data)
    text = json.dumps({"f0": "ab " * 30, "f1": "x"})[:-2]
    for place, token in enumerate(tokenizer().encode(text)):
        allowed = set(matcher.allowed())
        for other in range(place % stride, 4096, stride):
            taken = matcher.accept(other)
            assert taken == (other in allowed), (place, other)
            if taken:
                matcher.rollback(1)
        assert matcher.accept(token)


STRICT = [
    (A, "#: "),
    ({**A, "additionalProperties": False, "required": []}, "#/required: "),
    ({"type": "array"}, "#: "),
    ({**A, "additionalProperties": False, "properties": {"a": A}}, "#/properties/a: "),
]


@pytest.mark.parametrize(("schema", "place"), STRICT)
def test_strict_schemas_keep_rules(schema: dict, place: str) -> None:
    with pytest.raises(Unenforceable, match="strict") as caught:
        check_strict(schema)
    assert str(caught.value).startswith(place)
    check_strict({**A, "additionalProperties": False})


BOMBS = {
    "deep": json.loads('{"items":' * 90 + "{}" + "}" * 90),
    "wide": {"allOf": [{"anyOf": [{"minimum": i} for i in range(9)]} for _ in range(9)]},
    "self": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "circle": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
    },
    "repeats": {"type": "string", "pattern": "^((((a{1,90}){1,90}){1,90}){1,90})$"},
    "long pattern": {"type": "string", "pattern": "a" * 5000},
    "nested pattern": {"type": "string", "pattern": "(" * 90 + "a" + ")" * 90},
}


@pytest.mark.parametrize("schema", BOMBS.values(), ids=BOMBS)
def test_bombs_are_refused_at_once(schema: dict) -> None:
    with pytest.raises(RequestError):
        content_format(StructuredOutputs(json=schema))


def test_shared_definitions_stay_small() -> None:
    """Each uses the next one twice: 2^40 places, but 40 definitions."""
    defs = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
                      "minItems": 2} for i in range(40)}  # fmt: skip
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"type": "integer"}}}
    assert len(source_of(json_of(enforceable(schema)))) < 20_000


def test_published_kinds_of_schemas(request: pytest.FixtureRequest) -> None:
    """At least 85 % are accepted, and every finished answer of those is valid."""
    is_full, num_finished = request.config.getoption("--full"), 0
    accepted, given = [], schemas(500 if is_full else 250)
    for schema in given:
        try:
            accepted.append((schema, enforceable(schema)))
        except Unenforceable:
            continue
    assert len(accepted) >= 0.85 * len(given), len(accepted)
    tried = accepted if is_full else accepted[:12]
    for index, (schema, node) in enumerate(tried):
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        for text in answers(compiled(json_of(node)), 3 if is_full else 2, seed=index):
            num_finished += 1
            validator(schema).validate(json.loads(text))
    assert num_finished >= 1.5 * len(tried), num_finished


def test_random_schemas_never_break_the_rewriter() -> None:
    """Whatever stands at a keyword, the answer is a schema or a refusal with a place."""
    rng = random.Random(5)
    keys = (
        "type properties items enum const anyOf oneOf allOf $ref required pattern minimum".split()
    )
    keys += "additionalProperties prefixItems minLength maxItems format propertyNames".split()
    junk = [None, True, False, 0, -1, 1.5, "", "object", "#", [], {}, ["a"], [{}], {"a": {}}]

    def make(depth: int) -> object:
        if depth == 0 or rng.random() < 0.4:
            return rng.choice(junk)
        if rng.random() < 0.2:
            return [make(depth - 1) for _ in range(rng.randint(0, 3))]
        return {rng.choice(keys): make(depth - 1) for _ in range(rng.randint(1, 4))}

    outcomes = set()
    for _ in range(3000):
        try:
            enforceable(make(3))
            outcomes.add("schema")
        except Unenforceable:
            outcomes.add("refusal")
    assert outcomes == {"schema", "refusal"}
