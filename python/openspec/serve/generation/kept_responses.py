"""Responses that later requests may refer to: in memory, for a while, under the key that asked."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openspec.serve.shapes.wire import ApiError

KEEP_S = 30 * 60.0
MAX_KEPT_BYTES = 64 << 20
"""Of all of them, as JSON; the oldest make room."""


@dataclass(slots=True)
class _Kept:
    owner: bytes | None
    since: float
    items: list[bytes]
    """The whole conversation, each item as JSON."""
    own: dict[str, bytes] = field(default_factory=dict)
    """Those of the answer by their ids."""
    is_finished: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.items))


class KeptResponses:
    """Nothing of it leaves the memory of the process. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._of_item: dict[str, _Kept] = {}
        self.num_bytes = 0

    def begin(self, owner: bytes | None, response_id: str, items: Sequence[bytes]) -> None:
        """Keeps the input of a response that is being made; nobody finds it before its end."""
        with self._lock:
            self._kept[response_id] = _Kept(owner, self._clock(), list(items))
            self.num_bytes += sum(map(len, items))
            self._drop_old()
        asyncio.get_running_loop().call_later(KEEP_S + 1, self.drop_old)

    def finish(self, response_id: str, output: Mapping[str, bytes]) -> None:
        """Adds the items of the answer by their ids, unless there is no room for them."""
        with self._lock:
            kept = self._kept.get(response_id)
            if kept is None:
                return
            kept.items += output.values()
            kept.own, kept.is_finished = dict(output), True
            self._of_item |= dict.fromkeys(output, kept)
            self.num_bytes += sum(map(len, output.values()))
            self._drop_old()

    def conversation(self, owner: bytes | None, response_id: str) -> list[bytes]:
        """The input of a response and its output, each item as JSON.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        with self._lock:
            self._drop_old()
            kept = self._kept.get(response_id)
            if kept is None or kept.owner != owner or not kept.is_finished:
                raise _not_kept(
                    f"The response {response_id[:100]!r}", "previous_response_id", "response"
                )
            return list(kept.items)

    def item(self, owner: bytes | None, item_id: str) -> bytes:
        """An item of an answer as JSON.

        Raises:
            ApiError: 404, it is not kept for this owner.
        """
        with self._lock:
            self._drop_old()
            kept = self._of_item.get(item_id)
            if kept is None or kept.owner != owner:
                raise _not_kept(f"The item {item_id[:100]!r}", "input", "item")
            return kept.own[item_id]

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

    def _drop_old(self) -> None:
        limit = self._clock() - KEEP_S
        while self._kept:
            response_id, oldest = next(iter(self._kept.items()))
            if oldest.since > limit and self.num_bytes <= MAX_KEPT_BYTES:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self.num_bytes -= kept.num_bytes
        for item_id in kept.own:
            del self._of_item[item_id]


def _not_kept(what: str, param: str, kind: str) -> ApiError:
    return ApiError(
        404,
        f"{what} is not kept here: this server keeps answers for {KEEP_S / 60:.0f} minutes in its "
        "memory, for the key that asked, unless store is false. Send the items themselves as input "
        "(with the AI SDK: providerOptions.openai.store = false).",
        kind="not_found_error",
        param=param,
        code=f"{kind}_not_found",
    )
