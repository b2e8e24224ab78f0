"""A proxy on loopback that keeps what a client asks and what it is answered."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

TIMEOUT_S = 300
_HOP = {
    "connection",
    "host",
    "content-length",
    "transfer-encoding",
    "keep-alive",
    "accept-encoding",
}


@dataclass
class Exchange:
    """One request and its answer."""

    method: str
    path: str
    body: bytes
    status: int = 0
    answer: bytes = b""

    @property
    def value(self) -> dict:
        """The body, parsed; empty where there was none."""
        return json.loads(self.body) if self.body else {}


@dataclass
class Recorder:
    """Where the proxy listens, and what went through it, in order of arrival."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def of(self, path: str) -> list[Exchange]:
        """The requests to one endpoint; query strings do not count."""
        return [one for one in self.exchanges if one.path.partition("?")[0] == path]


@contextmanager
def recording(url: str) -> Iterator[Recorder]:
    """Forwards everything to `url`, piece by piece as it comes."""
    target = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            exchange = Exchange(self.command, self.path, body)
            recorder.exchanges.append(exchange)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            upstream = http.client.HTTPConnection(target.netloc, timeout=TIMEOUT_S)
            try:
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                exchange.status = answer.status
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    exchange.answer += piece
                    self.wfile.write(piece)
                    self.wfile.flush()
            except ConnectionError:
                pass  # the client left
            finally:
                upstream.close()
                self.close_connection = True

        do_GET = do_POST = do_HEAD = do_DELETE = handle_one

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        recorder = Recorder(f"http://127.0.0.1:{proxy.server_address[1]}")
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield recorder
        finally:
            proxy.shutdown()
            thread.join()
