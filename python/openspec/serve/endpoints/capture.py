"""What is kept of answers, for draft heads to learn from: counts, a switch, and erasing."""

from __future__ import annotations

import asyncio
import math

from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.records.recorder import Recorder
from openspec.serve.generation.body import received_json
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.capture import CaptureSettings
from openspec.serve.shapes.wire import json_response


async def get_capture(context: ServerContext, request: Request) -> Response:
    """Whether texts are kept, which share, how much there is, and what was dropped."""
    return await _shown(context, _recorder(context, request))


async def set_capture(context: ServerContext, request: Request) -> Response:
    """Keeps the texts of requests that come from now on, or does not."""
    recorder = _recorder(context, request)
    async with received_json(context, request, CaptureSettings) as (body, _, __):
        if body.until_s is not None and body.enabled is False:
            raise RequestError("until_s is for what is enabled; drop one of them", "until_s")
        if body.share is not None:
            recorder.share = body.share
        if body.enabled is not None or body.until_s is not None:
            seconds = math.inf if body.until_s is None else body.until_s
            recorder.enable(0.0 if body.enabled is False else seconds)
    return await _shown(context, recorder)


async def erase_capture(context: ServerContext, request: Request) -> Response:
    """Removes all that was kept; what comes later is kept as before."""
    removed = await asyncio.to_thread(_recorder(context, request).erase)
    return json_response({"files_removed": removed})


async def _shown(context: ServerContext, recorder: Recorder) -> Response:
    num_bytes = await asyncio.to_thread(lambda: recorder.num_bytes)
    metrics = context.metrics
    counters = {"tokens": metrics.captured_tokens, "dropped": metrics.capture_dropped}
    counts = {
        name: int(next(iter(one.collect())).samples[0].value) for name, one in counters.items()
    }
    return json_response(
        {"enabled": recorder.is_enabled, "share": recorder.share, "bytes": num_bytes, **counts}
    )


def _recorder(context: ServerContext, request: Request) -> Recorder:
    context.check_admin(request.scope["headers"])
    if context.recorder is None:
        raise RequestError("nothing is kept: the server runs without --capture-dir")
    return context.recorder
