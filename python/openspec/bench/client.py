"""A light HTTP/1.1 client for streamed completions.

Client, server front and engine may share two cores, so the client takes no time from the others
while a stream runs: it notes when bytes came, and takes them apart when the stream has ended. Plain
sockets and a selector cost about 10 us a chunk; asyncio's streams cost 37 us, httpx 95 us.
"""

from __future__ import annotations

import re
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
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class ClientError(RuntimeError):
    """The server refused a request or broke off its answer."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    prefix: str = ""
    """In front of every path, such as /openai; without a slash at its end."""
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The server's base URL, with the prefix."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{self.prefix}"

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


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
        for end in _EVENT_END.finditer(self.body):
            lines = self.body[start : end.start()].splitlines()
            data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
            if data:
                yield self.times[bisect_left(self.ends, end.end())], b"\n".join(data)
            start = end.end()


class Connection:
    """One keep-alive connection; it carries one request at a time.

    The socket blocks: send, wait for it to become readable (by a selector, or not at all), receive.
    """

    def __init__(self, address: Address) -> None:
        """Connect.

        Raises:
            ClientError: nobody listens there.
        """
        self._address = address
        self._prefix = address.prefix
        headers = {"host": f"{address.host}:{address.port}", **address.headers()}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect()

    def _connect(self) -> None:
        try:
            self._socket = socket.create_connection((self._address.host, self._address.port))
        except OSError as error:
            raise ClientError(f"cannot connect to {self._address.url}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_spent = False
        """The server ends the connection after this answer: `renew` it before the next request."""
        self._reset()

    def renew(self) -> None:
        """Connect anew.

        Raises:
            ClientError: nobody listens any more.
        """
        self.close()
        self._connect()

    def _reset(self) -> None:
        self._pieces: list[bytes] = []
        self._times: list[float] = []
        self._tail = b""
        self._received = 0
        self._has_head = False
        self._length: int | None = None  # of head and body, where the answer states it
        self._ends_with_connection = False

    def fileno(self) -> int:
        """The socket's file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, path: str, body: bytes) -> None:
        """POST a JSON body.

        Raises:
            ClientError: the connection is gone.
        """
        self._reset()
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
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
        if not data and self._ends_with_connection:
            self.is_spent = True
            return _parse(self._pieces, self._times)
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
            self._ends_with_connection = not stated and not _is_chunked(head)
            wish = (_header(head, b"connection") or b"").lower()
            is_old = head.startswith(b"HTTP/1.0") and wish != b"keep-alive"
            self.is_spent = wish == b"close" or is_old


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


def _is_chunked(head: bytes) -> bool:
    return (_header(head, b"transfer-encoding") or b"").lower() == b"chunked"


def _parse(pieces: list[bytes], arrivals: list[float]) -> HttpResponse:
    """Take an answer apart: status, body without chunk framing, arrival times of the body."""
    raw = b"".join(pieces)
    head, _, rest = raw.partition(_HEADER_END)
    status = int(head.split(b" ", 2)[1])
    raw_ends = list(accumulate(map(len, pieces)))
    at = len(head) + len(_HEADER_END)
    if not _is_chunked(head):
        body_ends = [max(0, end - at) for end in raw_ends]
        return HttpResponse(status, rest, body_ends, list(arrivals))
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
    reasoning: str | None = None
    """`reasoning_content`, as newer servers call it; some send both."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    text: str | None = ""
    delta: _Delta | None = None

    def content(self) -> str:
        """New text, thought or said."""
        if self.delta is None:
            return self.text or ""
        delta = self.delta
        return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
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
    """Zeros, if the server sends no ids."""
    chunk_text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage_tokens: int | None = None
    """What the server says at the end."""
    speculation: SpecDecodeStats | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens: those that came, or the server's own count if it sends no ids."""
        return len(self.token_ids) or self.usage_tokens or 0

    @property
    def text(self) -> str:
        """The answer, thoughts included."""
        return "".join(self.chunk_text)


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


def read_completion(sent_s: float, response: HttpResponse) -> Completion:
    """The answer in a streamed response.

    Raises:
        ClientError: the server answered with an error, or without a number of tokens.
    """
    if response.status != 200:
        raise ClientError(f"HTTP {response.status}: {response.body[:500].decode(errors='replace')}")
    completion = Completion(sent_s)
    for time, data in response.events():
        if data == b"[DONE]":
            break
        try:
            chunk = _CHUNK_DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise ClientError(f"the server's answer is not understood: {error}") from error
        if chunk.error is not None:
            raise ClientError(f"the server broke off: {chunk.error}")
        _take(chunk, time, completion)
    if completion.finish_reason is None:
        raise ClientError("the stream ended without a finish reason")
    if any(completion.chunk_text) and not completion.num_tokens:
        raise ClientError("the server sends neither token ids nor usage; no speed can be told")
    return completion


def _take(chunk: _Chunk, time: float, completion: Completion) -> None:
    if chunk.metrics is not None and chunk.metrics.speculative_decoding is not None:
        completion.speculation = chunk.metrics.speculative_decoding
    if chunk.prompt_token_ids:
        completion.prompt_token_ids = chunk.prompt_token_ids
    if chunk.usage is not None and chunk.usage.completion_tokens is not None:
        completion.usage_tokens = chunk.usage.completion_tokens
    for choice in chunk.choices or ():
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


def split_url(url: str, api_key: str | None = None) -> Address:
    """The address in a base URL such as `http://127.0.0.1:8000`, also as `.../v1`.

    Raises:
        ClientError: it is no http URL.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = 80 if parts.port is None else parts.port
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or port == 0:
        raise ClientError(
            f"--server: expected http://HOST:PORT, got {url}; for https put a proxy such as "
            "stunnel in front"
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.hostname, port, prefix, api_key)
