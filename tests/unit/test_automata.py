"""Automata of patterns: the texts that Python's patterns match, sets of them, and UTF-8."""

from __future__ import annotations

import itertools
import random
import re
import sys
import time

import pytest

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.pattern import Pattern, PatternError
from tests.unit.pattern_walks import SpelledOut, random_pattern

SURROGATES = set(range(0xD800, 0xE000))
TEXTS = ["".join(text) for n in range(5) for text in itertools.product("abé/", repeat=n)]
HARMLESS = (
    "^[a-z]{1,64}$",
    "^.{0,200}x$",
    ".{0,200}x",
    "(a?){2000}",
    "(((a?){12}){12}){12}",
    "((a|b|ab|ba|aa|bb)*(a|b)*)*((a|b)*|(ab)*)*",
    r"(([a-z]+ ?)+\n?)+",
    r"((.{2})+)+x",
    r"((\w|\s)+)*\?",
    r"(\w+\s?)+\.",
)
BOMBS = (".*a.{100}", "(.*a.{20}){3}", "(a{1000}){1000}", "(((((a{9}){9}){9}){9}){9})", "a" * 5000)


def automaton(source: str) -> Automaton:
    return Pattern(source).automaton(is_anchored=True)


@pytest.mark.parametrize("seed", range(60))
def test_matches_as_python_does(seed: int) -> None:
    rng = random.Random(seed)
    source = random_pattern(rng, 4)
    for is_anchored, find in ((True, re.fullmatch), (False, re.search)):
        found = Pattern(source).automaton(is_anchored=is_anchored)
        for text in rng.sample(TEXTS, 60):
            assert found.accepts(text) == (find(source, text, re.ASCII) is not None), (source, text)


@pytest.mark.parametrize("seed", range(60))
def test_sets_of_texts(seed: int) -> None:
    rng = random.Random(seed)
    one, two = (automaton(random_pattern(rng, 3)) for _ in range(2))
    for text in rng.sample(TEXTS, 60):
        in_one, in_two = one.accepts(text), two.accepts(text)
        assert (one & two).accepts(text) == (in_one and in_two)
        assert (one | two).accepts(text) == (in_one or in_two)
        assert (one - two).accepts(text) == (in_one and not in_two)
    assert one - (one - two) == one & two == two - (two - one)
    assert one | two == (one - two) | (two - one) | (one & two)
    assert hash(one | two) == hash(two | one)
    assert (one - one).is_empty
    assert one.without(((233, 233),)) == one & automaton("[^é]*")


@pytest.mark.parametrize("seed", range(30))
def test_bytes_of_utf8(seed: int) -> None:
    rng = random.Random(seed)
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF]
    near = [max(0, one + rng.randint(-70, 70)) for one in (*edges, *rng.choices(edges, k=40))]
    codes = sorted({one for one in (*edges, *near) if one <= sys.maxunicode} - SURROGATES)
    ends = sorted(rng.sample(codes, 2 * rng.randint(1, 4)))
    pairs = list(zip(ends[::2], ends[1::2], strict=True))
    ranges = "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in pairs)
    found = automaton(f"[{ranges}]|[{ranges}]x")
    spelled = SpelledOut(found.spelled())
    for code in codes:
        for text in (chr(code), chr(code) + "x"):
            is_in = any(low <= code <= high for low, high in pairs)
            assert found.accepts(text) == spelled.accepts(text.encode()) == is_in
        for cut in range(1, len(chr(code).encode())):
            assert not spelled.accepts(chr(code).encode()[:cut])
    assert not spelled.accepts("\ud8ff".encode("utf-8", "surrogatepass"))


def test_texts_and_lengths() -> None:
    names = sorted(f"property_{one * 7 % 90}" for one in range(90))
    found = Automaton.of_texts(names)
    assert all(map(found.accepts, names))
    assert found.lengths() == (10, 11)
    others = automaton("p.*") - found
    assert others.lengths() == (1, None)
    assert others.accepts("property_")
    assert not any(map(others.accepts, names))
    assert Automaton.of_texts([]).is_empty
    assert Automaton.of_texts([]).lengths() == (0, 0)
    assert Automaton.of_texts([""]) == automaton("")
    assert Automaton.of_texts(["a", "ab", "abb"]) == automaton("ab{0,2}")


@pytest.mark.parametrize("source", HARMLESS)
def test_repeats_in_repeats_are_small(source: str) -> None:
    start = time.process_time()
    found = Pattern(source).automaton(is_anchored=False)
    assert time.process_time() - start < 6
    assert found.num_states < 500


@pytest.mark.parametrize("source", BOMBS)
def test_bombs(source: str) -> None:
    start = time.process_time()
    with pytest.raises(PatternError):
        Pattern(source).automaton(is_anchored=False)
    assert time.process_time() - start < 6


def test_matching_takes_time_in_proportion() -> None:
    found = Pattern("(a+)+$").automaton(is_anchored=False)
    start = time.process_time()
    assert not found.accepts("a" * 100_000 + "b")
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("pattern", "text", "narrow", "wide"),
    [
        (r"\s", "\xa0", False, True),
        (r"\S", "\xa0", False, True),
        (r"[^\s]", "\xa0", False, True),
        (r"[^\S]", "\xa0", False, True),
        (r"[^\s]", "\u2002", False, True),
        (r"[^\s]", " ", False, False),
        (r"[\s]", " ", True, True),
        (r"[^\s]", "x", True, True),
    ],
)
def test_white_space_is_what_all_dialects_agree_on(
    pattern: str, text: str, narrow: bool, wide: bool
) -> None:
    assert Pattern(pattern).automaton(is_anchored=True).accepts(text) == narrow
    assert Pattern(pattern, is_wide=True).automaton(is_anchored=True).accepts(text) == wide
