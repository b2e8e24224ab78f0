"""The ASGI application: which path leads where, and what /openapi.json says about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import openspec
from openspec.errors import EngineError, RequestError
from openspec.serve import admin_routes, chat, completions, info_routes, text_routes
from openspec.serve.context import ServerContext
from openspec.serve.gate import PUBLIC_PATHS, Gate
from openspec.serve.http_errors import ApiError, error_response, handle_exception
from openspec.serve.request_models import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

GET_ROUTES: dict[str, Handler] = {
    "/health": info_routes.health,
    "/ready": info_routes.ready,
    "/metrics": info_routes.metrics,
    "/version": info_routes.version,
    "/v1/models": info_routes.list_models,
    "/v1/models/{model_id:path}": info_routes.get_model,
    "/server_info": info_routes.server_info,
    "/get_server_info": info_routes.server_info,
    "/model_info": info_routes.model_info,
    "/get_model_info": info_routes.model_info,
    "/load": info_routes.load,
    "/v1/loads": info_routes.loads,
    "/tokenizer_info": text_routes.tokenizer_info,
    "/openapi.json": info_routes.openapi,
}
POST_ROUTES: dict[str, tuple[Handler, type[BaseModel] | None]] = {
    "/v1/completions": (completions.create_completion, CompletionRequest),
    "/v1/chat/completions": (chat.create_chat_completion, ChatCompletionRequest),
    "/tokenize": (text_routes.tokenize, TokenizeRequest),
    "/detokenize": (text_routes.detokenize, DetokenizeRequest),
    "/abort_request": (admin_routes.abort_request, AbortRequest),
    "/flush_cache": (admin_routes.flush_cache, None),
}
_SCHEMAS = "#/components/schemas/"


def build_app(context: ServerContext) -> ASGIApp:
    """The whole application."""
    app = FastAPI(
        title="openspec",
        version=openspec.__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    schemas: dict[str, Any] = {}
    # Routes are tried in order, so the ones that matter come first.
    for path, (handler, model) in POST_ROUTES.items():
        extra = None if model is None else _request_body(model, schemas)
        _add(app, context, path, ["POST"], handler, extra)
    for path, handler in GET_ROUTES.items():
        methods = ["GET", "HEAD"] if path in PUBLIC_PATHS else ["GET"]
        _add(app, context, path, methods, handler, None)
    for kind in (ApiError, RequestError, EngineError, Exception):
        app.add_exception_handler(kind, handle_exception)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    _describe(app, schemas)
    config = context.config
    keys = list(config.api_key or [])
    if keys and config.admin_api_key is not None:
        keys.append(config.admin_api_key)
    gate: ASGIApp = Gate(
        app,
        api_keys=keys,
        lifecycle=context.lifecycle,
        metrics=context.metrics,
        access_log=config.access_log,
    )
    if config.allowed_origins:
        gate = CORSMiddleware(
            gate,
            allow_origins=config.allowed_origins,
            allow_credentials=config.allow_credentials,
            allow_methods=["GET", "POST"],
            # OpenAI's JavaScript client sends a dozen of its own, `x-stainless-...`.
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return gate


def _add(
    app: FastAPI,
    context: ServerContext,
    path: str,
    methods: list[str],
    handler: Handler,
    extra: dict[str, Any] | None,
) -> None:
    async def endpoint(request: Request) -> Response:
        return await handler(context, request)

    summary = (handler.__doc__ or "").strip().split("\n")[0]
    for method in methods:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            name=f"{handler.__name__}_{method.lower()}",
            operation_id=f"{method.lower()}{path}".replace("/", "_"),
            summary=summary,
            response_class=Response,
            openapi_extra=extra,
            include_in_schema=method != "HEAD",
        )


def _request_body(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI, schemas: dict[str, Any]) -> None:
    """Adds the request schemas, which FastAPI does not see, to its own description."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = generate()
            description.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


async def _handle_http_exception(_: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    detail = str(exc.detail) if isinstance(exc, HTTPException) else "Internal server error."
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else None
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return error_response(ApiError(status, detail, kind=kind, headers=headers))
