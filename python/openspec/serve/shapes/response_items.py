"""The output of /v1/responses: items, and the events that tell how they come about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from openspec.serve.shapes.wire import RequestMetrics, event
from openspec.text.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning


class TextPart(msgspec.Struct, kw_only=True):
    """The text of a message, or of reasoning."""

    type: str
    text: str = ""
    annotations: list[str] | UnsetType = UNSET
    """Of messages; always empty."""
    logprobs: list[str] | UnsetType = UNSET


class Item(msgspec.Struct, kw_only=True):
    """A message, reasoning, or a call of a function."""

    id: str
    type: str
    status: str = "in_progress"
    role: str | UnsetType = UNSET
    summary: list[str] | UnsetType = UNSET
    content: list[TextPart] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponseUsage(msgspec.Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses; its events carry it too. `Raw` is the request's, as JSON."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: msgspec.Raw
    max_output_tokens: int | None
    metadata: msgspec.Raw
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    seed: int | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: msgspec.Raw
    metrics: RequestMetrics | UnsetType = UNSET


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    item: Item
    index: int
    texts: list[str]


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputWriter:
    """Makes items of an answer's pieces, and an event of every step on the way."""

    def __init__(self, unique: str) -> None:
        """`unique` is part of every item's id."""
        self.items: list[Item] = []
        self._unique = unique
        self._open: _Open | None = None
        self._num_events = 0

    def add(self, pieces: Iterable[Piece]) -> list[bytes]:
        """The events of more pieces."""
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                events += self._more("reasoning", piece.text)
            elif isinstance(piece, Content):
                events += self._more("message", piece.text)
            elif isinstance(piece, CallStart):
                events += self.close()
                events += self._begin("function_call", piece.call_id, piece.name)
            elif isinstance(piece, CallArguments):
                events += self._more("function_call", piece.text)
            else:
                events += self.close("incomplete" if piece.is_cut else "completed")
        return events

    def close(self, status: str = "completed") -> list[bytes]:
        """The events at the end of the item that is open, if one is."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        item, text = opened.item, "".join(opened.texts)
        item.status = status
        where: dict[str, object] = {"item_id": item.id, "output_index": opened.index}
        if item.type == "function_call":
            item.arguments = text
            events = [self.event(f"{_DELTAS[item.type]}.done", **where, arguments=text)]
        else:
            part = _part(item.type, text)
            item.content = [part]
            where["content_index"] = 0
            logprobs: dict[str, object] = {"logprobs": []} if item.type == "message" else {}
            events = [
                self.event(f"{_DELTAS[item.type]}.done", **where, text=text, **logprobs),
                self.event("response.content_part.done", **where, part=part),
            ]
        done = self.event("response.output_item.done", output_index=opened.index, item=item)
        return [*events, done]

    def event(self, kind: str, **fields: object) -> bytes:
        """One event; they are numbered."""
        value = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\n".encode() + event(value)

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> list[bytes]:
        index = len(self.items)
        item = Item(id=f"{_PREFIXES[kind]}_{self._unique}_{index}", type=kind)
        if kind == "function_call":
            item.call_id, item.name, item.arguments = call_id, name, ""
        else:
            item.content = []
            if kind == "message":
                item.role = "assistant"
            else:
                item.summary = []
        self.items.append(item)
        self._open = _Open(item, index, [])
        events = [self.event("response.output_item.added", output_index=index, item=item)]
        if kind in _PARTS:
            where: dict[str, object] = {"item_id": item.id, "output_index": index}
            part = _part(kind, "")
            events.append(
                self.event("response.content_part.added", **where, content_index=0, part=part)
            )
        return events

    def _more(self, kind: str, text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._open is None or self._open.item.type != kind:
            events = self.close() + self._begin(kind)
        opened = self._open
        if opened is None:
            return events
        opened.texts.append(text)
        where: dict[str, object] = {"item_id": opened.item.id, "output_index": opened.index}
        if kind in _PARTS:
            where["content_index"] = 0
        if kind == "message":
            where["logprobs"] = []
        return [*events, self.event(f"{_DELTAS[kind]}.delta", **where, delta=text)]


def _part(kind: str, text: str) -> TextPart:
    part = TextPart(type=_PARTS[kind], text=text)
    if kind == "message":
        part.annotations, part.logprobs = [], []
    return part
