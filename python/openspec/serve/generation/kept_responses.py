"""Responses that later requests may refer to: in memory, for a while, under the key that asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openspec.serve.shapes.input_items import KeptItem
from openspec.serve.shapes.response_items import Item, ResponseObject
from openspec.serve.shapes.wire import ApiError, encode

KEEP_S = 30 * 60.0
MAX_KEPT_BYTES = 64 << 20
"""Of all of them, as JSON; the oldest make room."""


@dataclass(slots=True)
class _Kept:
    response_id: str
    owner: bytes | None
    since: float
    items: list[KeptItem]
    """The conversation before the answer."""
    num_bytes: int
    answer: ResponseObject | None = None
    """None while it is being made."""


class KeptResponses:
    """Nothing of it leaves the memory of the process. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._of_item: dict[tuple[bytes | None, str], dict[str, bytes | Item]] = {}
        """By owner and id of an item: what it is, by each response whose conversation holds it."""
        self.num_bytes = 0

    def begin(self, owner: bytes | None, response_id: str, items: Sequence[KeptItem]) -> None:
        """Keeps the input of a response that is being made; nobody finds it before its end."""
        num_bytes = sum(len(item.data) for item in items)
        with self._lock:
            self._kept[response_id] = _Kept(
                response_id, owner, self._clock(), list(items), num_bytes
            )
            self.num_bytes += num_bytes
            self._drop_old()
        asyncio.get_running_loop().call_later(KEEP_S + 1, self.drop_old)

    def finish(self, answer: ResponseObject) -> None:
        """Adds the response as it ended, unless there is no room for it."""
        num_bytes = len(encode(answer))
        with self._lock:
            kept = self._kept.get(answer.id)
            if kept is None:
                return
            kept.answer = answer
            for item in kept.items:
                known = self._of_item.get((kept.owner, item.id))
                if known is not None or item.is_new:  # not an id that a client made up
                    value = next(iter(known.values())) if known else item.data
                    self._hold(kept, item.id, value)
            for made in answer.output:
                self._hold(kept, made.id, made)
            kept.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._drop_old()

    def conversation(self, owner: bytes | None, response_id: str) -> list[bytes]:
        """The input of a response and its output, each item as JSON.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        kept, answer = self._found(owner, response_id, "previous_response_id")
        return [*(item.data for item in kept.items), *map(encode, answer.output)]

    def item(self, owner: bytes | None, item_id: str) -> bytes:
        """An item of a conversation whose answer is kept, as JSON.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        with self._lock:
            self._drop_old()
            known = self._of_item.get((owner, item_id))
            value = next(iter(known.values())) if known else None
        if value is None:
            raise _not_kept("item", item_id, "input")
        return value if isinstance(value, bytes) else encode(value)

    def answer(self, owner: bytes | None, response_id: str) -> ResponseObject:
        """A response as it ended.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        return self._found(owner, response_id, "response_id")[1]

    def input_items(self, owner: bytes | None, response_id: str) -> list[KeptItem]:
        """The conversation before a response.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        return self._found(owner, response_id, "response_id")[0].items

    def delete(self, owner: bytes | None, response_id: str) -> None:
        """Forgets a response; later conversations stay, where its items have no ids any more.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        kept, answer = self._found(owner, response_id, "response_id")
        with self._lock:
            self._drop(response_id)
            new = [item.id for item in kept.items if item.is_new]
            for item_id in (*new, *(item.id for item in answer.output)):
                self._of_item.pop((owner, item_id), None)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self._of_item.clear()
            self.num_bytes = 0

    def drop_old(self) -> None:
        """Forgets what was kept for its time."""
        with self._lock:
            self._drop_old()

    def _hold(self, kept: _Kept, item_id: str, value: bytes | Item) -> None:
        self._of_item.setdefault((kept.owner, item_id), {})[kept.response_id] = value

    def _drop_old(self) -> None:
        limit = self._clock() - KEEP_S
        while self._kept:
            response_id, oldest = next(iter(self._kept.items()))
            if oldest.since > limit and self.num_bytes <= MAX_KEPT_BYTES:
                return
            self._drop(response_id)

    def _found(
        self, owner: bytes | None, response_id: str, param: str
    ) -> tuple[_Kept, ResponseObject]:
        with self._lock:
            self._drop_old()
            kept = self._kept.get(response_id)
        if kept is None or kept.owner != owner or kept.answer is None:
            raise _not_kept("response", response_id, param)
        return kept, kept.answer

    def _drop(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return
        self.num_bytes -= kept.num_bytes
        outputs = () if kept.answer is None else kept.answer.output
        for item_id in (*(item.id for item in kept.items), *(item.id for item in outputs)):
            known = self._of_item.get((kept.owner, item_id), {})
            if known.pop(kept.response_id, None) is not None and not known:
                del self._of_item[kept.owner, item_id]


def _not_kept(kind: str, unknown: str, param: str) -> ApiError:
    remedy = (
        " Send the items themselves as input (with the AI SDK: "
        "providerOptions.openai.store = false)."
    )
    return ApiError(
        404,
        f"The {kind} {unknown[:100]!r} is not kept here: this server keeps answers for "
        f"{KEEP_S / 60:.0f} minutes in its memory, for the key that asked, unless store is false."
        + ("" if param == "response_id" else remedy),
        kind="not_found_error",
        param=param,
        code=f"{kind}_not_found",
    )
