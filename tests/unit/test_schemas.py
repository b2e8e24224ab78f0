"""Schemas: what is enforced stays valid however an answer goes on, and the rest is refused."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from openspec import _grammar
from openspec.grammar.formats import json_of
from openspec.grammar.json_lengths import chars_behind_quote
from openspec.grammar.json_rules import json_rules
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.schema import enforceable
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
from tests.unit.test_schema_trees import ENFORCED, A


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_every_answer_is_valid(schema: dict) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    found = values(schema, 8)
    assert found
    for value in found:
        validator.validate(value)


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
    node = enforceable(schema)
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
    node = enforceable(schema)
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


def test_shared_definitions_stay_small() -> None:
    """Each uses the next one twice: 2^40 places, but 40 definitions."""
    defs = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2,
                      "minItems": 2} for i in range(40)}  # fmt: skip
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {"type": "integer"}}}
    assert len(json_rules(enforceable(schema), "line", 128, 32)) < 20_000


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
