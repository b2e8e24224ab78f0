"""/v1/responses/{response_id}: what is kept of a response, for the key that asked for it."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.input_items import page_of
from openspec.serve.shapes.responses import check_include
from openspec.serve.shapes.wire import json_response

MAX_ITEMS = 100
"""On one page."""
_NUM_ITEMS = 20


async def get_response(context: ServerContext, request: Request) -> Response:
    """A response that is kept."""
    check_include(_included(request))
    if request.query_params.get("stream", "false") != "false":
        raise RequestError("stream: a kept response comes as a whole.", "stream")
    return json_response(context.responses.answer(*_asked(request)))


async def delete_response(context: ServerContext, request: Request) -> Response:
    """Forgets a response."""
    owner, response_id = _asked(request)
    context.responses.delete(owner, response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(context: ServerContext, request: Request) -> Response:
    """The conversation that a kept response answers; `after`, `limit` and `order` choose a page."""
    check_include(_included(request))
    query = request.query_params
    limit, order = query.get("limit", str(_NUM_ITEMS)), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_ITEMS:
        raise RequestError(f"limit must be a number from 1 to {MAX_ITEMS}.", "limit")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc.", "order")
    items = context.responses.input_items(*_asked(request))
    page = await context.text_pool.run(
        sum(len(item.data) for item in items),
        lambda: page_of(items, query.get("after"), int(limit), order == "desc"),
    )
    return json_response(page)


def _asked(request: Request) -> tuple[bytes | None, str]:
    """The key and the id of the response."""
    return request.scope["state"]["key"], request.scope["path"].split("/")[3]


def _included(request: Request) -> list[str]:
    """OpenAI's clients write lists as `include[]`."""
    query = request.query_params
    return [*query.getlist("include"), *query.getlist("include[]")]
