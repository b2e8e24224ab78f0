"""One connection of a client: its clocks, its end, and how many there may be."""

from __future__ import annotations

import asyncio
import select
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from openspec.serve.shapes.wire import ApiError, error_bytes, overloaded

MAX_CONNECTIONS = 1 << 14
"""That may be open; further ones get 503."""
MAX_READ_BYTES = 1 << 13
"""That are parsed at a time, with the loop's other work in between: a body may come in chunks of
one byte each, of which this many bytes hold over a thousand."""
LAST_S = 1.0
"""That clients get for the rest of their answers when the server ends."""
FIRST_LOOK_S = 0.02
LONGEST_LOOK_S = 5.0


class ClientConnection(H11Protocol):
    """Closes connections of clients that do not go on.

    One that does not bring a whole request head in time (slow loris), and one that takes nothing of
    its answer for so long, or is gone without a word: either would keep its place for ever.
    """

    timeout_s = 60.0
    _head_timer: asyncio.TimerHandle | None = None
    _look_timer: asyncio.TimerHandle | None = None
    """Set from the end of the client's side on."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: the clock starts, unless there are too many."""
        super().connection_made(transport)
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            # The system's own clock: megabytes lie in its buffers, and seen from here nothing moves
            # while a slow client works through them.
            milliseconds = round(self.timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if len(self.connections) > MAX_CONNECTIONS:
            message = f"This server takes up to {MAX_CONNECTIONS} connections at a time."
            self._answer(overloaded(message, retry_after_s=1))
        else:
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_watch()
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came; the clock runs on unless they complete a head."""
        super().data_received(data)
        self._watch_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. If it only ended its own side, it still gets its answer."""
        cycle = self.cycle
        has_request = cycle is not None and not (cycle.response_complete or cycle.more_body)
        if not has_request or self.conn.their_http_version != b"1.1":
            return False
        self._look_for_client(FIRST_LOOK_S)
        return True

    def on_response_complete(self) -> None:
        """The answer is written. A client that sends no more gets no other one."""
        super().on_response_complete()
        if self._look_timer is not None:
            self._look_timer.cancel()
            self.transport.close()

    def shutdown(self) -> None:
        """The server ends, and waits for nobody who takes nothing."""
        super().shutdown()
        self.loop.call_later(LAST_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP."""
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            self._answer(ApiError(400, msg))
        else:
            self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = error_bytes(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **(error.headers or {}),
        }
        response = h11.Response(status_code=error.status, headers=list(headers.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look_for_client(self, pause_s: float) -> None:
        """Asks a silent client for a sign: the system of one that is gone answers with a reset."""
        if self.conn.our_state is h11.SEND_RESPONSE:  # which clients pass over
            sign = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(sign) or b"")
        self._look_timer = self.loop.call_later(pause_s, self._look_again, pause_s)

    def _look_again(self, pause_s: float) -> None:
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), 0)
        if poll.poll(0):  # both sides have ended
            self.transport.abort()
        else:
            self._look_for_client(min(2 * pause_s, LONGEST_LOOK_S))

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
