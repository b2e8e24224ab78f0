"""Thinking apart from the answer, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from openspec.text.parsers.reasoning import ReasoningSplitter, ThinkingSpan, held_back


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 8))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def split(pieces: list[str], is_open: bool, is_assumed: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open, is_assumed=is_assumed)
    parts = [splitter.push(p, i == len(pieces) - 1) for i, p in enumerate(pieces)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("plain", False, ("", "plain")),
        ("<think>\nabc</think>\n\nanswer", False, ("abc", "answer")),
        ("\n<think>abc</think>answer", False, ("abc", "answer")),
        ("abc</think>answer", True, ("abc", "answer")),
        ("abc</thin", True, ("abc</thin", "")),
        ("<think>never closed", False, ("never closed", "")),
        ("<thin", False, ("", "<thin")),
        ("a <think>b</think>", False, ("", "a <think>b</think>")),
        ("<think></think>x</think>y", False, ("", "x</think>y")),
        ("", False, ("", "")),
        ("  ", False, ("", "  ")),
    ],
)
def test_thinking_between_tags(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    rng = random.Random(text)
    for _ in range(60):
        assert split(cuts(text, rng), is_open, False) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc\n</think>\n\nanswer", ("abc", "answer")),
        ("<think>\nabc</think>answer", ("abc", "answer")),
        ("\n<think>\nabc</think>answer", ("abc", "answer")),
        ("never closed", ("never closed", "")),
        ("a <think> b</think>c</think>", ("a <think> b", "c</think>")),
        ("<thi", ("<thi", "")),
        ("", ("", "")),
    ],
)
def test_thinking_whose_first_tag_may_be_missing(text: str, expected: tuple[str, str]) -> None:
    rng = random.Random(text)
    for _ in range(60):
        assert split(cuts(text, rng), False, True) == expected


def test_held_back() -> None:
    assert held_back("abc</th", "</think>") == 4
    assert held_back("abc", "</think>") == 0


@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_limit_leaves_of_tags_is_no_text(is_open: bool) -> None:
    text = ("" if is_open else "<think>\n") + "<think>\nHm.\n</think>\n\nYes."
    for end in range(len(text)):
        for size in (1, 5, len(text)):
            splitter = ReasoningSplitter(is_open=is_open)
            pieces = [text[at : min(at + size, end)] for at in range(0, end, size)]
            found = [splitter.push(one) for one in pieces] + [splitter.push("", True, True)]
            thinking, answer = ("".join(parts) for parts in zip(*found, strict=True))
            assert "Hm.".startswith(thinking) and "Yes.".startswith(answer)


def test_the_second_opening_tag_alone_is_dropped() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>\n<think>\na <think> b</think>c") == ("a <think> b", "c")


@pytest.mark.parametrize(
    ("text", "thinking", "is_assumed", "size"),
    [
        ("a</think>b", None, False, 0),
        ("a</think>b", False, False, 0),
        ("a</think>b", False, True, 9),
        ("a</think>b", True, False, 9),
        ("\n<think>a</think>\n\nb</think>", False, False, 19),
        ("<think>\na b", False, False, 11),
        ("\n b", False, False, 0),
    ],
)
def test_how_far_thinking_goes(
    text: str, thinking: bool | None, is_assumed: bool, size: int
) -> None:
    for seed in range(30):
        span, held, found = ThinkingSpan(thinking, is_assumed), "", 0
        for piece in cuts(text, random.Random(seed)):
            if span.is_over:
                break
            num = span.push(held + piece)
            held = held + piece if num is None else ""
            found += num or 0
        assert found == size
