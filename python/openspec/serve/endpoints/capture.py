"""What is kept of answers, for draft heads to learn from: counts, a switch, and erasing."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.records.recorder import Recorder
from openspec.serve.generation.body import received_json
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.capture import CaptureSettings
from openspec.serve.shapes.wire import json_response


async def get_capture(context: ServerContext, request: Request) -> Response:
    """Whether texts are kept, and how much there is."""
    return await _shown(context, _recorder(context, request))


async def set_capture(context: ServerContext, request: Request) -> Response:
    """Keeps the texts of requests that come from now on, or does not."""
    recorder = _recorder(context, request)
    async with received_json(context, request, CaptureSettings) as (body, _, __):
        recorder.is_enabled = body.enabled
    return await _shown(context, recorder)


async def erase_capture(context: ServerContext, request: Request) -> Response:
    """Removes all that was kept; what comes later is kept as before."""
    removed = await asyncio.to_thread(_recorder(context, request).erase)
    return json_response({"files_removed": removed})


async def _shown(context: ServerContext, recorder: Recorder) -> Response:
    num_bytes = await asyncio.to_thread(lambda: recorder.num_bytes)
    return json_response({"enabled": recorder.is_enabled, "bytes": num_bytes})


def _recorder(context: ServerContext, request: Request) -> Recorder:
    context.check_admin(request.scope["headers"])
    if context.recorder is None:
        raise RequestError("nothing is kept: the server runs without --capture-dir")
    return context.recorder
