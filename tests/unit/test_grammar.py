"""`openspec._grammar`: what it compiles, refuses and forces, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import jsonschema_rs
import pytest

from openspec import _grammar
from openspec.grammar.formats import ANY_OBJECT, Format, json_of, pattern
from openspec.grammar.rules.json_rules import compile_format
from openspec.grammar.schemas.schema import enforceable

END = 256
TOKENS = [bytes([byte]) for byte in range(256)] + [b"", b'{"', b"name", b'": "', b'"}', b""]
SCHEMA: Format = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> _grammar.Vocabulary:
    return _grammar.Vocabulary(TOKENS, 300, [END])


def ebnf(rules: str) -> Format:
    return {"type": "grammar", "grammar": rules}


def compiled(vocabulary: _grammar.Vocabulary, format: Format) -> bytes:
    return compile_format(vocabulary, format)


def accepts(vocabulary: _grammar.Vocabulary, data: bytes, text: bytes) -> bool:
    """Whether the text, byte by byte, and then the end pass; each token also by its mask."""
    matcher = _grammar.Matcher(vocabulary, data)
    for token in [*text, END]:
        is_allowed = token in matcher.allowed()
        assert matcher.accept(token) == is_allowed
        if not is_allowed:
            return False
    assert matcher.is_terminated
    return True


def test_loads_without_torch() -> None:
    code = "import sys; from openspec import _grammar; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (json_of(enforceable(SCHEMA)), b'{ "name": "a{b" }', b'{"name": 1}'),
        (json_of(ANY_OBJECT), b'{"a": [1, null]}', b"[1]"),
        (pattern("a(bc)*[0-9]{2}"), b"abcbc07", b"ab07"),
        (ebnf('root ::= "yes" | "no"'), b"no", b"maybe"),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<t>"],
                "tags": [
                    {
                        "begin": "<t>",
                        "content": json_of(enforceable({"type": "integer"})),
                        "end": "</t>",
                    }
                ],
            },
            b"so <t>42</t>.",
            b"so <t>x</t>",
        ),
    ],
    ids=["json_schema", "json_object", "regex", "ebnf", "structural_tag"],
)
def test_masks_and_matches(
    vocabulary: _grammar.Vocabulary, format: Format, good: bytes, bad: bytes
) -> None:
    data = compiled(vocabulary, format)
    assert accepts(vocabulary, data, good)
    assert not accepts(vocabulary, data, bad)


def test_answers_validate(vocabulary: _grammar.Vocabulary) -> None:
    """Whichever way the masks leave, what comes out is what another validator accepts."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 3, "maximum": 12},
            "kind": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["id", "kind"],
        "additionalProperties": False,
    }
    data = compiled(vocabulary, json_of(enforceable(schema), "line"))
    for seed in range(30):
        matcher = _grammar.Matcher(vocabulary, data)
        text = b""
        for step in range(200):
            allowed = [token for token in matcher.allowed() if token < END] or [END]
            if END in matcher.allowed():
                break
            token = allowed[(seed * 7919 + step * 104729) % len(allowed)]
            assert matcher.accept(token)
            text += TOKENS[token]
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


def test_offers_are_the_longest_tokens(vocabulary: _grammar.Vocabulary) -> None:
    data = compiled(vocabulary, pattern(r'\{"name": "[a-z]*"}'))
    matcher = _grammar.Matcher(vocabulary, data)
    assert matcher.offer(8) == [257, 258, 259]
    assert matcher.offer(2) == [257, 258]
    assert ord("{") in matcher.allowed()  # it asked, and stayed where it was
    for token in b'{"name": "x"}':
        assert matcher.accept(token)
    assert matcher.offer(8) == [END]
    assert matcher.accept(END)
    assert matcher.is_terminated
    assert matcher.offer(8) == []
    assert not matcher.accept(END)
    assert matcher.bitmask() == b"\xff" * 40


def test_goes_back(vocabulary: _grammar.Vocabulary) -> None:
    matcher = _grammar.Matcher(vocabulary, compiled(vocabulary, pattern("ab*c")))
    before = matcher.bitmask()
    for token in b"abc":
        assert matcher.accept(token)
    assert matcher.accept(END)
    matcher.rollback(4)
    assert not matcher.is_terminated
    assert matcher.bitmask() == before


def test_ids_without_bytes_are_never_allowed(vocabulary: _grammar.Vocabulary) -> None:
    matcher = _grammar.Matcher(vocabulary, compiled(vocabulary, pattern(r"[\x00-\U0010ffff]*")))
    assert not {261, 262, 299} & set(matcher.allowed())
    assert END in matcher.allowed()
    for token in (-1, 261, 299, 300, 1 << 30):
        assert not matcher.accept(token)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: _grammar.compile_structural_tag(v, "{"), "JSON"),
        (lambda v: compiled(v, pattern("a(b")), "parenthesis is not closed"),
        (lambda v: compiled(v, ebnf("root ::= foo")), 'Rule "foo" is not defined'),
        (lambda v: _grammar.compile_structural_tag(v, "{}"), "format field"),
        (lambda v: compiled(v, ebnf("root[max_tokens=4] ::= [a-z]*")), "has max_tokens"),
        (lambda v: _grammar.Matcher(v, b"{}"), "not a compiled grammar"),
        (lambda v: _grammar.Vocabulary([b"a"], 1, []), "token that ends"),
        (lambda v: _grammar.Vocabulary([b"a"], 1, [1]), "outside the vocabulary of 1"),
        (
            lambda v: _grammar.Matcher(
                _grammar.Vocabulary([b"a", b"b"], 2, [1]), compiled(v, pattern("a"))
            ),
            "metadata mismatch",
        ),
    ],
)
def test_refuses(
    vocabulary: _grammar.Vocabulary,
    make: Callable[[_grammar.Vocabulary], object],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        make(vocabulary)
