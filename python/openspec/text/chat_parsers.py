"""A chat answer taken apart as it comes: thinking, text, tool calls. Nothing is ever evaluated."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from openspec.text.tokenizer import Tokenizer

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"
MAX_CALL_CHARS = 1 << 20

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
    output (or already in the prompt): later tags are the model quoting itself, and stay text.
    """

    is_open: bool = False
    """Whether the prompt itself opened a thinking block."""
    _pending: str = field(default="", init=False)
    _state: Literal["start", "thinking", "answer"] = field(default="start", init=False)
    _is_after_tag: bool = field(default=False, init=False)
    """No text has followed the last tag yet."""

    def __post_init__(self) -> None:
        if self.is_open:
            self._enter("thinking", "")

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """The thinking and the answer that are certain after this piece of text."""
        self._pending += text
        if self._state == "start":
            stripped = self._pending.lstrip()
            if stripped.startswith(THINK_OPEN):
                self._enter("thinking", stripped.removeprefix(THINK_OPEN))
            elif THINK_OPEN.startswith(stripped) and not is_last:
                return "", ""
            else:
                self._state = "answer"
        thinking = ""
        if self._state == "thinking":
            before, tag, after = self._pending.partition(THINK_CLOSE)
            if tag:
                thinking = self._without_gap(before.rstrip("\n"))
                self._enter("answer", after)
            else:
                size = len(before) - (0 if is_last else held_back(before, THINK_CLOSE))
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


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call the model made."""

    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(slots=True)
class ToolCallParser:
    """Finds `<tool_call>{...}</tool_call>` in an answer that comes in pieces.

    What stands between the tags but is not a call is handed on as text, tags included: the client
    then sees what the model wrote rather than nothing.
    """

    _pending: str = field(default="", init=False)
    _is_inside: bool = field(default=False, init=False)
    _gap: str = field(default="", init=False)
    """Line ends before the tag: layout, if a call follows."""
    _is_after_call: bool = field(default=False, init=False)
    """No text has followed the last call yet."""

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[ParsedCall]]:
        """The text and the calls that are certain after this piece."""
        self._pending += text
        out: list[str] = []
        calls: list[ParsedCall] = []
        while True:
            tag = TOOL_CLOSE if self._is_inside else TOOL_OPEN
            before, found, after = self._pending.partition(tag)
            if not found:
                break
            self._pending = after
            if self._is_inside:
                self._end_call(before, TOOL_CLOSE, out, calls)
            else:
                text = before.rstrip("\n")
                self._gap = before[len(text) :]
                out.append(self._without_gap(text))
                self._is_inside = True
        if not self._is_inside:
            size = len(self._pending) - (0 if is_last else held_back(self._pending, TOOL_OPEN))
            out.append(self._without_gap(self._pending[:size]))
            self._pending = self._pending[size:]
        elif is_last or len(self._pending) > MAX_CALL_CHARS:
            # A model may stop right after the JSON, without the closing tag.
            before, self._pending = self._pending, ""
            self._end_call(before, "", out, calls)
        return "".join(out), calls

    def _end_call(self, text: str, tag: str, out: list[str], calls: list[ParsedCall]) -> None:
        self._is_inside = False
        call = parse_call(text)
        if call is None:
            out.append(self._without_gap(self._gap + TOOL_OPEN + text + tag))
        else:
            calls.append(call)
            self._is_after_call = True

    def _without_gap(self, text: str) -> str:
        if self._is_after_call:
            text = text.lstrip("\n")
            self._is_after_call = not text
        return text


def parse_call(text: str) -> ParsedCall | None:
    """The call in `{"name": ..., "arguments": {...}}`, or None."""
    try:
        value: object = json.loads(text)
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not name:
            return None
        if not isinstance(arguments, str):
            arguments = _json_text(arguments)
        # Escapes can spell half a character, which no answer can hold.
        (name + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return ParsedCall(f"call_{secrets.token_hex(12)}", name, arguments)


def _json_text(value: object) -> str:
    """JSON for clients: no NaN or Infinity, which Python reads and writes but others do not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _LONE_SURROGATE.search(text) else text


@dataclass(frozen=True, slots=True)
class MessagePieces:
    """What became certain."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


class MessageParser:
    """Follows one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool | None,
        has_tools: bool,
        max_calls: int | None,
    ) -> None:
        """`thinking`: whether the prompt opened a thinking block; None if there can be none."""
        self._splitter = None if thinking is None else ReasoningSplitter(is_open=thinking)
        self._tools = ToolCallParser() if has_tools else None
        self._max_calls = max_calls
        self._tokens = _ThinkingTokens(tokenizer, thinking)
        self.num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thinking block, its tags included."""
        return self._tokens.count

    def push(self, text: str, token_ids: Sequence[int], is_last: bool = False) -> MessagePieces:
        """Takes the next piece of the answer."""
        self._tokens.push(token_ids)
        reasoning, content = "", text
        if self._splitter is not None:
            reasoning, content = self._splitter.push(text, is_last)
        calls: list[ParsedCall] = []
        if self._tools is not None:
            content, calls = self._tools.push(content, is_last)
            if self._max_calls is not None:
                calls = calls[: self._max_calls - self.num_calls]
            self.num_calls += len(calls)
        return MessagePieces(reasoning, content, calls)

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason, which is the calls where there are some."""
        return "tool_calls" if reason == "stop" and self.num_calls else reason


class _ThinkingTokens:
    """Counts the tokens of a thinking block by its tags' ids."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool | None) -> None:
        self._open = tokenizer.encode(THINK_OPEN)
        self._close = tokenizer.encode(THINK_CLOSE)
        has_tags = len(self._open) == 1 and len(self._close) == 1
        self._is_thinking = bool(thinking) and has_tags
        self._may_start = thinking is False and has_tags
        self.count = 0

    def push(self, token_ids: Sequence[int]) -> None:
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
