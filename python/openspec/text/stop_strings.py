"""Stop strings found in a stream of text, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string found. Offsets are relative to the text given to the call that found it."""

    begin: int
    """May be negative: in text given before."""
    end: int
    text: str


class StopStrings:
    """An Aho-Corasick automaton over a request's stop strings; immutable, shared by its copies.

    Its states are the prefixes of the stop strings: after any text, the state is the longest
    suffix of the text that is such a prefix. 0 is the empty one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Builds the automaton; its size is that of the strings."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]  # the longest stop string that ends in the state
        for text in stop:
            self._insert(text)
        self._fallback = self._link()

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[state]

    def advance(
        self, state: int, text: str, ignore_before: int = 0
    ) -> tuple[int, StopMatch | None]:
        """Reads `text`; ends early at the first stop string that is completed.

        Of several that are completed by the same character it is the longest. One that ends within
        the first `ignore_before` characters does not count.
        """
        edges, fallback, found = self._next, self._fallback, self._found
        for index, character in enumerate(text):
            while state and character not in edges[state]:
                state = fallback[state]
            state = edges[state].get(character, 0)
            match = found[state]
            if match is not None and index >= ignore_before:
                return state, StopMatch(index + 1 - len(match), index + 1, match)
        return state, None

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(None)
            state = following
        if state:
            self._found[state] = text

    def _link(self) -> list[int]:
        """For every state the longest proper suffix of it that is a state, shortest first."""
        fallback = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:  # grows while it is read: breadth first
            if self._found[state] is None:
                self._found[state] = self._found[fallback[state]]
            for character, following in self._next[state].items():
                candidate = fallback[state]
                while candidate and character not in self._next[candidate]:
                    candidate = fallback[candidate]
                fallback[following] = self._next[candidate].get(character, 0)
                queue.append(following)
        return fallback
