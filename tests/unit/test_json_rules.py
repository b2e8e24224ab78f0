"""Rules of JSON trees: white space, lengths, counts, and grammars that stay small."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest

from openspec import _grammar
from openspec.grammar.formats import json_of
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.rules.json_rules import json_rules
from openspec.grammar.rules.lengths import chars_behind_quote
from openspec.grammar.schemas.json_tree import (
    AnyOf,
    Array,
    JsonTree,
    Node,
    Object,
    Others,
    Property,
    Ref,
    Text,
    Texts,
    UniqueArray,
)
from openspec.grammar.schemas.schema import enforceable
from tests.unit.grammar_walks import (
    accepts,
    compiled,
    compiled_schema,
    tokenizer,
    tokens,
    vocabulary,
)

ONE = Texts(("1",))
COLORS = ('"red"', '"green"', "null", "1")


def compiled_tree(root: Node, **defs: Node) -> bytes:
    return compiled(json_of(JsonTree(root, defs), "line"))


def test_white_space_is_what_people_write() -> None:
    data = compiled_schema({"type": "array", "items": {"type": "integer"}})
    for text in ("[1,2]", "[ 1, 2 ]", "[\n  1,\n\t2\n]", "[\n" + " " * 32 + "1]", "[]", "[ ]"):
        assert accepts(data, text), text
    for text in ("[\n\n1]", "[  1]", "[1 ,2]", "[\n" + " " * 33 + "1]"):
        assert not accepts(data, text), text
    line = compiled(json_of(enforceable({"type": "object"}), "line"))
    assert accepts(line, '{"a": 1, "b":2}')
    assert not accepts(line, '{\n"a": 1}')


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (r'"\u00e9\ud83d\uDE00\n\/"', True),
        (r'"\ud83d"', False),
        (r'"\ude00"', False),
        (r'"\ud83d\u0041"', False),
        (r'"\x41"', False),
        ('"\x1f"', False),
        ('"é😀"', True),
        ("-0.5e+10", True),
        ("01", False),
        ("[{},[],true,null]", True),
        ('{"a":{"a":1},"\\u0061":2}', True),
        ("[1,]", False),
        ("{}{}", False),
    ],
)
def test_any_value(text: str, fits: bool) -> None:
    assert accepts(compiled_schema({}), text) == fits


# ---- Objects and arrays, each text of a few names or items tried


@pytest.mark.parametrize("required", ["", "b", "ac"])
@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0, None), (1, None), (2, 3), (0, 2), (3, 3), (0, 0)])
def test_members(required: str, has_others: bool, low: int, high: int | None) -> None:
    properties = tuple(Property(name, ONE, name in required) for name in "abc")
    others = (Others(Automaton.of_texts(["x", "y"]), ONE),) if has_others else ()
    num_most = 5 if has_others else 3
    if len(required) > (num_most if high is None else high) or low > num_most:
        return  # no object is so
    data = compiled_tree(Object(properties, others, low, high))
    for size in range(5):
        for names in itertools.product("abcxy", repeat=size):
            own = [name for name in names if name in "abc"]
            is_ordered = list(names[: len(own)]) == sorted(set(own)) == own
            is_known = has_others or len(own) == size
            is_enough = low <= size <= (size if high is None else high) and set(required) <= {
                *names
            }
            text = "{" + ",".join(f'"{name}":1' for name in names) + "}"
            assert accepts(data, text) == (is_ordered and is_known and is_enough), text


@pytest.mark.parametrize("num_first", [0, 1, 2])
@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0, None), (1, None), (2, 3), (0, 1), (3, 3), (0, 0)])
def test_items(num_first: int, has_rest: bool, low: int, high: int | None) -> None:
    if low > num_first and not has_rest:
        return  # no array is so
    first = (Texts(("1",)), Texts(("2",)))[:num_first]
    data = compiled_tree(Array(first, Texts(("3",)) if has_rest else None, low, high))
    for size in range(5):
        for items in itertools.product("123", repeat=size):
            right = "12"[:num_first] + "3" * (size - num_first) * has_rest
            is_enough = low <= size <= (size if high is None else high)
            fits = right[:size] == "".join(items) and is_enough
            assert accepts(data, f"[{','.join(items)}]") == fits, items


@pytest.mark.parametrize(("low", "high"), [(0, 4), (2, 3), (1, 9), (0, 1), (0, 0)])
def test_items_that_differ(low: int, high: int) -> None:
    data = compiled_tree(UniqueArray(COLORS, low, high))
    for size in range(5):
        for items in itertools.product(COLORS, repeat=size):
            fits = low <= size <= high and len(set(items)) == size
            assert accepts(data, f"[{', '.join(items)}]") == fits, items


def test_options_that_begin_alike() -> None:
    """What they have in common is written once; each goes on by itself."""
    kinds = [f"kind_{one}" for one in range(30)]
    options = tuple(
        Object((Property("type", Texts((f'"{kind}"',)), True), Property(kind, Ref("one"), False)))
        for kind in kinds
    )
    whole = AnyOf((*options, Array((), Ref("events"))))
    data = compiled_tree(whole, events=AnyOf(options), one=ONE)
    for kind in kinds:
        assert accepts(data, f'{{"type": "{kind}", "{kind}": 1}}')
        assert accepts(data, f'[{{"type":"{kind}"}}]')
        assert not accepts(data, f'{{"type": "{kind}", "kind_x": 1}}')
    assert not accepts(data, '{"type": "kind_1", "kind_11": 1}')
    rules = json_rules(JsonTree(AnyOf(options), {"one": ONE}), "line", 32, 8)
    assert rules.count(r"\"") < 250


def test_options_of_one_kind_are_one_automaton() -> None:
    values = [{"pattern": "^a+$"}, {"pattern": "^[ab]*$"}, {"enum": ["ab", "x", 1, None]}]
    schema = {"anyOf": [*({"type": "string", **one} for one in values[:2]), values[2],
                        {"type": "integer"}, {"type": "number", "minimum": 3}]}  # fmt: skip
    rules = json_rules(enforceable(schema), "line", 32, 8)
    assert rules.count("Regex(") == 2
    data = compiled_schema(schema)
    for text in ('"aa"', '"abab"', '""', '"x"', "1", "-7", "null", "3.5"):
        assert accepts(data, text), text
    for text in ('"ax"', '"xx"', "2.5", "true"):
        assert not accepts(data, text), text


# ---- Lengths


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


@pytest.mark.parametrize("low", [1, 8, 9, 40])
def test_a_length_may_have_no_end(low: int) -> None:
    data = compiled_schema({"type": "string", "minLength": low})
    for text in ("x" * low, "é" * (low + 1), "some text " * low):
        assert accepts(data, f'"{text}"')
    assert not accepts(data, f'"{"é" * (low - 1)}"')


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
    text = Text(0, 12)
    tree = Object(tuple(Property(name, text, True) for name in "abc"))
    rules = json_rules(JsonTree(tree, {}), "line", 128, 32)
    assert rules.count("Regex(") == 1
    data = compiled_tree(tree)
    for sizes in ((12, 12, 12), (0, 5, 12), (13, 1, 1), (1, 13, 1), (1, 1, 13)):
        value = {name: "é" * size for name, size in zip("abc", sizes, strict=True)}
        assert accepts(data, json.dumps(value, ensure_ascii=False)) == (max(sizes) <= 12)


def test_many_lengths_are_budgets(request: pytest.FixtureRequest) -> None:
    """Where automata of all lengths would take too long, a budget keeps some as exactly."""
    assert chars_behind_quote([b'a"b"cd', b'"\xc3\xa9', b"xxxxxxx"]) == 4
    ends = [(i % 3, 90 - i) for i in range(6)]
    tree = Object(tuple(Property(f"f{i}", Text(*one), True) for i, one in enumerate(ends)))
    behind = chars_behind_quote(tokens())
    assert "max_chars" not in json_rules(JsonTree(tree, {}), "line", 128, 128)
    rules = json_rules(JsonTree(tree, {}), "line", 128, behind)
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


# ---- Sizes


def test_shared_definitions_stay_small() -> None:
    """Each uses the next one twice: 2^40 places, but 40 definitions."""
    defs = {f"d{i}": Array((Ref(f"d{i + 1}"),) * 2, None, 2) for i in range(40)}
    rules = json_rules(JsonTree(Ref("d0"), {**defs, "d40": ONE}), "indented", 32, 8)
    assert len(rules) < 20_000


def wide_object(num: int, *, is_required: bool, **more: object) -> dict[str, object]:
    names = [f"property_{one}" for one in range(num)]
    value = {"type": ["string", "null"]}
    return {
        "type": "object",
        "properties": dict.fromkeys(names, value),
        "required": names if is_required else [],
        **more,
    }


@pytest.mark.parametrize(
    ("schema", "most_bytes"),
    [
        (wide_object(300, is_required=False), 400_000),
        (wide_object(300, is_required=True), 200_000),
        (
            {
                "type": "object",
                "properties": {
                    f"part_{one}": wide_object(12, is_required=False, additionalProperties=True)
                    for one in range(20)
                },
            },
            400_000,
        ),
        ({"enum": [f"value {one}" for one in range(5000)]}, 20_000),
        ({"oneOf": [{"type": "object", "properties": {"type": {"const": f"event.{one}"},
                     f"data_{one}": {"type": "integer"}}, "required": ["type"]}
                    for one in range(200)]}, 400_000),
    ],
    ids=["optional", "required", "others", "enum", "events"],
)  # fmt: skip
def test_large_schemas_compile_soon(schema: object, most_bytes: int) -> None:
    start = time.process_time()
    data = compiled_schema(schema)
    assert time.process_time() - start < 6
    assert len(data) < most_bytes
