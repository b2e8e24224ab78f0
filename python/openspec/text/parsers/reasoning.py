"""Thinking apart from the rest of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from openspec.text.parsers.pieces import THINK_CLOSE, THINK_OPEN
from openspec.text.tokenizer import Tokenizer


def thinking_of(prompt: str) -> bool | None:
    """Whether the answer to a chat starts within a thinking block; None where it cannot think."""
    end = prompt.rstrip()
    return None if end.endswith(THINK_CLOSE) else end.endswith(THINK_OPEN)


def begins_with_tag(text: str, is_whole: bool) -> bool | None:
    """Whether a text begins with thinking's first tag; None while more of it must come first."""
    stripped = text.lstrip()
    if stripped.startswith(THINK_OPEN):
        return True
    return None if THINK_OPEN.startswith(stripped) and not is_whole else False


def held_back(text: str, marker: str) -> int:
    """Characters at the end of `text` that wait: line ends, and what could begin `marker`.

    Line ends wait because those before a marker belong to its layout, not to the text.
    """
    partial = 0
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            partial = size
            break
    rest = text[: len(text) - partial]
    return partial + len(rest) - len(rest.rstrip("\n"))


@dataclass(slots=True)
class ReasoningSplitter:
    """Text between the thinking tags goes one way, the rest the other.

    The tags and the line ends next to them go nowhere. A block opens only at the very start of the
    output (or already in the prompt): later tags are the model quoting itself, and stay text. Some
    models open it once more at once; that tag is dropped.
    """

    is_open: bool = False
    """Whether the prompt itself opened a thinking block."""
    is_assumed: bool = False
    """Whether an answer begins with thinking even where no tag opens it."""
    _pending: str = field(default="", init=False)
    _state: Literal["start", "thinking", "answer"] = field(default="start", init=False)
    _is_after_tag: bool = field(default=False, init=False)
    """No text has followed the last tag yet."""
    _may_open_again: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.is_open:
            self._enter("thinking", "")

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> tuple[str, str]:
        """The thinking and the answer that are certain after this piece of text.

        With `is_cut` a limit ended the text, and what is left of a tag is dropped.
        """
        self._pending += text
        is_end = is_last and not is_cut
        if self._state == "start":
            opens = begins_with_tag(self._pending, is_end)
            if opens is None:
                return "", ""
            if opens:
                self._enter("thinking", self._pending.lstrip().removeprefix(THINK_OPEN))
            elif self.is_assumed:
                self._enter("thinking", self._pending)
            else:
                self._state = "answer"
        if self._state == "thinking" and self._may_open_again:
            opens = begins_with_tag(self._pending, is_end)
            if opens is None:
                return "", ""
            if opens:
                self._enter("thinking", self._pending.lstrip().removeprefix(THINK_OPEN))
            self._may_open_again = False
        thinking = ""
        if self._state == "thinking":
            before, tag, after = self._pending.partition(THINK_CLOSE)
            if tag:
                thinking = self._without_gap(before.rstrip("\n"))
                self._enter("answer", after)
            else:
                size = len(before) - (0 if is_end else held_back(before, THINK_CLOSE))
                self._pending = before[size:]
                return self._without_gap(before[:size]), ""
        answer, self._pending = self._without_gap(self._pending), ""
        return thinking, answer

    def _enter(self, state: Literal["thinking", "answer"], rest: str) -> None:
        self._state, self._pending, self._is_after_tag = state, rest, True

    def _without_gap(self, text: str) -> str:
        if self._is_after_tag:
            text = text.lstrip("\n")
            self._is_after_tag = not text
        return text


class ThinkingSpan:
    """How far the thinking at the beginning of an answer goes, with the line ends after it."""

    def __init__(self, thinking: bool | None, is_assumed: bool) -> None:
        """`thinking` as in `MessageParser`; `is_assumed` as in `ReasoningSplitter`."""
        self.is_over = thinking is None
        """Whether all further text is the answer."""
        self._is_open, self._is_assumed = bool(thinking), is_assumed
        self._is_closed = False
        self._tail = ""

    def push(self, text: str) -> int | None:
        """How many characters at the beginning of this piece belong to it.

        None: that takes more text, and this piece is to come again with it.
        """
        if not self._is_open:
            opens = begins_with_tag(text, is_whole=False)
            if opens is None:
                return None
            if not opens and not self._is_assumed:
                self.is_over = True
                return 0
            self._is_open = True
        end = 0
        if not self._is_closed:
            seen = self._tail + text
            found = seen.find(THINK_CLOSE)
            if found < 0:
                self._tail = seen[1 - len(THINK_CLOSE) :]
                return len(text)
            self._is_closed = True
            end = found + len(THINK_CLOSE) - len(self._tail)
        rest = text[end:].lstrip("\n")
        self.is_over = bool(rest)
        return len(text) - len(rest)


class ThinkingTokens:
    """Counts the tokens of a thinking block by its tags' ids."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None, is_assumed: bool) -> None:
        """`thinking` as in `MessageParser`."""
        self._open = tokenizer.encode(THINK_OPEN, parse_special=True)
        self._close = tokenizer.encode(THINK_CLOSE, parse_special=True)
        has_tags = len(self._open) == 1 and len(self._close) == 1
        is_open = bool(thinking) or (thinking is False and is_assumed)
        self._is_thinking = is_open and has_tags
        self._may_start = thinking is False and not is_assumed and has_tags
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer."""
        if self._may_start and token_ids:
            self._is_thinking = token_ids[0] == self._open[0]
            self._may_start = False
        if not self._is_thinking:
            return
        for number, token_id in enumerate(token_ids, start=1):
            if token_id == self._close[0]:
                self.count += number
                self._is_thinking = False
                return
        self.count += len(token_ids)
