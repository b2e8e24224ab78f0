"""uvicorn's HTTP/1.1 protocol, with a clock on clients and errors in the OpenAI shape."""

from __future__ import annotations

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from openspec.serve.http_errors import ApiError, error_bytes

MAX_HEAD_BYTES = 64 * 1024


class TimedProtocol(H11Protocol):
    """Closes connections of clients that do not go on.

    One that does not bring a whole request head in time (slow loris), and one that takes nothing of
    its answer for so long, or is gone without a word: either would keep its place for ever.
    """

    timeout_s = 60.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: the clock starts."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The system's own clock: megabytes lie in its buffers, and seen from here nothing moves
            # while a slow client works through them.
            milliseconds = round(self.timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_watch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came; the clock runs on unless they complete a head."""
        super().data_received(data)
        self._watch_head()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        body = error_bytes(ApiError(400, msg))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_head(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if not is_waiting:
            self._stop_watch()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.timeout_s, self.transport.close)

    def _stop_watch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def timed_protocol(timeout_s: float) -> type[TimedProtocol]:
    """The protocol with this timeout."""
    return type("_TimedProtocol", (TimedProtocol,), {"timeout_s": timeout_s})
