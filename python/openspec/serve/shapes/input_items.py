"""What /v1/responses keeps of a conversation: items in OpenAI's form, and pages of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from openspec.errors import RequestError
from openspec.serve.shapes.chat import Content
from openspec.serve.shapes.responses import InputItem, ResponsesRequest
from openspec.serve.shapes.wire import encode

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


class KeptItem(NamedTuple):
    """An item of a conversation."""

    id: str
    data: bytes
    """The item as JSON."""
    is_new: bool
    """Its id was made here and now."""


class ItemPage(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses/{response_id}/input_items."""

    object: str = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


def as_items(body: ResponsesRequest, unique: str) -> list[KeptItem]:
    """The items of an input that `as_chat` could read.

    `unique` is part of the ids of those that came without one.
    """
    kept = []
    for at, item in enumerate(() if isinstance(body.input, str) else body.input):
        item_id = item.id or f"{_PREFIXES[item.type or 'message']}_{unique}_in_{at}"
        kept.append(KeptItem(item_id, encode(_shown(item, item_id)), not item.id))
    return kept


def page_of(
    items: Sequence[KeptItem], after: str | None, limit: int, is_newest_first: bool
) -> ItemPage:
    """`limit` items at most, from the one behind that of the id `after`.

    Raises:
        RequestError: no item has that id.
    """
    ordered = list(reversed(items)) if is_newest_first else list(items)
    if after is not None:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise RequestError(f"after: no item of the input has the id {after[:100]!r}.", "after")
        ordered = ordered[ids.index(after) + 1 :]
    shown = ordered[:limit]
    return ItemPage(
        data=[msgspec.Raw(item.data) for item in shown],
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(ordered) > limit,
    )


def _shown(item: InputItem, item_id: str) -> dict[str, object]:
    kind = item.type or "message"
    shown: dict[str, object] = {"id": item_id, "type": kind, "status": "completed"}
    if kind == "message":
        part_type = "output_text" if item.role == "assistant" else "input_text"
        return shown | {"role": item.role, "content": _parts(item.content, part_type)}
    if kind == "reasoning":
        shown["summary"] = _parts(item.summary, "summary_text")
        return shown | {"content": _parts(item.content, "reasoning_text")}
    shown["call_id"] = item.call_id
    if kind == "function_call":
        arguments = {} if item.arguments is None else {"arguments": item.arguments}
        return shown | {"name": item.name, **arguments}
    output = item.output
    return shown | {"output": output if isinstance(output, str) else _parts(output, "input_text")}


def _parts(content: Content | None, part_type: str) -> list[dict[str, object]]:
    """Its texts as parts of one type; refusals stay what they are."""
    if isinstance(content, str):
        return [_part(part_type, content)] if content else []
    return [
        {"type": "refusal", "refusal": part.refusal}
        if part.type == "refusal"
        else _part(part_type, part.text)
        for part in content or ()
    ]


def _part(part_type: str, text: str | None) -> dict[str, object]:
    part: dict[str, object] = {"type": part_type, "text": text}
    return part | {"annotations": []} if part_type == "output_text" else part
