"""Reasoning and tool calls, however the text is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from openspec.text.chat_parsers import ReasoningSplitter, ToolCallParser, held_back, parse_call

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "</tool"]}}\n</tool_call>'


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 8))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def split(pieces: list[str], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_open=is_open)
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
def test_reasoning(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    rng = random.Random(text)
    for _ in range(60):
        assert split(cuts(text, rng), is_open) == expected


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser()
    text, calls = "", []
    for number, piece in enumerate(pieces):
        more, found = parser.push(piece, number == len(pieces) - 1)
        text += more
        calls += [(call.name, call.arguments) for call in found]
    return text, calls


ADD = ("add", '{"a": [1, "</tool"]}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", [])),
        (f"a\n{CALL}", ("a", [ADD])),
        (f"{CALL}\n{CALL}", ("", [ADD, ADD])),
        (f"a{CALL}\nb{CALL}c", ("abc", [ADD, ADD])),
        (CALL.removesuffix("</tool_call>"), ("", [ADD])),
        ("<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
        ("<tool_call>[1", ("<tool_call>[1", [])),
        ("x\n\n<tool_call>y</tool_call>", ("x\n\n<tool_call>y</tool_call>", [])),
        (f"{CALL}\n<tool_call>y\n", ("<tool_call>y\n", [ADD])),
        ("a < b <tool", ("a < b <tool", [])),
    ],
)
def test_tool_calls(text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    rng = random.Random(text)
    for _ in range(60):
        assert parse(cuts(text, rng)) == expected


def test_calls_are_json_and_nothing_else() -> None:
    assert parse_call("__import__('os')") is None
    assert parse_call('{"name": 5}') is None
    assert parse_call("[" * 100_000) is None
    assert parse_call('{"name": "f"}').arguments == "{}"
    assert parse_call('{"name": "f", "arguments": "x"}').arguments == "x"
    # Python's parser reads these, others do not.
    assert parse_call('{"name": "f", "arguments": {"x": NaN}}') is None
    assert parse_call('{"name": "f", "arguments": {"x": [-1e999]}}') is None


def test_half_a_character_stays_an_escape() -> None:
    assert parse_call(r'{"name": "f", "arguments": {"é": "\ud83d"}}').arguments == (
        r'{"\u00e9": "\ud83d"}'
    )
    assert parse_call(r'{"name": "f", "arguments": {"a": "\ud83d\ude00"}}').arguments == (
        '{"a": "😀"}'
    )
    assert parse_call(r'{"name": "f\ud83d"}') is None
    assert parse_call(r'{"name": "f", "arguments": "\ud83d"}') is None


def test_held_back() -> None:
    assert held_back("abc</th", "</think>") == 4
    assert held_back("abc", "</think>") == 0
