"""Patterns: parsed, bounded, and matched by the library exactly as Python matches them."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from openspec import _grammar
from openspec.grammar.formats import json_of
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON
from openspec.grammar.patterns.pattern import Pattern, PatternError, bounded, other_than, render
from tests.unit.grammar_walks import STOP, compiled, tokens, vocabulary

TEXTS = ["".join(text) for n in range(5) for text in itertools.product("ab/", repeat=n)]
WRONG = (
    "(?=a)b (?!a)b (?<=a)b (?<!a)b a\\b \\1 \\k<x> \\p{L} (?i)a a** a{3,2} ( x) [a [b-a] a^b a$b "
    "*a (^a|b) \\uxy \\ud800 a{9999999}"
).split(" ")


def matches(data: bytes, text: str) -> bool:
    matcher = _grammar.Matcher(vocabulary(), data)
    ids = [tokens().index(bytes([byte])) for byte in text.encode()]
    return all(map(matcher.accept, ids)) and matcher.accept(STOP)


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(["a", "b", "/", "[ab]", "[^a]", "."])
    inner = random_pattern(rng, depth - 1)
    if kind < 0.6:
        return f"({inner}){rng.choice(['*', '+', '?', '{0,2}', '{2}', '{1,}'])}"
    other = random_pattern(rng, depth - 1)
    return f"({inner}|{other})" if kind < 0.75 else inner + other


@pytest.mark.parametrize("seed", range(16))
def test_the_library_matches_as_python_does(seed: int) -> None:
    source = random_pattern(random.Random(seed))
    for is_anchored, find in ((True, re.fullmatch), (False, re.search)):
        pattern = render(Pattern(source).whole(is_anchored=is_anchored), ESCAPED_IN_JSON)
        in_json = compiled(json_of({"pattern": pattern, "type": "string"}))
        alone = compiled({"type": "regex", "pattern": pattern})
        for text in random.Random(seed).sample(TEXTS, 60):
            expected = find(source, text) is not None
            assert matches(in_json, f'"{text}"') == expected, (source, text)
            assert matches(alone, text) == expected, (source, text)


@pytest.mark.parametrize("source", WRONG)
def test_what_no_grammar_enforces(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


@pytest.mark.parametrize("source", ["(a{1000}){1000}", "a" * 5000, "(((((a{9}){9}){9}){9}){9})"])
def test_bombs(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 3), (0, 200), (130, 140), (128, 129), (150, 1 << 40)]
)
def test_lengths(low: int, high: int) -> None:
    choice = bounded(Pattern("^[ab]+$").whole(is_anchored=False), low, high)
    data = compiled({"type": "regex", "pattern": render(choice)})
    for size in (0, 1, 2, 3, 4, 127, 128, 129, 130, 139, 140, 141, 149, 150, 199, 200, 201):
        assert matches(data, "a" * size) == (max(low, 1) <= size <= high), size


def test_any_text_but_some() -> None:
    names = ["", "a", "ab", "b/"]
    data = compiled({"type": "regex", "pattern": render(other_than(names))})
    for text in TEXTS:
        assert matches(data, text) == (text not in names), text


def test_characters_that_json_escapes() -> None:
    with pytest.raises(PatternError, match="escape"):
        render(Pattern('^"a"$').whole(is_anchored=False), ESCAPED_IN_JSON)
    either = Pattern('^("|a)$').whole(is_anchored=False)
    assert render(either, ESCAPED_IN_JSON) == "(([a]))"
