"""Endpoints that describe the server: models, health, versions, load, metrics."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

import openspec
from openspec.checkpoint.strict_json import JsonValue
from openspec.messages import (
    EngineStats,
    acceptance_per_position,
    acceptance_rate,
    mean_acceptance_length,
)
from openspec.serve.context import ServerContext
from openspec.serve.handling import json_response
from openspec.serve.http_errors import ApiError, error_response, overloaded
from openspec.serve.prometheus import CONTENT_TYPE
from openspec.serve.server_metrics import kv_cache_usage

JsonObject = dict[str, JsonValue]


def model_card(context: ServerContext, name: str) -> JsonObject:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "openspec",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "permission": [],
    }


async def list_models(context: ServerContext, _: Request) -> Response:
    """GET /v1/models."""
    return json_response(
        {"object": "list", "data": [model_card(context, name) for name in context.model_names]}
    )


async def get_model(context: ServerContext, request: Request) -> Response:
    """GET /v1/models/{id}; an id may hold slashes."""
    name = str(request.path_params["model_id"])
    context.check_model(name)
    return json_response(model_card(context, name))


async def health(context: ServerContext, _: Request) -> Response:
    """GET /health: is the process worth keeping? 503 once the engine is gone."""
    if not context.engine.is_alive:
        return error_response(overloaded("The engine is not running.", retry_after_s=10))
    return Response(status_code=200)


async def ready(context: ServerContext, _: Request) -> Response:
    """GET /ready: should it get new requests? 503 from the first signal to stop."""
    if not context.is_ready:
        return error_response(overloaded("The server is not ready.", retry_after_s=5))
    return Response(status_code=200)


async def version(_: ServerContext, __: Request) -> Response:
    """GET /version."""
    return json_response({"version": openspec.__version__})


async def metrics(context: ServerContext, _: Request) -> Response:
    """GET /metrics."""
    await context.stats()
    context.metrics.ready.set(1 if context.is_ready else 0)
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def server_info(context: ServerContext, _: Request) -> Response:
    """GET /server_info."""
    info, config, stats = context.engine.info, context.engine_config, await context.stats()
    return json_response(
        {
            "version": openspec.__version__,
            "python": platform.python_version(),
            "model": context.model_name,
            "method": info.method,
            "num_speculative_tokens": info.num_speculative_tokens,
            "acceptance": config.acceptance,
            "adaptive_speculation": config.adaptive_speculation,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_num_queued_reqs": context.config.max_num_queued_reqs,
            "page_size": info.page_size,
            "num_pages": info.num_pages,
            "enable_prefix_caching": config.enable_prefix_caching,
            "memory_plan": info.memory_plan,
            "startup_seconds": info.startup_seconds,
            "spec_decode": _speculation(stats),
            # Under this name benchmark clients look for the acceptance length.
            "internal_states": [
                {
                    "avg_spec_accept_length": mean_acceptance_length(stats),
                    "effective_max_running_requests_per_dp": info.max_num_seqs,
                }
            ],
        }
    )


async def model_info(context: ServerContext, _: Request) -> Response:
    """GET /model_info."""
    model = context.model
    return json_response(
        {
            "model_path": context.model_name,
            "tokenizer_path": context.model_name,
            "is_generation": True,
            "has_chat_template": context.tokenizer.has_chat_template,
            "max_model_len": context.engine.info.max_model_len,
            "vocab_size": model.vocab_size,
            "num_token_ids": context.tokenizer.num_tokens,  # the others are padding
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "eos_token_ids": list(model.eos_token_ids),
            "preferred_sampling_params": dataclasses.asdict(context.model.sampling),
        }
    )


async def load(context: ServerContext, _: Request) -> Response:
    """GET /load."""
    return json_response({"server_load": context.lifecycle.num_jobs})


async def loads(context: ServerContext, request: Request) -> Response:
    """GET /v1/loads: load in the form that routers read; `include` chooses sections."""
    info, stats = context.engine.info, await context.stats()
    capacity = info.num_pages * info.page_size
    used = (stats.num_pages - stats.num_free_pages) * info.page_size
    sections: dict[str, Callable[[], JsonObject]] = {
        "core": lambda: {
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_total_reqs": stats.num_running + stats.num_waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": kv_cache_usage(stats),
            "max_running_requests": info.max_num_seqs,
        },
        "memory": lambda: {"memory": dict(info.memory_plan)},
        "spec": lambda: {"speculative": _speculation(stats)},
        "queues": lambda: {"queues": {"waiting": stats.num_waiting}},
    }
    wanted = (request.query_params.get("include") or "all").split(",")
    entry: JsonObject = {"dp_rank": 0}
    for name, section in sections.items():
        if name in wanted or "all" in wanted or name == "core":
            entry = entry | section()
    return json_response(
        {
            "timestamp": time.time(),
            "version": openspec.__version__,
            "dp_rank_count": 1,
            "loads": [entry],
            "aggregate": {
                "total_running_reqs": stats.num_running,
                "total_waiting_reqs": stats.num_waiting,
                "total_reqs": stats.num_running + stats.num_waiting,
                "avg_token_usage": kv_cache_usage(stats),
            },
        }
    )


async def openapi(context: ServerContext, request: Request) -> Response:
    """GET /openapi.json."""
    if not context.config.docs:
        raise ApiError(404, "Not Found", kind="not_found_error")
    return json_response(request.app.openapi())


def _speculation(stats: EngineStats) -> JsonObject:
    return {
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(stats.num_accepted_tokens_per_pos),
        "acceptance_rate": acceptance_rate(stats),
        "acceptance_per_position": acceptance_per_position(stats),
        "mean_acceptance_length": mean_acceptance_length(stats),
    }
