"""Finds `<tool_call>{...}</tool_call>` in an answer. JSON only; nothing is ever evaluated."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass, field

from openspec.serve.reasoning import held_back

TOOL_OPEN = "<tool_call>"
TOOL_CLOSE = "</tool_call>"
MAX_CALL_CHARS = 1 << 20

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call the model made."""

    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(slots=True)
class ToolCallParser:
    """Takes an answer in pieces, gives back plain text and finished calls.

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
