"""Errors as the OpenAI API shapes them, with messages that give nothing away."""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import EngineError, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w<:/.])(?:/[\w.+-]+){2,}/?")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*", re.DOTALL)


class ApiError(Exception):
    """An answer other than 200, decided on while handling a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers


class _ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


def sanitise(message: str) -> str:
    """Takes tracebacks, file paths and memory addresses out of a message and bounds its length."""
    message = _TRACEBACK.sub("internal error", message)
    message = _ADDRESS.sub("<address>", message)
    message = _PATH.sub("<path>", message)
    message = message.encode("utf-8", "replace").decode()
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return message


def error_bytes(error: ApiError) -> bytes:
    """The JSON body that describes `error`."""
    body = _ErrorBody(sanitise(error.message), error.kind, error.param, error.code)
    return msgspec.json.encode(_ErrorEnvelope(body))


def error_response(error: ApiError) -> Response:
    """The HTTP response for `error`."""
    return Response(
        error_bytes(error),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def to_api_error(exc: Exception) -> ApiError:
    """Maps any exception to an answer; what nobody raised on purpose is logged and becomes 500."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, EngineError):
        logger.error("engine error: %s", exc)
        return ApiError(500, "The engine failed on this request.", kind="server_error")
    logger.error("unexpected error while serving a request", exc_info=exc)
    return ApiError(500, "Internal server error.", kind="server_error")


def overloaded(message: str, *, retry_after_s: int, close: bool = False) -> ApiError:
    """503 with Retry-After."""
    headers = {"retry-after": str(retry_after_s)}
    if close:
        headers["connection"] = "close"
    return ApiError(503, message, kind="service_unavailable", headers=headers)


async def handle_exception(_: Request, exc: Exception) -> Response:
    """Exception handler for the app."""
    return error_response(to_api_error(exc))
