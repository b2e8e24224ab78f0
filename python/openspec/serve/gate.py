"""The outermost layer: request ids, header limits, API keys, draining, and the last error handler.

Access is decided here for every path, whether a route exists or not: what is not one of the few
public paths, compared as a whole and as the router sees it, needs a key. So no spelling of a path
can slip by.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openspec.serve.http_errors import ApiError, error_bytes, overloaded, to_api_error
from openspec.serve.lifecycle import Lifecycle
from openspec.serve.server_metrics import ServerMetrics

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("openspec.serve.access")

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics"})
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
MAX_URL_BYTES = 8 * 1024
MAX_DISCARD_S = 1.0
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware around the app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        lifecycle: Lifecycle,
        metrics: ServerMetrics,
        access_log: bool,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        extra = (b"x-request-id", request_id.encode())
        status = 0
        is_complete = False

        async def tagged_send(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), extra]}
            elif not message.get("more_body", False):
                is_complete = True
            await send(message)

        started = time.monotonic()
        try:
            self._check(scope, headers)
            is_work = scope["method"] == "POST"
            with self._lifecycle.open_request() if is_work else contextlib.nullcontext():
                await self._app(scope, receive, tagged_send)
        except Exception as exc:
            if is_complete:
                return
            if status:
                # The client must see a broken answer as broken: the connection is cut.
                raise
            error = to_api_error(exc)
            if "connection" in (error.headers or {}):
                await _discard_body(receive)
            await _send_error(error, tagged_send)
        finally:
            path = _route_path(scope.get("route"))
            self._metrics.http.add(path=path, status=str(status))
            if self._access_log:
                elapsed_ms = (time.monotonic() - started) * 1000
                access_logger.info(
                    "%s %s %s %d %.1f ms", request_id, scope["method"], path, status, elapsed_ms
                )

    def _check(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise ApiError(431, "The request's headers are too large.")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_BYTES:
            raise ApiError(414, "The request's URL is too long.")
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # A proxy in front may count the body the other way: what follows is not to be trusted.
            raise ApiError(
                400,
                "A request has Content-Length or Transfer-Encoding, not both.",
                headers={"connection": "close"},
            )
        if scope["path"] in PUBLIC_PATHS:
            return
        if self._keys and not is_authorised(headers, self._keys):
            # OpenAI's words: LiteLLM takes any other "invalid_request_error" for a bad request.
            raise ApiError(
                401,
                "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self._lifecycle.is_refusing and scope["method"] == "POST":
            self._metrics.rejections.add(reason="draining")
            raise overloaded("The server is shutting down.", retry_after_s=5, close=True)


def is_authorised(headers: Sequence[tuple[bytes, bytes]], keys: Sequence[bytes]) -> bool:
    """Whether the request carries one of the keys, in a time that does not depend on them."""
    given = [value for name, value in headers if name == b"authorization"]
    if len(given) != 1:
        return False
    scheme, _, token = given[0].partition(b" ")
    token = token.strip()
    matches = [hmac.compare_digest(token, key) for key in keys]
    return scheme.lower() == b"bearer" and token != b"" and any(matches)


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


def _route_path(route: BaseRoute | None) -> str:
    return route.path if isinstance(route, Route) else "other"


async def _discard_body(receive: Receive) -> None:
    """Reads a body nobody wants: closing on one that still arrives would lose the answer."""

    async def discard() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(discard(), MAX_DISCARD_S)


async def _send_error(error: ApiError, send: Send) -> None:
    body = error_bytes(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in (error.headers or {}).items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
