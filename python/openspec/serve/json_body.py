"""Reading a request body: bounded, timed, strictly JSON, validated in one place."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from openspec.errors import RequestError
from openspec.serve.http_errors import ApiError

MAX_OBJECT_KEYS = 16384

ModelT = TypeVar("ModelT", bound=BaseModel)

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNION_HINTS = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "must be a string or a list of strings",
}


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Reads the whole body.

    Raises:
        ApiError: 408, 413 or 415.
    """
    headers = request.headers
    # An explicit JSON type is demanded because a browser cannot send it across origins unasked:
    # without this, any web page could drive a server bound to the loopback address.
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "Content-Type must be application/json.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not supported.")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, "The request body did not arrive in time.") from None
    except ClientDisconnect:
        raise ApiError(400, "The client went away.") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body exceeds {max_bytes} bytes.")


def parse(model: type[ModelT], body: bytes) -> ModelT:
    """Validates a JSON body.

    Python's parser rather than pydantic's, because only it lets duplicate keys be refused: two
    readers of one body that pick different duplicates are a way around checks.

    Raises:
        RequestError: naming the first offending field.
    """
    try:
        value: object = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RequestError:
        raise
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except ValueError as exc:
        detail = (
            f"{exc.msg} at character {exc.pos}" if isinstance(exc, json.JSONDecodeError) else exc
        )
        raise RequestError(f"The request body is not valid JSON: {detail}.") from None
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.")
    try:
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
        return model.model_validate(value)
    except ValidationError as exc:
        raise _validation_error(exc) from None
    except UnicodeEncodeError:
        raise RequestError("The request body has a lone surrogate in a string.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise RequestError(f"The request body has an object with over {MAX_OBJECT_KEYS} keys.")
    result = dict(pairs)
    if len(result) != len(pairs):
        raise RequestError("The request body has a duplicate key.")
    return result


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"The request body is not valid JSON: {name} is not a JSON value.")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RequestError("The request body has a number beyond the range of floats.")
    return value


def _validation_error(exc: ValidationError) -> RequestError:
    # Of a union every branch complains; the deepest complaint is the closest to the mistake.
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:32]
    first = max(errors, key=lambda error: _depth(error["loc"]))
    name = str(first["loc"][0])[:100] if first["loc"] else None
    if name in _UNION_HINTS and len(errors) > 1:
        return RequestError(f"{name} {_UNION_HINTS[name]}", name)
    location = ".".join(str(part) for part in first["loc"] if _is_field(part))[:200]
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{location}: {message}" if location else message, name)


def _depth(location: tuple[int | str, ...]) -> int:
    return sum(1 for part in location if _is_field(part))


def _is_field(part: int | str) -> bool:
    """False for the names pydantic gives to the branches of a union, such as `list[int]`."""
    return isinstance(part, int) or (part not in ("str", "int") and part.isidentifier())
