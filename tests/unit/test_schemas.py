"""Schemas: what is enforced stays valid however an answer goes on, and the rest is refused."""

from __future__ import annotations

import json

import jsonschema
import pytest

from openspec.grammar.formats import json_of
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.schema import enforceable
from tests.unit.grammar_walks import (
    accepts,
    answers,
    compiled,
    compiled_schema,
    values,
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
