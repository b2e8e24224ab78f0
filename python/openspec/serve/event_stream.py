"""Sending server-sent events, and noticing that the client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openspec.serve.http_errors import error_bytes, to_api_error
from openspec.serve.wire import DONE, KEEP_ALIVE

KEEP_ALIVE_S = 15.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def wait_for_disconnect(receive: Receive, on_disconnect: Callable[[], None]) -> None:
    """Calls back once the connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_disconnect()


@contextlib.asynccontextmanager
async def abort_on_disconnect(
    receive: Receive, on_disconnect: Callable[[], None]
) -> AsyncIterator[None]:
    """Watches the connection while the body runs."""
    watcher = asyncio.create_task(wait_for_disconnect(receive, on_disconnect))
    try:
        yield
    finally:
        watcher.cancel()


async def _or_error(event: Awaitable[bytes | None]) -> bytes | None:
    try:
        return await event
    except Exception as exc:
        return b"data: " + error_bytes(to_api_error(exc)) + b"\n\n"


class EventStream(Response):
    """A stream of events that are already encoded; ends with `[DONE]`.

    Every stream writes on its own, so one slow reader delays nobody; what the engine makes in the
    meantime is joined into its next chunk. A comment is sent in long silences. An error is a
    refusal if it comes before everything else, within KEEP_ALIVE_S, and otherwise the last event.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_disconnect: Callable[[], None]
    ) -> None:
        super().__init__()
        self._events = events
        self._on_disconnect = on_disconnect
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything. The status waits for the first event, which may be a refusal."""
        async with abort_on_disconnect(receive, self._on_disconnect):
            first = asyncio.ensure_future(anext(self._events, None))
            await asyncio.wait({first}, timeout=KEEP_ALIVE_S)
            if first.done() and (error := first.exception()) is not None:
                raise error
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            keep_alive = asyncio.create_task(self._keep_alive(send))
            try:
                event = await _or_error(first)
                while event is not None:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    event = await _or_error(anext(self._events, None))
            finally:
                keep_alive.cancel()
                await self._events.aclose()
            await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
