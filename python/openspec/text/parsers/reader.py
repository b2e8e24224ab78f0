"""Text that comes in pieces, for parsers that are written as if it were all there.

A parser is a generator. Where it needs more text than there is, it yields, and goes on when more
has come or the text is over. What it finds depends on the text alone, never on its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser, called with `yield from`; T is its result."""

MAX_HEAD_CHARS = 1 << 16
"""What may be kept while it is open whether it belongs to a call."""
SPACES = re.compile(r"\s+")


class Reader:
    """A place in a text of which more may come.

    The cost of a piece is its own length, and that of the text since the mark while there is one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._is_over = self._is_cut = self._is_stopped = False
        self.ran_out = False
        """Whether the end of the text decided something since the last mark."""

    @property
    def is_cut_short(self) -> bool:
        """Whether that was the end of a text that the model did not end itself."""
        return self.ran_out and (self._is_cut or self._is_stopped)

    def feed(
        self, text: str, is_last: bool, is_cut: bool = False, is_stopped: bool = False
    ) -> None:
        """More text; with `is_last` there comes no more.

        That is so since a limit cut it (`is_cut`), or since a stop string followed (`is_stopped`).
        """
        kept = self._at if self._mark is None else self._mark
        self._text = self._text[kept:] + text
        self._at -= kept
        self._mark = None if self._mark is None else 0
        self._is_over, self._is_cut, self._is_stopped = is_last, is_cut, is_stopped

    def mark(self, num_back: int = 0) -> None:
        """Keeps the text from here on, or from so many characters before."""
        self._mark = self._at - num_back
        self.ran_out = False

    def unmark(self) -> str:
        """The text since the mark, which is kept no longer."""
        mark, self._mark = self._mark, None
        return "" if mark is None else self._text[mark : self._at]

    def drop(self) -> None:
        """Passes over the rest, and the text since the mark."""
        self._at, self._mark = len(self._text), None

    def is_long(self) -> bool:
        """Whether more is kept than any head of a call needs."""
        return self._mark is not None and self._at - self._mark > MAX_HEAD_CHARS

    def back(self, num: int) -> None:
        """Goes back over characters that were just read."""
        self._at -= num

    def peek(self) -> Steps[str]:
        """The next character; "" where the text is over."""
        while self._at == len(self._text) and not self._is_over:
            yield
        self.ran_out |= self._at == len(self._text)
        return self._text[self._at : self._at + 1]

    def match(self, marker: str) -> Steps[bool]:
        """Reads `marker` if the text goes on with it."""
        while True:
            rest = self._text[self._at : self._at + len(marker)]
            if rest == marker:
                self._at += len(marker)
                return True
            if not marker.startswith(rest):
                return False
            if self._is_over:
                self.ran_out = True
                return False
            yield

    def run(
        self, pattern: re.Pattern[str], emit: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Reads as much as `pattern` matches, a run of characters; returns it, or emits it.

        Ends early where too much is kept.
        """
        found: list[str] = []
        while not self.is_long():
            match = pattern.match(self._text, self._at)
            if match is not None:
                self._at = match.end()
                if emit is None:
                    found.append(match.group())
                else:
                    emit(match.group())
            if self._at < len(self._text):
                break
            if self._is_over:
                self.ran_out = True
                break
            yield
        return "".join(found)

    def spaces(self) -> Steps[str]:
        """Reads white space."""
        return self.run(SPACES)

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str]:
        """Emits the text up to the first of the markers, which is read and returned; "": none.

        What a cut leaves of a marker is not emitted.
        """
        found = _any(markers)
        while True:
            match = found.search(self._text, self._at)
            if match is not None:
                emit(self._text[self._at : match.start()])
                self._at = match.end()
                return match.group()
            end = len(self._text)
            if not self._is_over or self._is_cut:
                end = max(self._at, end - _num_held(self._text, markers))
            emit(self._text[self._at : end])
            self._at = end
            if self._is_over:
                self._at, self.ran_out = len(self._text), True
                return ""
            yield


@lru_cache
def _any(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _num_held(text: str, markers: tuple[str, ...]) -> int:
    """Characters at the end of the text that may be the beginning of a marker."""
    longest = max(map(len, markers)) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if text[start] in _firsts(markers) and any(
            marker.startswith(text[start:]) for marker in markers
        ):
            return len(text) - start
    return 0


@lru_cache
def _firsts(markers: tuple[str, ...]) -> frozenset[str]:
    return frozenset(marker[0] for marker in markers)
