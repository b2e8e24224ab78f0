"""Patterns: what is parsed and what is refused, and masks that are exactly what one allows."""

from __future__ import annotations

import random
import time

import pytest

from openspec import _grammar
from openspec.grammar.formats import matching
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern
from tests.unit.grammar_walks import STOP, compiled, tokenizer, tokens, vocabulary
from tests.unit.pattern_walks import SpelledOut, random_pattern

REFUSED = (
    "(?=a)b (?!a)b (?<=a)b (?<!a)b a\\b \\1 \\k<x> \\p{L} (?i)a a** a{3,2} ( x) [a [b-a] a^b a$b "
    "*a (^a|b) \\uxy \\ud800 a{9999999} \\x+4 \\u{1_0} \\u+041 \\u{110000} "
    "\\c1 x{,3} [[:alpha:]] [^[:x:]]"
).split(" ")
SAME = [  # pairs that match the same texts
    (r"\x41\u0042\u{43}\cJ\t", "ABC\n\t"),
    ("(?<n>a)(?:b)(?P<m>c)", "abc"),
    ("[a-c-]", "a|b|c|-"),
    (r"[\d-.]", r"[0-9.-]"),
    ("a{2}?b*?", "aab*"),
    ("{a}x{y", r"\{a\}x\{y"),
    ("(a|b)*", "[ab]*"),
    ("(a+)+", "a+"),
    ("((a*)*|b)*", "[ab]*"),
    (r"[^\0-\u{d7ff}]", r"[\u{e000}-\u{10ffff}]"),
    (r"[\u{0}-\u{10ffff}]", r"[\d\D]"),
]  # fmt: skip
WRONG_BEFORE = (
    "b?[^a]*9",
    "[a-z]?[^a-z]*z",
    r"\s?[^ ]*x",
    r"(\w[^a]*)?[^a]*9",
    "((a|b|ab|ba|aa|bb)*(a|b)*)*((a|b)*|(ab)*)*",
    r"(([a-z]+ ?)+\n?)+",
    r"((.{2})+)+x",
    r"((\w|\s)+)*\?",
    r"(\w+\s?)+\.",
)


def automaton(source: str) -> Automaton:
    return Pattern(source).automaton(is_anchored=True)


def check_masks(found: Automaton, rng: random.Random, most: int) -> None:
    """Each mask of a walk holds exactly the tokens that an automaton of our own takes."""
    matcher = _grammar.Matcher(vocabulary(), compiled(matching(found)))
    spelled, state, known = SpelledOut(found.spelled()), 0, dict[int, set[int]]()
    for _ in range(most):
        if state not in known:
            known[state] = {
                token
                for token, text in enumerate(tokens())
                if text and token != STOP and spelled.after(state, text) is not None
            }
        expected = known[state] | ({STOP} if state in spelled.ends else set())
        assert set(matcher.allowed()) == expected
        if not known[state]:
            return
        token = rng.choice(sorted(known[state]))
        assert matcher.accept(token)
        after = spelled.after(state, tokens()[token])
        assert after is not None
        state = after


@pytest.mark.parametrize("source", WRONG_BEFORE)
def test_masks_are_exact(source: str) -> None:
    check_masks(automaton(source), random.Random(source), 20)


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_random_patterns_are_exact(seed: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(seed)
    for _ in range(100 if request.config.getoption("--full") else 3):
        source = random_pattern(rng, 4)
        check_masks(automaton(source), rng, 8)
        within = Pattern(source).automaton(is_anchored=False)
        check_masks(within, rng, 8)


def test_masks_stay_fast_however_ambiguous_the_pattern() -> None:
    found = automaton("((a|b|ab|ba|aa|bb)*(a|b)*)*((a|b)*|(ab)*)*")
    matcher = _grammar.Matcher(vocabulary(), compiled(matching(found)))
    for _ in range(200):
        assert matcher.accept(tokenizer().encode("ab")[0])
    fastest = float("inf")
    for _ in range(5):
        start = time.thread_time()
        matcher.bitmask()
        fastest = min(fastest, time.thread_time() - start)
    assert fastest < 1e-3


@pytest.mark.parametrize("source", REFUSED)
def test_what_no_grammar_enforces(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


@pytest.mark.parametrize("source", ["x{,3}", "[[:alpha:]]"])
def test_other_dialects_are_named(source: str) -> None:
    with pytest.raises(PatternError, match="ECMA 262"):
        Pattern(source)


@pytest.mark.parametrize(("one", "two"), SAME)
def test_ways_to_write_the_same(one: str, two: str) -> None:
    assert Pattern(one, is_wide=True).automaton(is_anchored=True) == automaton(two)


def test_a_pattern_may_be_anywhere_unless_it_is_bound() -> None:
    found = Pattern("^a|b$|c").automaton(is_anchored=False)
    for text, fits in {"ax": True, "xa": False, "xb": True, "bx": False, "xcx": True}.items():
        assert found.accepts(text) == fits
