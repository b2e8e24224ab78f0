"""Schemas are refused with true words and their place; rewriting is bounded in time and depth."""

from __future__ import annotations

import json
import random
import time

import pytest

from openspec.grammar.schemas.constraints import Budget, Unenforceable
from openspec.grammar.schemas.schema import enforceable
from openspec.grammar.schemas.strict import check_strict
from tests.unit.test_schema_trees import INTEGER, NODE, OBJECT, A, drawn, object_of, refusal
from tests.unit.tree_values import belongs

REFUSED = [
    ({"not": {}}, "#/not"),
    ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, "#/properties/a/if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "#/contains"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "#/pattern"),
    ({"type": "string", "pattern": '^"quoted"$'}, "#/pattern"),
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


ENDLESS = [
    {**OBJECT, "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    {**object_of(["a"], a={"$ref": "#"})},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {
        "anyOf": [
            {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
            object_of(["a"], a={"$ref": "#"}),
        ]
    },
    {**OBJECT, "patternProperties": {"^a": {"$ref": "#"}}, "minProperties": 1},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS)
def test_values_that_never_end_are_refused(schema: dict) -> None:
    assert refusal(schema).startswith("#: no value fits this schema: ")


def test_what_never_ends_is_left_out_where_it_may_be() -> None:
    endless = {"$ref": "#/$defs/e"}
    schema = {**object_of(["b"], a=endless, b=INTEGER), "$defs": {"e": object_of(["e"], e=endless)}}
    assert set(json.loads(drawn(schema, 1)[0])) == {"b"}
    union = {**schema, "properties": {"b": {"anyOf": [endless, INTEGER]}}}
    assert all(belongs(enforceable(union), text) for text in ('{"b":1}',))


REFUSALS = [
    (
        {"required": ["a"], "properties": {"a": False}},
        "#: no value fits this schema among the types",
    ),
    (
        {**object_of(a={}), "minProperties": 2},
        "#: no value fits this schema among objects of the properties that it names",
    ),
    (
        {**object_of(a={}), "minProperties": 2, "additionalProperties": False},
        "#: no value fits this",
    ),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired: "),
    ({"const": "", "pattern": "["}, "#/pattern: "),
    ({"enum": ["a", "b"], "pattern": "\\p{Nope}+"}, "#/pattern: "),
    ({"type": "string", "pattern": r"^\x+4$"}, "#/pattern: "),
    (
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "#/$defs/a: $ref refers to itself",
    ),
    ({"type": "integer", "multipleOf": 2048}, "#/multipleOf: "),
    ({"type": "integer", "multipleOf": 0}, "#/multipleOf: "),
    ({"type": [[]]}, "#/type: "),
    ({"type": "string", "format": ["date"]}, "#/format: "),
    ({"const": float("inf")}, "#: inf is no number"),
    ({"type": "object", "minProperties": 3}, "#/minProperties: "),
    (
        {"properties": {"a": {"$id": "http://x.org/a", "$ref": "#/$defs/b"}}, "$defs": {"b": {}}},
        "#/properties/a/$ref: below an $id",
    ),
    ({"type": "object", "propertyNames": {"minLength": 1 << 20}}, "#/propertyNames: "),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "#/$defs/a: "),
    ({"type": "string", "pattern": "^((((a{1,90}){1,90}){1,90}){1,90})$"}, "#/pattern: "),
    ({"type": "string", "pattern": "a" * 5000}, "#/pattern: "),
    ({"type": "string", "pattern": "(" * 90 + "a" + ")" * 90}, "#/pattern: "),
]


@pytest.mark.parametrize(("schema", "start"), REFUSALS)
def test_refusals_say_what_is_true(schema: dict, start: str) -> None:
    assert refusal(schema).startswith(start)


def nested(levels: int, leaf: dict, num: int) -> dict:
    for _ in range(levels):
        leaf = {"anyOf": [object_of(["a"], a=leaf) for _ in range(num)]}
    return leaf


def doubling(key: str, leaf: dict, levels: int) -> dict:
    defs = {f"a{i}": {key: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": leaf}}


def crossing(num: int) -> dict:
    """Two families of objects, each of unions of the next, that differ only at their ends."""
    defs: dict = {}
    for name, end in (("X", 1), ("Y", 2)):
        for level in (0, 1, 2, 3):
            union = {"anyOf": [{"$ref": f"#/$defs/{name}{level + 1}"}] * num}
            defs[f"{name}{level}"] = object_of(["a"], a=union)
        defs[f"{name}4"] = {"const": end}
    return {"$defs": defs, "oneOf": [{"$ref": "#/$defs/X0"}, {"$ref": "#/$defs/Y0"}]}


def deep(key: str, levels: int) -> object:
    schema: object = {}
    for _ in range(levels):
        schema = {"anyOf": [{"type": "array", "items": schema}]} if key == "items" else (
            {"properties": {"a": schema}} if key == "properties" else {key: [schema]}
        )  # fmt: skip
    return schema


EVENTS = [
    object_of(["type", "id"], type={"type": "string", "const": f"event.{i}"}, id={"type": "string"})
    for i in range(400)
]
BOMBS = {
    "all of two": (doubling("allOf", {"type": "string"}, 40), True),
    "any of two": (doubling("anyOf", {"type": ["string", "null"]}, 40), True),
    "one of two": (doubling("oneOf", {"type": ["string", "object"]}, 40), False),
    "pairs": ({"oneOf": [object_of(["p"], p=nested(2, {"const": i}, 5)) for i in (1, 2)]}, True),
    "crossing 4": (crossing(4), True),
    "crossing 16": (crossing(16), True),
    "consts": ({"oneOf": [{"const": i} for i in range(5000)]}, True),
    "enums": ({"anyOf": [{"enum": [i]} for i in range(10_000)]}, True),
    "objects": ({"anyOf": [object_of(**{f"a{i}": {}}) for i in range(5000)]}, True),
    "events": ({"oneOf": EVENTS}, True),
    "events of a type": ({**OBJECT, "oneOf": EVENTS}, True),
    "requires": ({"oneOf": [object_of([f"a{i}"], **{f"a{i}": {}}) for i in range(2000)]}, False),
    "wide": ({"allOf": [{"anyOf": [{"minimum": i} for i in range(9)]} for _ in range(9)]}, False),
    "deep items": (deep("items", 300), False),
    "deep properties": (deep("properties", 450), False),
    "deep allOf": (deep("allOf", 450), False),
    "deep value": ({"const": json.loads("[" * 400 + "]" * 400)}, False),
    "references": (
        {"$ref": "#/$defs/0",
         "$defs": {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)},
                                        "3000": {"type": "string"}}}, True),
    "patterns": (
        {**object_of(**{f"a{i}": {} for i in range(200)}),
         "patternProperties": {f"^{i}": {} for i in range(200)}}, False),
    "multiples": (
        {"anyOf": [{"type": "integer", "multipleOf": 1024 - i} for i in range(99)]}, False),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "is_fine"), BOMBS.values(), ids=BOMBS)
def test_rewriting_is_bounded(schema: dict, is_fine: bool) -> None:
    start = time.process_time()
    try:
        enforceable(schema)
        was_fine = True
    except Unenforceable:
        was_fine = False
    # A second on an idle machine, twice that on a busy one; without a bound it would be minutes.
    assert time.process_time() - start < 6.0
    assert was_fine == is_fine


def test_a_budget_serves_several_schemas() -> None:
    budget = Budget(2000)
    schema = object_of(a={"type": "string"})
    with pytest.raises(Unenforceable, match="too large"):
        for _ in range(2000):
            enforceable(schema, budget)
    enforceable(schema)


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
