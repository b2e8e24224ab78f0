"""Splits the model's thinking from its answer, over text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` could be the start of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


@dataclass(slots=True)
class ReasoningSplitter:
    """Text between the thinking tags goes one way, the rest the other; the tags go nowhere.

    A block opens only at the very start of the output (or already in the prompt): later tags are
    the model quoting itself, and stay text.
    """

    is_open: bool = False
    """Whether the prompt itself opened a thinking block."""
    _pending: str = field(default="", init=False)
    _state: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._state = "thinking" if self.is_open else "start"

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """The thinking and the answer that are certain after this piece of text."""
        self._pending += text
        thinking = ""
        if self._state == "start":
            stripped = self._pending.lstrip()
            if stripped.startswith(THINK_OPEN):
                self._state = "thinking"
                self._pending = stripped.removeprefix(THINK_OPEN).removeprefix("\n")
            elif THINK_OPEN.startswith(stripped) and not is_last:
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thinking":
            before, tag, after = self._pending.partition(THINK_CLOSE)
            if not tag:
                keep = 0 if is_last else held_back(before, THINK_CLOSE)
                thinking = before[: len(before) - keep]
                self._pending = before[len(before) - keep :]
                return thinking, ""
            thinking, self._pending, self._state = before, after, "gap"
        if self._state == "gap":
            self._pending = self._pending.lstrip("\n")
            if self._pending:
                self._state = "answer"
        answer, self._pending = self._pending, ""
        return thinking, answer
