from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openspec.text.stop_strings import StopMatch, StopStrings
from tests.unit.examples import examples

WORDS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5)
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)


def first_match(text: str, stop: list[str], ignore: int) -> tuple[int, str] | None:
    """By definition: the first end, and of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word) and end > ignore]
        if found:
            return end, max(found, key=len)
    return None


@pytest.mark.slow
@examples(1000)
@given(WORDS, PIECES, st.integers(0, 6))
def test_advance_is_the_definition(stop: list[str], pieces: list[str], num_deaf: int) -> None:
    automaton = StopStrings(stop)
    state = 0
    text = ""
    ignore = len("".join(pieces[:num_deaf]))
    for index, piece in enumerate(pieces):
        is_deaf = index < num_deaf
        state, match = automaton.advance(state, piece, len(piece) if is_deaf else 0)
        expected = first_match(text + piece, stop, ignore)
        if match is not None:
            assert expected == (len(text) + match.end, match.text)
            assert match.begin == match.end - len(match.text)
            return
        assert expected is None
        text += piece
        prefixes = {word[:n] for word in stop for n in range(1, len(word) + 1)}
        held = max((len(p) for p in prefixes if text.endswith(p)), default=0)
        assert automaton.depth(state) == held


def test_examples() -> None:
    stop = StopStrings(["abcd", "bc", "x\n\ny"])
    assert stop.advance(0, "abcd")[1] == StopMatch(1, 3, "bc")
    state, match = stop.advance(0, "1x\n")
    assert match is None
    assert stop.depth(state) == 2
    assert stop.advance(state, "\nyz")[1] == StopMatch(-2, 2, "x\n\ny")
    assert StopStrings([]).advance(0, "abc") == (0, None)


def test_a_nested_stop_string_is_found_while_a_longer_one_is_tried() -> None:
    assert StopStrings(["aabaax", "aba"]).advance(0, "aabaab")[1] == StopMatch(1, 4, "aba")
