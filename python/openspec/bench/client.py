"""A light HTTP/1.1 client for streamed completions.

Client, server front and engine may share two cores, so the client takes no time from the others
while a stream runs: it notes when bytes came, and takes them apart when the stream has ended. Plain
sockets and a selector cost about 10 us a chunk; asyncio's streams cost 37 us, httpx 95 us.
"""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from urllib.parse import urlsplit

import msgspec

from openspec.messages import SpecDecodeStats

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_HEADER_END = b"\r\n\r\n"


class ClientError(RuntimeError):
    """The server refused a request or broke off its answer."""


@dataclass
class HttpResponse:
    """An answer with the time at which each stretch of its body had arrived."""

    status: int
    body: bytes
    ends: list[int]
    """Body length after each arrival."""
    times: list[float]
    """When that was, on `perf_counter`'s clock."""

    def events(self) -> Iterator[tuple[float, bytes]]:
        """(arrival time, data) of every server-sent event."""
        start = 0
        while (end := self.body.find(b"\n\n", start)) >= 0:
            block = self.body[start:end]
            if block.startswith(b"data: "):
                yield self.times[bisect_left(self.ends, end + 2)], block[6:]
            start = end + 2


class Connection:
    """One keep-alive connection; it carries one request at a time.

    The socket blocks: send, wait for it to become readable (by a selector, or not at all), receive.
    """

    def __init__(self, host: str, port: int) -> None:
        """Connect.

        Raises:
            ClientError: nobody listens there.
        """
        self._host = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port))
        except OSError as error:
            raise ClientError(f"cannot connect to {host}:{port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reset()

    def _reset(self) -> None:
        self._pieces: list[bytes] = []
        self._times: list[float] = []
        self._tail = b""
        self._received = 0
        self._has_head = False
        self._length: int | None = None  # of head and body, where the answer states it

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, path: str, body: bytes) -> None:
        """POST a JSON body.

        Raises:
            ClientError: the connection is gone.
        """
        self._reset()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        try:
            self._socket.sendall(head.encode() + body)
        except OSError as error:
            raise ClientError(f"the server closed the connection: {error}") from error

    def receive(self) -> HttpResponse | None:
        """Take in what has come; the whole answer once it is complete.

        This is all that runs while streams are under way.

        Raises:
            ClientError: the connection broke.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise ClientError(f"the connection broke: {error}") from error
        self._times.append(perf_counter())
        self._pieces.append(data)
        if not data:
            raise ClientError("the server closed the connection")
        self._received += len(data)
        self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
        if not self._has_head:
            self._read_head()
        if self._tail == _END_OF_CHUNKS or self._received == self._length:
            return _parse(self._pieces, self._times)
        return None

    def close(self) -> None:
        """Close the connection; the server aborts a request under way."""
        self._socket.close()

    def _read_head(self) -> None:
        head, found, _ = b"".join(self._pieces).partition(_HEADER_END)
        if found:
            self._has_head = True
            stated = _header(head, b"content-length")
            self._length = len(head) + len(_HEADER_END) + int(stated) if stated else None


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _parse(pieces: list[bytes], arrivals: list[float]) -> HttpResponse:
    """Take an answer apart: status, body without chunk framing, arrival times of the body."""
    raw = b"".join(pieces)
    head, _, rest = raw.partition(_HEADER_END)
    status = int(head.split(b" ", 2)[1])
    raw_ends = list(accumulate(map(len, pieces)))
    at = len(head) + len(_HEADER_END)
    if _header(head, b"transfer-encoding") != b"chunked":
        return HttpResponse(status, rest, [len(rest)], [arrivals[-1]])
    parts: list[bytes] = []
    ends: list[int] = []
    times: list[float] = []
    length = 0
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end].partition(b";")[0], 16)
        if size == 0:
            return HttpResponse(status, b"".join(parts), ends, times)
        start = line_end + 2
        parts.append(raw[start : start + size])
        at = start + size + 2
        length += size
        ends.append(length)
        times.append(arrivals[bisect_left(raw_ends, start + size)])


class _Metrics(msgspec.Struct):
    speculative_decoding: SpecDecodeStats | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    text: str = ""
    delta: _Delta | None = None

    def content(self) -> str:
        """New text, thought or said."""
        if self.delta is None:
            return self.text
        return (self.delta.reasoning_content or "") + (self.delta.content or "")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    metrics: _Metrics | None = None
    error: object = None


@dataclass
class Completion:
    """One request's answer, with times in seconds on `perf_counter`'s clock."""

    sent_s: float
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    chunk_tokens: list[int] = field(default_factory=list)
    chunk_text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    speculation: SpecDecodeStats | None = None


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


def read_completion(sent_s: float, response: HttpResponse) -> Completion:
    """The answer in a streamed response.

    Raises:
        ClientError: the server answered with an error, or without token ids.
    """
    if response.status != 200:
        raise ClientError(f"HTTP {response.status}: {response.body[:500].decode(errors='replace')}")
    completion = Completion(sent_s)
    for time, data in response.events():
        if data == b"[DONE]":
            break
        chunk = _CHUNK_DECODER.decode(data)
        if chunk.error is not None:
            raise ClientError(f"the server broke off: {chunk.error}")
        _take(chunk, time, completion)
    if completion.finish_reason is None:
        raise ClientError("the stream ended without a finish reason")
    if completion.chunk_text and any(completion.chunk_text) and not completion.token_ids:
        raise ClientError("the server does not return token ids; nothing could be compared")
    return completion


def _take(chunk: _Chunk, time: float, completion: Completion) -> None:
    if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
        completion.speculation = chunk.metrics.speculative_decoding
    if chunk.prompt_token_ids:
        completion.prompt_token_ids = chunk.prompt_token_ids
    for choice in chunk.choices:
        completion.finish_reason = choice.finish_reason or completion.finish_reason
        if choice.prompt_token_ids:
            completion.prompt_token_ids = choice.prompt_token_ids
        text = choice.content()
        if not choice.token_ids and not text:
            continue
        completion.token_ids += choice.token_ids or []
        completion.chunk_s.append(time)
        completion.chunk_tokens.append(len(choice.token_ids or []))
        completion.chunk_text.append(text)


def split_url(url: str) -> tuple[str, int]:
    """Host and port of a base URL such as `http://127.0.0.1:8000`."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or parts.hostname is None:
        raise ClientError(f"--server: expected http://HOST:PORT, got {url}")
    return parts.hostname, parts.port or 80
