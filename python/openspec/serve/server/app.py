"""The ASGI application: which path leads where, and who may go there.

Access is decided here for every path, whether it leads somewhere or not: what is not one of the
few public paths, compared as a whole, needs a key. So no spelling of a path can slip by.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import openspec
from openspec.serve.endpoints import capture, drafter, info
from openspec.serve.endpoints.chat import create_chat_completion
from openspec.serve.endpoints.completions import create_completion
from openspec.serve.endpoints.kept_responses import (
    delete_response,
    get_response,
    list_input_items,
)
from openspec.serve.endpoints.messages import count_tokens, create_message
from openspec.serve.endpoints.responses import count_input_tokens, create_response
from openspec.serve.endpoints.ui_page import ui
from openspec.serve.generation.context import ServerContext, key_of
from openspec.serve.shapes.capture import CaptureSettings
from openspec.serve.shapes.chat import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from openspec.serve.shapes.drafter import (
    DraftUpdateRequest,
    LoadDrafterRequest,
    UpdateWeightsRequest,
)
from openspec.serve.shapes.messages import CountTokensRequest, MessagesRequest
from openspec.serve.shapes.responses import ResponsesRequest
from openspec.serve.shapes.wire import (
    ApiError,
    error_response,
    json_response,
    not_found,
    overloaded,
    to_api_error,
)

access_logger = logging.getLogger("openspec.serve.access")

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/docs", "/ui"})
PAGES = frozenset({"/openapi.json", "/docs", "/ui"})
MODELS_PREFIX = "/v1/models/"
KEPT_RESPONSE = "/v1/responses/{response_id}"
KEPT_INPUT = f"{KEPT_RESPONSE}/input_items"
MESSAGES_PREFIX = "/v1/messages"
"""Below it errors have the shape of Anthropic's API."""
MAX_HEADERS = 128
MAX_HEADER_BYTES = 64 * 1024
MAX_URL_BYTES = 8 * 1024
MAX_LOGGED_PATH_CHARS = 200
MAX_DISCARD_S = 1.0
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SCHEMAS = "#/components/schemas/"
_PAGE = Path(__file__).with_name("docs.html")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'"
}


async def root(context: ServerContext, __: Request) -> Response:
    """The endpoints, and the pages for people."""
    endpoints = {
        f"{method} {path}": _summary(handler)
        for path, handlers in ROUTES.items()
        for method, handler in handlers.items()
    }
    return json_response(
        {
            "name": "openspec",
            "version": openspec.__version__,
            "pages": ["/ui", "/docs"] if context.config.pages else [],
            "endpoints": endpoints,
        }
    )


async def openapi(_: ServerContext, __: Request) -> Response:
    """The schemas that requests are checked against."""
    return json_response(_description())


async def docs(_: ServerContext, __: Request) -> Response:
    """A page that lists the endpoints and sends requests to them."""
    return Response(_PAGE.read_bytes(), headers=_PAGE_HEADERS, media_type="text/html")


GET_ROUTES: dict[str, Handler] = {
    "/": root,
    "/health": info.health,
    "/ping": info.health,
    "/ready": info.ready,
    "/metrics": info.metrics,
    "/version": info.version,
    "/v1/models": info.list_models,
    "/v1/models/{model_id}": info.get_model,
    KEPT_RESPONSE: get_response,
    KEPT_INPUT: list_input_items,
    "/server_info": info.server_info,
    "/get_server_info": info.server_info,
    "/model_info": info.model_info,
    "/get_model_info": info.model_info,
    "/load": info.load,
    "/v1/loads": info.loads,
    "/kv_event_sources": info.kv_event_sources,
    "/tokenizer_info": info.tokenizer_info,
    "/v1/drafter": drafter.get_drafter,
    "/v1/capture": capture.get_capture,
    "/weight_info": drafter.weight_info,
    "/openapi.json": openapi,
    "/docs": docs,
    "/ui": ui,
}
POST_ROUTES: dict[str, tuple[Handler, type[BaseModel] | None]] = {
    "/v1/completions": (create_completion, CompletionRequest),
    "/v1/chat/completions": (create_chat_completion, ChatCompletionRequest),
    "/v1/responses": (create_response, ResponsesRequest),
    "/v1/responses/input_tokens": (count_input_tokens, ResponsesRequest),
    "/v1/messages": (create_message, MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, CountTokensRequest),
    "/tokenize": (info.tokenize, TokenizeRequest),
    "/detokenize": (info.detokenize, DetokenizeRequest),
    "/abort_request": (info.abort_request, AbortRequest),
    "/flush_cache": (info.flush_cache, None),
    "/v1/capture": (capture.set_capture, CaptureSettings),
    "/v1/drafter/load": (drafter.load_drafter, LoadDrafterRequest),
    "/v1/drafter/rollback": (drafter.roll_back_drafter, None),
    "/update_weights_from_disk": (drafter.update_weights_from_disk, UpdateWeightsRequest),
    "/init_weight_transfer_engine": (drafter.refuse_weight_transfer, None),
    "/start_draft_weight_update": (drafter.start_draft_weight_update, None),
    "/update_weights": (drafter.update_weights, DraftUpdateRequest),
    "/finish_weight_update": (drafter.finish_weight_update, None),
    "/ping": (info.health, None),
}
DELETE_ROUTES: dict[str, Handler] = {
    KEPT_RESPONSE: delete_response,
    "/v1/capture": capture.erase_capture,
}
ROUTES: dict[str, dict[str, Handler]] = {
    path: {
        **({"POST": POST_ROUTES[path][0]} if path in POST_ROUTES else {}),
        **({"GET": GET_ROUTES[path]} if path in GET_ROUTES else {}),
        **({"DELETE": DELETE_ROUTES[path]} if path in DELETE_ROUTES else {}),
    }
    for path in (*POST_ROUTES, *GET_ROUTES)
}
_PATH_FIELD = re.compile(r"\{(\w+)\}")
_KEPT_PATH = re.compile(r"/v1/responses/[^/]+(/input_items)?")
_QUESTION = "What is a prime number?"
_CHAT: dict[str, object] = {"messages": [{"role": "user", "content": _QUESTION}]}
_EXAMPLES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32, "stream": True},
    "/v1/chat/completions": {**_CHAT, "max_tokens": 256, "stream": True},
    "/v1/responses": {"input": _QUESTION, "max_output_tokens": 256, "stream": True},
    "/v1/responses/input_tokens": {"input": _QUESTION},
    "/v1/messages": {**_CHAT, "max_tokens": 256, "stream": True},
    "/v1/messages/count_tokens": _CHAT,
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/capture": {"enabled": False},
    "/v1/drafter/load": {"path": "head"},
    "/update_weights_from_disk": {"model_path": "head", "update_draft_model": True},
    "/update_weights": {"update_info": {"path": "head"}},
    "/abort_request": {"request_id": "the answer's id"},
}


def build_app(context: ServerContext) -> ASGIApp:
    """The whole application."""
    config = context.config
    if not config.allowed_origins:
        return Gate(context)
    return CORSMiddleware(
        Gate(context),
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        # OpenAI's JavaScript client sends a dozen of its own, `x-stainless-...`.
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


class Gate:
    """Request ids, limits of heads, API keys, draining, the way to the handler, errors."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        config = context.config
        keys = list(config.api_key or [])
        if keys and config.admin_api_key is not None:
            keys.append(config.admin_api_key)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        extra = (b"x-request-id", request_id.encode())
        route = "other"
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

        lifecycle = self._context.lifecycle
        started = time.monotonic()
        try:
            self._check(scope, headers)
            is_work = scope["method"] == "POST"
            with lifecycle.open_request() if is_work else contextlib.nullcontext():
                route = _route_of(scope["path"])
                response = await self._handler(route, scope["method"])(
                    self._context, Request(scope, receive)
                )
                await response(scope, receive, tagged_send)
        except Exception as exc:
            if is_complete:
                return
            if status:
                # The client must see a broken answer as broken: the connection is cut.
                raise
            error = to_api_error(exc)
            if "connection" in (error.headers or {}):
                await _discard_body(receive)
            as_anthropic = scope["path"].startswith(MESSAGES_PREFIX)
            await error_response(error, as_anthropic)(scope, receive, tagged_send)
        finally:
            self._context.metrics.http.labels(route, str(status)).inc()
            if self._context.config.access_log:
                elapsed_ms = (time.monotonic() - started) * 1000
                access_logger.info(
                    "%s %s %s %d %.1f ms",
                    request_id,
                    scope["method"],
                    shown_path(scope),
                    status,
                    elapsed_ms,
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
        _, model = POST_ROUTES.get(scope["path"], (None, None))
        if scope["method"] == "POST" and model is None:
            _refuse_other_sites(headers, self._context.config.allowed_origins or ())
        if scope["path"] in PUBLIC_PATHS:
            return
        key = scope["state"]["key"] = key_of(headers, self._keys)
        if self._keys and key is None:
            # OpenAI's words: LiteLLM takes any other "invalid_request_error" for a bad request.
            raise ApiError(
                401,
                "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if self._context.lifecycle.is_refusing and scope["method"] == "POST":
            self._context.metrics.rejections.labels("draining").inc()
            raise overloaded("The server is shutting down.", retry_after_s=5, close=True)

    def _handler(self, route: str, method: str) -> Handler:
        handlers = ROUTES.get(route)
        if handlers is None:
            raise not_found()
        handler = handlers.get("GET" if method == "HEAD" else method)
        if handler is None:
            raise ApiError(405, "Method Not Allowed", headers={"allow": ", ".join(handlers)})
        if route in PAGES and not self._context.config.pages:
            raise not_found()
        return handler


def _refuse_other_sites(
    headers: Sequence[tuple[bytes, bytes]], allowed_origins: Sequence[str]
) -> None:
    """Refuses what a browser sends for a page of another site.

    A JSON body keeps such pages out by its type; for what has no body nothing else would.

    Raises:
        ApiError: 403.
    """
    given = {name: value.decode("latin-1") for name, value in headers}
    origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
    if origin is not None and (origin in allowed_origins or "*" in allowed_origins):
        return
    is_own = origin is None or origin.partition("://")[2] == given.get(b"host")
    if site not in (None, "same-origin", "none") or not (is_own or site):
        raise ApiError(
            403,
            "A page of another site may not do this; --allowed-origins lets it.",
            kind="permission_error",
        )


def _route_of(path: str) -> str:
    if path.startswith(MODELS_PREFIX):
        return MODELS_PREFIX + "{model_id}"
    if path in ROUTES:
        return path
    if kept := _KEPT_PATH.fullmatch(path):
        return KEPT_INPUT if kept[1] else KEPT_RESPONSE
    return "other"


def shown_path(scope: Scope) -> str:
    """The path as the client wrote it, on one line of bounded length."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1").encode("unicode_escape").decode()[:MAX_LOGGED_PATH_CHARS]


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex


async def _discard_body(receive: Receive) -> None:
    """Reads a body nobody wants: closing on one that still arrives would lose the answer."""

    async def discard() -> None:
        while (await receive()).get("more_body", False):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(discard(), MAX_DISCARD_S)


def _summary(handler: Handler) -> str:
    return (handler.__doc__ or "").strip().split("\n")[0]


@cache
def _description() -> dict[str, object]:
    """What /openapi.json says: the models that requests are checked against."""
    models = {path: model for path, (_, model) in POST_ROUTES.items() if model is not None}
    _, schemas = models_json_schema(
        [(model, "validation") for model in models.values()], ref_template=_SCHEMAS + "{model}"
    )
    paths: dict[str, dict[str, object]] = {}
    for path, handlers in ROUTES.items():
        for method, handler in handlers.items():
            operation: dict[str, object] = {
                "summary": _summary(handler),
                "operationId": f"{method.lower()}{path}".replace("/", "_"),
                "responses": {"200": {"description": "Successful Response"}},
            }
            if method == "POST" and path in models:
                schema = {"$ref": _SCHEMAS + models[path].__name__}
                content = {"schema": schema, "example": _EXAMPLES[path]}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": content},
                }
            if names := _PATH_FIELD.findall(path):
                operation["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {}} for name in names
                ]
            paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "openspec", "version": openspec.__version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
