from __future__ import annotations

import io
import sys

import pytest
from tokenizers import Tokenizer, decoders, models

from openspec.bench.client import Completion
from openspec.bench.load import LoadResult
from openspec.bench.palette import POSITIONS
from openspec.messages import SpecDecodeStats
from openspec.tools import demo
from openspec.tools.demo import (
    OWN,
    Demonstration,
    figures_of_demo,
    pieces_of,
    printable,
    rendered,
    takes_color,
)


def tokenizer() -> Tokenizer:
    # "é" is two bytes, C3 A9, and here two tokens.
    vocab = {"a": 0, "b": 1, "c": 2, "Ã": 3, "©": 4}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    return made


def test_each_token_has_its_position_in_the_draft() -> None:
    pieces = pieces_of([0, 1, 2, 0, 1], [0, 2, 0], tokenizer())
    assert pieces == [("a", OWN), ("b", 1), ("c", 2), ("a", OWN), ("b", OWN)]


def test_answer_that_ends_with_a_draft() -> None:
    assert pieces_of([0, 1, 2], [0, 2], tokenizer()) == [("a", OWN), ("b", 1), ("c", 2)]


def test_character_of_several_tokens() -> None:
    assert pieces_of([0, 3, 4, 1], [1, 1], tokenizer()) == [("a", 1), ("é", 1), ("b", OWN)]
    assert pieces_of([0, 1], [], tokenizer()) == [("a", OWN), ("b", OWN)]


def demonstration(pieces: list[tuple[str, int]]) -> Demonstration:
    return Demonstration("ask", pieces, is_identical=True, figures=["8 tokens", "2 times plain"])


def test_colors_are_the_palettes() -> None:
    shown = rendered(demonstration([("a", OWN), ("b\n", 1), ("c", 9)]), has_color=True)
    first, last = POSITIONS[0], POSITIONS[-1]
    assert f"a\x1b[38;5;234;48;5;{first.xterm}mb\x1b[0m\n" in shown
    assert f"\x1b[38;5;234;48;5;{last.xterm}mc\x1b[0m" in shown
    assert all(tint.label in shown for tint in POSITIONS)
    assert shown.endswith("\n8 tokens\n2 times plain")


def test_without_color_there_is_no_escape() -> None:
    shown = rendered(demonstration([("a", OWN), ("b", 1)]), has_color=False)
    assert shown == "ask\n\nab\n\n8 tokens\n2 times plain"


@pytest.mark.parametrize("has_color", [True, False])
def test_hostile_answers_steer_no_terminal(has_color: bool) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202eabc\u2066"
    shown = rendered(demonstration([(hostile, OWN)]), has_color=has_color)
    assert "owned" in shown and "abc" in shown
    for character in "\x07\r\x9b\u202e\u2066":
        assert character not in shown
    assert "\x1b]" not in shown and "\x1b[2J" not in shown
    joined = "👩\u200d🔬 é\t|"
    assert printable(joined) == joined


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_who_gets_color(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not takes_color()  # pytest's stdout is no terminal
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert takes_color() == expected


@pytest.mark.parametrize("arguments", [[], ["--no-color"]])
def test_the_command_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(demo, "demonstrate", lambda *_: demonstration([("b", 1)]))
    assert demo.main(arguments) == 0
    assert ("\x1b[" in terminal.getvalue()) == (not arguments)


def result(token_ids: list[int], wall_s: float) -> LoadResult:
    stats = SpecDecodeStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6)
    return LoadResult([Completion(0.0, token_ids=token_ids, speculation=stats)], wall_s)


def test_figures() -> None:
    lines = figures_of_demo([result([1] * 8, 2.0)], [result([1] * 8, 1.0)], True)
    assert lines == [
        "8 tokens at 8 tok/s, 2.00x plain decoding (4 tok/s), identical to plain decoding: yes",
        "8 drafted, 6 accepted: acceptance rate 75%, mean acceptance length 4.00 tokens a step",
    ]


def test_no_ratio_without_drafts() -> None:
    """It would be the noise of the machine."""
    plain, drafted = result([1] * 8, 1.0), result([1] * 8, 2.0)
    drafted.completions[0].speculation = SpecDecodeStats()
    lines = figures_of_demo([plain], [drafted], True)
    assert lines[0] == "8 tokens at 4 tok/s, identical to plain decoding: yes"
    assert lines[1].startswith("0 drafted") and "plain" not in lines[1]


def test_no_speed_for_a_different_text() -> None:
    lines = figures_of_demo([result([1], 2.0)], [result([2], 1.0)], False)
    assert lines == ["identical to plain decoding: NO"]
