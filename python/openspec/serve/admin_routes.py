"""Endpoints that interfere with other clients' requests or with the engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.context import ServerContext
from openspec.serve.gate import is_authorised
from openspec.serve.handling import json_response, receive_json
from openspec.serve.http_errors import ApiError
from openspec.serve.request_models import AbortRequest


def check_admin(context: ServerContext, request: Request) -> None:
    """Demands the admin key where one is set.

    Raises:
        ApiError: 401.
    """
    key = context.config.admin_api_key
    if key is not None and not is_authorised(request.scope["headers"], [key.encode()]):
        raise ApiError(
            401,
            "Incorrect API key provided; this endpoint needs the admin API key.",
            code="invalid_api_key",
        )


async def abort_request(context: ServerContext, request: Request) -> Response:
    """POST /abort_request."""
    body, _ = await receive_json(context, request, AbortRequest)
    if body.abort_all:
        check_admin(context, request)
        return json_response({"num_aborted": context.lifecycle.abort_all()})
    request_id = body.request_id or body.rid
    if not request_id:
        raise RequestError("Give request_id.", "request_id")
    return json_response({"num_aborted": context.lifecycle.abort(request_id)})


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """POST /flush_cache: forgets all cached prefixes."""
    check_admin(context, request)
    await context.engine.reset_prefix_cache()
    return json_response({"message": "The prefix cache is empty."})
