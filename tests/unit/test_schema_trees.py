"""Schemas as trees: never wider than the schema, bounded in time, refused only with a true word.

Values of a tree are drawn and judged without a grammar (`tree_values.py`).
"""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.json_tree import AnyOf, Anything, Matching, Object, Text, UniqueArray
from openspec.grammar.schemas.schema import enforceable
from openspec.grammar.schemas.values import SpelledNumber, json_text
from tests.unit.schema_shapes import schemas
from tests.unit.tree_values import Drawer, belongs, read

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
OBJECT = {"type": "object"}
INTEGER = {"type": "integer"}


def object_of(required: list[str] | None = None, **properties: object) -> dict:
    return {"type": "object", "properties": properties, "required": required or []}


def drawn(schema: object, num: int, seed: int = 0) -> list[str]:
    """Values of the schema's tree, each of which its own oracle takes."""
    tree = enforceable(schema)
    drawer = Drawer(tree, random.Random(seed))
    texts = [text for text in (drawer.text() for _ in range(num)) if text is not None]
    assert all(belongs(tree, text) for text in texts)
    return texts


def refusal(schema: object) -> str:
    with pytest.raises(Unenforceable) as caught:
        enforceable(schema)
    return str(caught.value)


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_every_value_is_valid(schema: dict) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    texts = drawn(schema, 40)
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


def test_values_of_published_kinds_are_valid(request: pytest.FixtureRequest) -> None:
    num_valid = 0
    for index, schema in enumerate(schemas(500 if request.config.getoption("--full") else 120)):
        try:
            texts = drawn(schema, 4, index)
        except Unenforceable:
            continue
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        for text in texts:
            validator(schema).validate(json.loads(text))
            num_valid += 1
    assert num_valid > 400


UNEVALUATED = [
    (
        {
            **object_of(bar={"type": "string"}),
            "allOf": [{"properties": {"foo": {}}, "unevaluatedProperties": False}],
        },
        ['{"foo":1}'],
        ['{"bar":"x","foo":1}', '{"bar":"x"}'],
    ),
    (
        {
            "oneOf": [object_of(["x"], x={}), object_of(["y"], y={})],
            "type": "object",
            "unevaluatedProperties": False,
        },
        ['{"x":1}', '{"y":1}'],
        ['{"x":1,"y":1}', "{}", '{"x":1,"z":1}'],
    ),
    (
        {
            "$defs": {"base": object_of(["a"], a=INTEGER)},
            "$ref": "#/$defs/base",
            "properties": {"b": INTEGER},
            "unevaluatedProperties": {"type": "null"},
        },
        ['{"b":2,"a":1}', '{"b":2,"a":1,"c":null}'],
        ['{"a":1,"c":2}'],
    ),
    (
        {"allOf": [{"additionalProperties": True}], "unevaluatedProperties": False, **OBJECT},
        ['{"any":1}'],
        [],
    ),
    (
        {"allOf": [{"patternProperties": {"^x": {}}}], "unevaluatedProperties": False, **OBJECT},
        ['{"xa":1}'],
        ['{"a":1}'],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"const": 1}],
            "anyOf": [{"prefixItems": [True, {"const": 2}]}, {"maxItems": 1}],
            "unevaluatedItems": False,
        },
        ["[1]", "[1,2]", "[]"],
        ["[1,2,3]", "[1,3]"],
    ),
    (
        {"type": "array", "allOf": [{"items": INTEGER}], "unevaluatedItems": False},
        ["[1,2]"],
        ['["a"]'],
    ),
    (
        {"type": "array", "allOf": [{"unevaluatedItems": False}], "prefixItems": [True]},
        ["[]"],
        ["[1]"],
    ),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), UNEVALUATED)
def test_unevaluated_is_what_subschemas_leave(
    schema: dict, fitting: list[str], others: list[str]
) -> None:
    tree = enforceable(schema)
    assert all(belongs(tree, text) for text in fitting)
    assert not any(belongs(tree, text) for text in others)
    validator = jsonschema.Draft202012Validator(schema)
    for text in [*drawn(schema, 20), *fitting]:
        validator.validate(json.loads(text))
    assert not any(validator.is_valid(json.loads(text)) for text in others if text != '{"bar":"x"}')


LISTED = [
    ({"enum": ["nodate", "2024-02-29", "2023-02-29"], "format": "date"}, ['"2024-02-29"']),
    ({"enum": ["a", "bb", "ccc"], "minLength": 2, "maxLength": 2}, ['"bb"']),
    ({"enum": ["😀", "ab"], "maxLength": 1}, ['"😀"']),
    ({"enum": ["xa", "b", 1], "pattern": "a$"}, ['"xa"', "1"]),
    ({"enum": [1, 2.5, 10**30, 7], "multipleOf": 0.5, "maximum": 10**29}, ["1", "2.5", "7"]),
    ({"enum": [0.07, 0.075], "multipleOf": 0.01}, ["0.07"]),
    ({"enum": [1e300, 3], "minimum": 10}, ["1e+300"]),
    ({"enum": [[1, 2], [1], [1, 1]], "uniqueItems": True, "minItems": 2}, ["[1,2]"]),
    ({"enum": [[1, "a"], [1, 2]], "items": INTEGER}, ["[1,2]"]),
    ({"enum": [{"a": 1}, {"a": "x"}, {}], "properties": {"a": INTEGER}}, ['{"a":1}', "{}"]),
    ({"enum": [{"a": 1}, {}], "required": ["a"]}, ['{"a":1}']),
    ({"enum": [{"a": 1}, {"b": 1}], "additionalProperties": False, "properties": {"a": {}}},
     ['{"a":1}']),
    ({"enum": [{"ab": 1}, {"b": 1}], "propertyNames": {"pattern": "^a"}}, ['{"ab":1}']),
    ({"enum": [1, 1.0, True, "1"], "type": "integer"}, ["1"]),
    ({"enum": [1, 2, 3], "anyOf": [{"maximum": 1}, {"minimum": 3}]}, ["1", "3"]),
    ({"enum": [1, 2, 3], "oneOf": [{"maximum": 2}, {"minimum": 2}]}, ["1", "3"]),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, ["1", "3"]),
    ({"oneOf": [{"enum": [1, ""]}, {"oneOf": [{"enum": ["", 2]}, {"enum": [2]}]}]}, ["1"]),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, ["2"]),
    ({"type": "string", "nullable": True, "enum": ["a"]}, ['"a"', "null"]),
    ({"enum": ["a", None], "nullable": True}, ['"a"', "null"]),
    ({"enum": ["a"], "nullable": True}, ['"a"']),
    ({"enum": ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", "aa"], "pattern": "^(a+)+$"}, ['"aa"']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "texts"), LISTED)
def test_listed_values_are_filtered(schema: dict, texts: list[str]) -> None:
    assert set(drawn(schema, 60)) == set(texts)


def test_listed_numbers_keep_their_spelling() -> None:
    spelled = "[19.99,0.1,18446744073709551615,1.10,1e2,1e400,-0.0,123456789012345678901234567890]"
    texts = drawn({"enum": read(spelled)}, 200)
    assert set(texts) == set(spelled[1:-1].split(","))
    assert drawn({"enum": [SpelledNumber("1e2")], "type": "integer", "multipleOf": 100}, 1) == [
        "1e2"
    ]
    assert json_text({"a": [SpelledNumber("1.50"), 'é"\n']}) == '{"a":[1.50,"é\\"\\n"]}'
    # 1e400 is above every float, and no infinity.
    assert "no value" in refusal(
        {"const": SpelledNumber("1e400"), "maximum": SpelledNumber("1e399")}
    )
    assert drawn({"const": SpelledNumber("1e399"), "maximum": SpelledNumber("1e400")}, 1) == [
        "1e399"
    ]
    assert "4096 digits" in refusal({"const": SpelledNumber("1e1000000")})
    assert refusal({"minimum": SpelledNumber("1e1000000"), "type": "number"}).startswith(
        "#/minimum: "
    )


NUMBERS = [
    ({"type": "integer", "minimum": 1 << 60}, ["1152921504606846976", "9" * 30], ["1" * 19, "-5"]),
    ({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1},
     ["0", "18446744073709551615"], ["18446744073709551616", "-1"]),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, ["0", "3", "300000000000"], ["1", "-3"]),
    ({"type": "number", "multipleOf": 0.01}, ["0.01", "19.99", "-3", "7.5", "7.50"],
     ["0.001", "0.010", "1e2"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.25", "1.5", "2"], ["0.3", "0.2"]),
    ({"type": "integer", "multipleOf": 0.1}, ["1", "7"], ["0.1"]),
    ({"type": "integer", "multipleOf": 1.5}, ["3", "-6"], ["1", "2"]),
    ({"allOf": [{"multipleOf": 4}, {"multipleOf": 0.6}], "type": "number"}, ["12"], ["4", "6"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "1.0", "1.00"],
     ["0", "0.0", "1.001", "-0.5"]),
    ({"type": "number", "minimum": 0.1, "maximum": 0.3}, ["0.1", "0.2", "0.3", "0.30"],
     ["0.09", "0.3000000001", "0"]),
    ({"type": "number", "maximum": 1.7976931348623157e308}, ["5", "-5.5"], []),
    ({"type": "number", "minimum": 5e-324}, ["5", "0.1"], ["0", "-1"]),
    ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, ["4"], ["3"]),
    ({"type": ["number", "integer"], "minimum": 2.5}, ["2.5", "3"], ["2"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "others"), NUMBERS)
def test_numbers_are_exact(schema: dict, fitting: list[str], others: list[str]) -> None:
    tree = enforceable(schema)
    assert [text for text in fitting if not belongs(tree, text)] == []
    assert [text for text in others if belongs(tree, text)] == []


def test_random_numbers_are_exact() -> None:
    """Bounds and multiples by automata are those of fractions."""
    rng = random.Random(3)
    bounds = [SpelledNumber(text) for text in "0 1 -1 0.5 -2.5 10 99.99 -0.01 7 1e3 0.001".split()]
    num_fitting = 0
    for _ in range(150):
        schema: dict = {"type": rng.choice(["integer", "number"])}
        for key in ("minimum", "exclusiveMaximum", "maximum", "exclusiveMinimum", "multipleOf"):
            if rng.random() < 0.35:
                schema[key] = rng.choice([b for b in bounds if key != "multipleOf" or 0 < b < 99])
        try:
            texts = drawn(schema, 20)
        except Unenforceable as error:
            assert "no value fits" in str(error)
            texts = []
        near = [
            f"{rng.choice(['', '-'])}{rng.randint(0, 12)}.{rng.randint(0, 99):02}" for _ in "12"
        ]
        for text in [*texts, *near]:
            number = SpelledNumber(text)
            is_listed = True
            try:
                enforceable({"allOf": [schema, {"const": number}]})
            except Unenforceable:
                is_listed = False
            assert is_listed or text not in texts, (schema, text)
            num_fitting += is_listed
    assert num_fitting > 500


PROPERTIES = [
    (
        {**OBJECT, "patternProperties": {"^x": INTEGER, "y$": {"minimum": 3}},
         "additionalProperties": {"type": "string"}},
        ['{"xa":1,"b":"s","ay":4}', '{"xy":3}'],
        ['{"xy":1}', '{"xa":"s"}', '{"b":1}', '{"xy":3.5}'],
    ),
    (
        {**OBJECT, "patternProperties": {"^x": INTEGER}, "additionalProperties": False},
        ['{"xa":1}', "{}"],
        ['{"a":1}'],
    ),
    (
        {**object_of(xa={"maximum": 5}), "patternProperties": {"^x": INTEGER}},
        ['{"xa":5,"xb":9}'],
        ['{"xa":6}', '{"xa":4.5}'],
    ),
    (
        {**object_of(a={}), "propertyNames": {"maxLength": 2}, "additionalProperties": True},
        ['{"a":1,"bc":2}', '{"é😀":1}'],
        ['{"abc":1}'],
    ),
    (
        {**OBJECT, "propertyNames": {"anyOf": [{"enum": ["a"]}, {"pattern": "^b"}]}},
        ['{"a":1,"bb":1}'],
        ['{"ab":1}'],
    ),
    (
        {**object_of(a={}), "additionalProperties": True, "patternProperties": {"^b": False}},
        ['{"a":1,"c":1}'],
        ['{"b":1}'],
    ),
    (
        {"allOf": [{**object_of(a={}), "additionalProperties": False}, object_of(b={})]},
        ['{"a":1}', "{}"],
        ['{"b":1}', '{"a":1,"b":1}'],
    ),
    (
        {**object_of(**{"a" * 3000: INTEGER})},
        ['{"' + "a" * 3000 + '":1}'],
        ['{"b":1}'],
    ),
    (
        {**object_of(["a"], a={}, b={}), "minProperties": 2, "additionalProperties": True},
        ['{"a":1,"b":1}', '{"a":1,"c":1}'],
        ['{"a":1}'],
    ),
    (
        {**object_of(["a"], a={}, b={}), "maxProperties": 1, "additionalProperties": True},
        ['{"a":1}'],
        ['{"a":1,"b":1}', '{"a":1,"c":1}', "{}"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "others"), PROPERTIES)
def test_properties_without_a_name(schema: dict, fitting: list[str], others: list[str]) -> None:
    tree = enforceable(schema)
    assert [text for text in fitting if not belongs(tree, text)] == []
    assert [text for text in others if belongs(tree, text)] == []
    validator = jsonschema.Draft202012Validator(schema)
    for text in [*drawn(schema, 30), *fitting]:
        validator.validate(json.loads(text))


def test_names_are_matched_without_backtracking() -> None:
    name = "a" * 30 + "!"
    tree = enforceable({**object_of(**{name: {}}), "patternProperties": {"^(a+)+$": {}}})
    assert belongs(tree, f'{{"{name}":1,"aaaa":1}}')
    assert not belongs(tree, '{"b":1}')


def test_names_of_others_are_apart() -> None:
    """A name has one schema, whichever way it is read."""
    schema = {
        **object_of(xab={}),
        "patternProperties": {"^x": {"type": "null"}, "a": INTEGER, "b": {}},
    }
    tree = enforceable({**schema, "additionalProperties": {"type": "string"}})
    assert isinstance(tree.root, Object)
    names = [one.names for one in tree.root.others]
    assert len(names) > 2
    for i, one in enumerate(names):
        assert one is not None
        assert not one.accepts("xab")
        assert all((one & two).is_empty for two in names[:i] if two is not None)


def test_texts_of_patterns_formats_and_lengths_at_once() -> None:
    both = {"type": "string", "pattern": "^2024", "format": "date"}
    for text in drawn(both, 20):
        assert text.startswith('"2024-') and len(text) == 12
    two = {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string", "maxLength": 4}
    for text in drawn(two, 20):
        assert text[1] == "a" and text[-2] == "b" and len(text) <= 6
    tree = enforceable({"type": "string", "pattern": "^(ab|c)*d?$", "minLength": 3, "maxLength": 5})
    assert belongs(tree, '"abcd"') and belongs(tree, '"ccc"')
    assert not belongs(tree, '"cc"') and not belongs(tree, '"ababab"')
    assert "no value fits" in refusal({"type": "string", "pattern": "a", "format": "date"})
    # [^\s] is what no dialect calls white space.
    assert not belongs(enforceable({"type": "string", "pattern": r"^[^\s]+$"}), '"\u2002"')


def test_unique_items_of_few_values() -> None:
    tree = enforceable(
        {"type": "array", "items": {"enum": [1, 1.0, "a", None]}, "uniqueItems": True}
    )
    assert tree.root == UniqueArray(("1", '"a"', "null"), 0, 3)
    booleans = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1}
    assert enforceable(booleans).root == UniqueArray(("true", "false"), 1, 2)
    assert "no value fits" in refusal({**booleans, "minItems": 3})
    refused = {"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}
    assert refusal(refused).startswith("#/uniqueItems: ")


def test_keywords_of_null_are_absent() -> None:
    absent = dict.fromkeys(
        ("required", "enum", "items", "additionalProperties", "minLength", "not")
    )
    assert enforceable({"type": "object", "properties": {"a": INTEGER}, **absent}) == enforceable(
        {"type": "object", "properties": {"a": INTEGER}}
    )
    assert drawn({"const": None}, 1) == ["null"]
    assert enforceable({"type": None, "anyOf": None, "$ref": None}).root == Anything()


def test_nullable_adds_null() -> None:
    tree = enforceable(object_of(a={"type": "string", "nullable": True}, b={"nullable": True}))
    assert belongs(tree, '{"a":null}')
    assert not belongs(enforceable({"type": "string", "nullable": False}), "null")


UNIONS = [
    {"anyOf": [{"$ref": "#/properties/a"}, {"type": "string"}]},
    {"anyOf": [*[{"$ref": "#/properties/a"}] * 100, {"type": "string"}]},
]


@pytest.mark.parametrize("union", UNIONS)
def test_a_union_that_holds_itself_is_its_other_options(union: dict) -> None:
    root = enforceable(object_of(["a"], a=union)).root
    assert isinstance(root, Object)
    assert root.properties[0].value == Text()


def test_options_that_a_value_fits_alone() -> None:
    """What surrounds a `oneOf` may open objects that each option closes."""
    opened = {
        "oneOf": [object_of(["a"], a=INTEGER), object_of(["b"], b=INTEGER)],
        "properties": {"a": {}, "b": {}},
    }
    assert refusal(opened).startswith("#/oneOf: a value may fit both option 0 and option 1")
    assert refusal({**opened, "properties": {}, "additionalProperties": True}).startswith(
        "#/oneOf: "
    )
    text = {"type": ["array", "string"]}
    assert refusal({"oneOf": [{"enum": [2, ""]}, {"enum": ["", []]}, text]}).startswith("#/oneOf: ")
    apart = {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}
    assert not belongs(enforceable(apart), "null")
    by_pattern = {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}
    assert belongs(enforceable(by_pattern), '"ax"')
    by_length = {"type": "string", "oneOf": [{"minLength": 5}, {"maxLength": 4}]}
    assert enforceable(by_length).root == AnyOf((Text(5, None), Text(0, 4)))


def test_equal_schemas_are_equal_trees() -> None:
    text = {"type": "string", "format": "uuid"}
    tree = enforceable(object_of(["a", "b"], a=text, b={"$ref": "#/properties/a"}))
    assert isinstance(tree.root, Object)
    one, two = (each.value for each in tree.root.properties)
    assert isinstance(one, Matching)
    assert one == two


PATTERNS = ["^x", "a", "b$", "^[ab]+$"]
LISTED_VALUES = [
    1,
    2,
    2.0,
    0.5,
    "a",
    "ab",
    "",
    None,
    True,
    [],
    [1],
    {},
    {"a": 1},
    {"b": "x"},
    [1, 1],
]


class Combinations:
    """Schemas of a few names and values, so that their parts speak of the same ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def whole(self) -> dict:
        return {**self.combined(3), "$defs": {f"d{i}": self.schema(2) for i in range(3)}}

    def schema(self, depth: int) -> object:
        rng = self.rng
        if depth > 0 and rng.random() < 0.88:
            return self.combined(depth)
        kinds = ["integer", "string", "null", "boolean", ["string", "null"]]
        return rng.choice([
            True, False, {}, {"type": rng.choice(kinds)}, {"const": rng.choice(LISTED_VALUES)},
            {"enum": rng.sample(LISTED_VALUES, 3)}, {"minimum": rng.choice([0, 1, 2.5])},
            {"$ref": f"#/$defs/d{rng.randrange(3)}"}, {"pattern": rng.choice(PATTERNS)},
            {"type": "string", "minLength": rng.randrange(3)}, {"maxLength": rng.randrange(3)},
            {"type": "number", "multipleOf": rng.choice([1, 2, 0.5])},
        ])  # fmt: skip

    def combined(self, depth: int) -> dict:
        rng, schema = self.rng, dict[str, object]()
        if rng.random() < 0.5:
            schema["type"] = rng.choice(["object", "object", "array", "string", ["object", "null"]])
        names, inner = ["a", "b", "xa", "ab"], lambda: self.schema(depth - 1)
        some = [
            ("properties", 0.4, lambda: {name: inner() for name in rng.sample(names, 2)}),
            ("required", 0.2, lambda: rng.sample(names, rng.randint(0, 2))),
            ("additionalProperties", 0.2, inner),
            ("patternProperties", 0.15, lambda: {one: inner() for one in rng.sample(PATTERNS, 2)}),
            ("propertyNames", 0.08, lambda: rng.choice([{"pattern": "^[ax]"}, {"maxLength": 1}])),
            ("unevaluatedProperties", 0.15, inner),
            ("minProperties", 0.08, lambda: rng.randint(0, 2)),
            ("maxProperties", 0.08, lambda: rng.randint(0, 3)),
            ("items", 0.2, inner),
            ("prefixItems", 0.15, lambda: [inner() for _ in range(rng.randint(1, 2))]),
            ("minItems", 0.1, lambda: rng.randint(0, 2)),
            ("unevaluatedItems", 0.1, inner),
            *((key, 0.2, lambda: [inner() for _ in range(rng.randint(1, 3))])
              for key in ("allOf", "anyOf", "oneOf")),
            ("enum", 0.06, lambda: rng.sample(LISTED_VALUES, 4)),
        ]  # fmt: skip
        return schema | {key: make() for key, share, make in some if rng.random() < share}


def test_random_combinations_are_never_wider(request: pytest.FixtureRequest) -> None:
    num_values = 0
    for seed in range(5000 if request.config.getoption("--full") else 200):
        schema = Combinations(seed).whole()
        validator = jsonschema.Draft202012Validator(schema)
        try:
            texts = drawn(schema, 6, seed)
        except Unenforceable as error:
            if str(error) == "#: no value fits this schema":
                assert not any(map(validator.is_valid, LISTED_VALUES)), (seed, schema)
            continue
        for text in texts:
            validator.validate(json.loads(text))
            num_values += 1
    assert num_values > 300
