"""What the parsers of all forms of tool calls share."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping

from openspec.text.parsers.pieces import CallArguments, CallEnd, CallStart, Content, Piece
from openspec.text.parsers.reader import Reader, Steps
from openspec.text.parsers.value_types import ValueTypes

MAX_NAME_CHARS = 256

ToolTypes = Mapping[str, ValueTypes]
"""The request's tools by name: the types of their parameters, where the form needs them."""


class CallParser(ABC):
    """Takes an answer apart into content and calls.

    What is no call after all is content. A call is one from where its name and the beginning of its
    arguments are known; these go out as they come, the way the model writes them. Line ends around
    calls are layout and go nowhere.
    """

    needs_types = False
    """Whether values are bare text, which the types of parameters make JSON of."""

    def __init__(self, tools: ToolTypes) -> None:
        self.tools = tools
        self.reader = Reader()
        self._pieces: list[Piece] = []
        self._arguments: list[str] = []
        self._num_calls = 0
        self._is_in_call = False
        self._num_line_ends = 0  # after the content so far: layout, if a call follows
        self._is_after_call = False
        self._steps = self.parse()

    def push(
        self, text: str, is_last: bool = False, is_cut: bool = False, is_stopped: bool = False
    ) -> list[Piece]:
        """What is certain after one more piece of text; arguments as of `Reader.feed`."""
        self.reader.feed(text, is_last, is_cut, is_stopped)
        next(self._steps, None)
        if is_last:
            self.end()
            if self._num_line_ends and not self._is_after_call:
                self._pieces.append(Content("\n" * self._num_line_ends))
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Reads the whole answer."""

    def new_id(self) -> str:
        """The name by which a call's result refers to it."""
        return f"call_{secrets.token_hex(12)}"

    def say(self, text: str) -> None:
        """Content."""
        if self._is_after_call:
            text = text.lstrip("\n")
            self._is_after_call = not text
        body = text.rstrip("\n")
        if body:
            self._pieces.append(Content("\n" * self._num_line_ends + body))
            self._num_line_ends = 0
        self._num_line_ends += len(text) - len(body)

    def begin(self, name: str) -> None:
        """A call begins; the text since the mark belongs to it."""
        self.end()
        self.reader.unmark()
        self._num_line_ends = 0
        self._is_in_call = True
        self._pieces.append(CallStart(self._num_calls, self.new_id(), name))

    def argue(self, text: str) -> None:
        """More of the call's arguments."""
        if text:
            self._arguments.append(text)

    def end(self) -> None:
        """Ends the call, where there is one."""
        if self._is_in_call:
            self._flush()
            self._pieces.append(CallEnd(self._num_calls, self.reader.is_cut_short))
            self._num_calls += 1
            self._is_in_call = False
            self._is_after_call = True

    def say_marked(self) -> None:
        """The text since the mark belongs to no call: it is content, unless a cut decided that."""
        if self.reader.is_cut_short:
            self.reader.drop()
        else:
            self.say(self.reader.unmark())

    def _flush(self) -> None:
        if self._arguments:
            self._pieces.append(CallArguments(self._num_calls, "".join(self._arguments)))
            self._arguments.clear()
