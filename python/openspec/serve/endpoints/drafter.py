"""Another draft head, while requests run: our paths, SGLang's and vLLM's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import EngineError, RequestError
from openspec.messages import DrafterHead, DrafterState, acceptance_rate, mean_acceptance_length
from openspec.serve.generation.body import received_json
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.drafter import (
    DraftUpdateRequest,
    FinishUpdateRequest,
    LoadDrafterRequest,
    UpdateWeightsRequest,
)
from openspec.serve.shapes.wire import ApiError, json_response

JsonObject = dict[str, JsonValue]

STATUSES = {
    "drafter_swap_off": 404,
    "drafter_busy": 409,
    "drafter_other_shape": 409,
    "no_previous_drafter": 409,
    "drafter_not_finite": 422,
    "drafter_sha256": 422,
}
"""Of refusals that are no fault of the request's form, by their code."""


def shown_drafter(context: ServerContext) -> JsonObject | None:
    """Who drafts, for whoever may use the server: no paths. None: no engine has told."""
    states = _states(context)
    if not states:
        return None
    _, state = states[0]
    return {"version": state.version, "name": Path(state.folder).name, "method": state.method}


async def get_drafter(context: ServerContext, request: Request) -> Response:
    """Which draft head drafts, what its drafts brought, and which one a rollback goes back to."""
    context.check_admin(request.scope["headers"])
    return json_response(await _state(context))


async def load_drafter(context: ServerContext, request: Request) -> Response:
    """Has another draft head draft, of the same shape, while requests run."""
    context.check_admin(request.scope["headers"])
    async with received_json(context, request, LoadDrafterRequest) as (body, _, __):
        pass
    with _refusals():
        await context.engine.stage_drafter(body.path, body.sha256)
        await context.engine.exchange_drafter(
            flush_prefix_cache=body.flush_prefix_cache, weight_version=body.weight_version
        )
    return json_response(await _state(context))


async def roll_back_drafter(context: ServerContext, request: Request) -> Response:
    """Has the draft head before this one draft again."""
    context.check_admin(request.scope["headers"])
    with _refusals():
        await context.engine.exchange_drafter(back=True)
    return json_response(await _state(context))


async def update_weights_from_disk(context: ServerContext, request: Request) -> Response:
    """As /v1/drafter/load, under SGLang's name: of draft heads alone."""
    context.check_admin(request.scope["headers"])
    async with received_json(context, request, UpdateWeightsRequest) as (body, _, __):
        pass
    if not (body.update_draft_model or body.is_draft_model):
        raise RequestError(
            "only draft heads are updated here: set update_draft_model to true",
            "update_draft_model",
        )
    if body.load_format not in (None, "auto", "safetensors"):
        raise RequestError("load_format must be auto or safetensors", "load_format")
    if body.is_async:
        raise RequestError("is_async: the answer comes when the head drafts; drop it", "is_async")
    with _refusals():
        await context.engine.stage_drafter(body.model_path)
        num_ended = context.lifecycle.abort_all() if body.abort_all_requests else 0
        await context.engine.exchange_drafter(
            flush_prefix_cache=bool(body.flush_cache), weight_version=body.weight_version
        )
    state = await _state(context)
    message = f"Draft head version {state['version']} drafts; {num_ended} requests were ended."
    return json_response({"success": True, "message": message, "num_paused_requests": 0})


async def refuse_weight_transfer(context: ServerContext, request: Request) -> Response:
    """Refuses weights by NCCL or CUDA IPC, as vLLM has them: heads come from folders."""
    context.check_admin(request.scope["headers"])
    raise RequestError(
        "weights by NCCL or CUDA IPC are not taken: POST /start_draft_weight_update, then "
        '/update_weights with {"update_info": {"path": FOLDER}}, then /finish_weight_update'
    )


async def start_draft_weight_update(context: ServerContext, request: Request) -> Response:
    """The weights that come next are a draft head's, under vLLM's name."""
    context.check_admin(request.scope["headers"])
    context.is_draft_update = True
    return json_response({"message": "A draft head may be loaded."})


async def update_weights(context: ServerContext, request: Request) -> Response:
    """Loads a draft head beside the one that drafts, under vLLM's name."""
    context.check_admin(request.scope["headers"])
    async with received_json(context, request, DraftUpdateRequest) as (body, _, __):
        pass
    _check_started(context)
    path = body.update_info.get("path")
    if not isinstance(path, str):
        raise RequestError(
            "update_info.path must name the folder of a draft head: weights by NCCL or CUDA IPC "
            "are not taken",
            "update_info",
        )
    with _refusals():
        await context.engine.stage_drafter(path)
    return json_response({"message": "The draft head is loaded: POST /finish_weight_update."})


async def finish_weight_update(context: ServerContext, request: Request) -> Response:
    """Has the draft head that was loaded draft, under vLLM's name."""
    context.check_admin(request.scope["headers"])
    body = FinishUpdateRequest()
    if request.headers.get("content-length", "0") != "0":
        async with received_json(context, request, FinishUpdateRequest) as (body, _, __):
            pass
    _check_started(context)
    with _refusals():
        await context.engine.exchange_drafter(weight_version=body.weight_version)
    context.is_draft_update = False
    return json_response({"message": "The draft head drafts."})


async def weight_info(context: ServerContext, request: Request) -> Response:
    """The name of the draft head that drafts, under vLLM's name."""
    context.check_admin(request.scope["headers"])
    state = await _state(context)
    return json_response({"weight_version": state["weight_version"], "drafter": state})


def _check_started(context: ServerContext) -> None:
    if not context.is_draft_update:
        raise RequestError(
            "only draft heads are updated here: POST /start_draft_weight_update first"
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Gives each refusal its status."""
    try:
        yield
    except RequestError as error:
        status = STATUSES.get(error.code or "", 400)
        raise ApiError(status, str(error), param=error.param, code=error.code) from None


def _states(context: ServerContext) -> list[tuple[int, DrafterState]]:
    """Of the engines that run, by number, as they told last."""
    alive = [one for one in context.engine.all if one.is_alive]
    return [(one.index, one.drafter) for one in alive if one.drafter is not None]


async def _state(context: ServerContext) -> JsonObject:
    """The first engine's, and each one's by number."""
    await context.stats()
    states = _states(context)
    if not states:
        raise EngineError("no engine runs", context.engine.failure)
    engines = [{"engine": index, **_described(state)} for index, state in states]
    return {**_described(states[0][1]), "engines": engines}


def _described(head: DrafterHead) -> JsonObject:
    described: JsonObject = {
        **msgspec.to_builtins(head),
        "mean_acceptance_length": mean_acceptance_length(head.counters),
        "acceptance_rate": acceptance_rate(head.counters),
    }
    if isinstance(head, DrafterState) and head.previous is not None:
        described["previous"] = _described(head.previous)
    return described
