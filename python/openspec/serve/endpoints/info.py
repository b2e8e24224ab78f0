"""Endpoints beside generation: the server, its load, its tokenizer, and what ends requests."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import openspec
from openspec.checkpoint.strict_json import JsonValue
from openspec.engine.processes.replica import Replica
from openspec.errors import RequestError
from openspec.messages import (
    EngineInfo,
    EngineStats,
    SpecCounters,
    acceptance_per_position,
    acceptance_rate,
    mean_acceptance_length,
)
from openspec.serve.endpoints.drafter import shown_drafter
from openspec.serve.generation.answer import unless_gone
from openspec.serve.generation.body import received_json
from openspec.serve.generation.chat_prompt import render_chat
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.metrics import CONTENT_TYPE, kv_cache_usage, step_seconds
from openspec.serve.shapes.chat import AbortRequest, DetokenizeRequest, TokenizeRequest
from openspec.serve.shapes.wire import error_response, json_response, overloaded
from openspec.text.tokenizer import Tokenizer

JsonObject = dict[str, JsonValue]


def model_card(context: ServerContext, name: str) -> JsonObject:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": context.created,
        "created_at": datetime.fromtimestamp(context.created, timezone.utc).isoformat(),
        "owned_by": "openspec",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.engine.info.max_model_len,
        "permission": [],
    }


async def list_models(context: ServerContext, _: Request) -> Response:
    """Names that requests may use."""
    names = context.model_names
    return json_response(
        {
            "object": "list",
            "data": [model_card(context, name) for name in names],
            # Anthropic's clients turn pages.
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,
            # Codex demands the array. An entry would replace its own prompts, so there is none.
            "models": [],
        }
    )


async def get_model(context: ServerContext, request: Request) -> Response:
    """One model; an id may hold slashes."""
    name = request.scope["path"].removeprefix("/v1/models/")
    context.check_model(name)
    return json_response(model_card(context, name))


async def health(context: ServerContext, _: Request) -> Response:
    """Is the process worth keeping? 503 while no engine runs, with a code that tells why."""
    context.check_alive()
    return Response(status_code=200)


async def ready(context: ServerContext, _: Request) -> Response:
    """Should it get new requests? 503 from the first signal to stop."""
    if not context.is_ready:
        return error_response(overloaded("The server is not ready.", retry_after_s=5))
    return Response(status_code=200)


async def version(_: ServerContext, __: Request) -> Response:
    """The version of openspec."""
    return json_response({"version": openspec.__version__})


async def metrics(context: ServerContext, _: Request) -> Response:
    """Metrics for Prometheus."""
    await context.stats()
    context.metrics.ready.set(1 if context.is_ready else 0)
    return Response(context.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def server_info(context: ServerContext, _: Request) -> Response:
    """Settings of the engine, and its speculation so far."""
    config, stats = context.engine_config, await context.stats()
    engines = context.engine.all
    return json_response(
        {
            **msgspec.to_builtins(context.engine.info),
            "version": openspec.__version__,
            "python": platform.python_version(),
            "model": context.model_name,  # not the engine's, which is a path
            "acceptance": config.acceptance,
            "adaptive_speculation": config.adaptive_speculation,
            "max_num_queued_reqs": context.config.max_num_queued_reqs,
            "max_num_queued_tokens": context.config.max_num_queued_tokens,
            "structured_outputs": context.grammars.info(),
            "enable_prefix_caching": config.enable_prefix_caching,
            **_for_routers(context),
            "step_seconds": dict(step_seconds(stats)),
            "spec_decode": _speculation(stats),
            "drafter": shown_drafter(context),
            "num_replicas": len(engines),
            "engines": [_engine_state(one) for one in engines],
            # Under this name benchmark clients look for the acceptance length.
            "internal_states": [
                {
                    "avg_spec_accept_length": mean_acceptance_length(one.stats),
                    "effective_max_running_requests_per_dp": context.engine.info.max_num_seqs,
                }
                for one in engines
            ],
        }
    )


def _for_routers(context: ServerContext) -> JsonObject:
    """The names under which routers look for what is said elsewhere in other words."""
    info, (max_num_seqs, num_kv_tokens) = context.engine.info, context.engine.capacity()
    return {
        "served_model_name": context.model_name,
        "context_length": info.max_model_len,
        "max_total_tokens": num_kv_tokens,
        "max_running_requests": max_num_seqs,
        "kv_block_size": info.page_size,
        "tp_size": info.tensor_parallel_size,
        "dp_size": len(context.engine.all),
    }


async def kv_event_sources(context: ServerContext, _: Request) -> Response:
    """Where KV events are, by rank; nothing where they are off."""
    engines = [one.engine for one in context.engine.all if one.is_alive]
    sources = [engine.info.kv_events for engine in engines]
    return json_response(
        {str(one["data_parallel_rank"]): dict(one) for one in sources if one is not None}
    )


async def model_info(context: ServerContext, _: Request) -> Response:
    """The shape of the model and its sampling defaults."""
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
    """Generation requests in flight."""
    return json_response({"server_load": context.lifecycle.num_jobs})


async def loads(context: ServerContext, request: Request) -> Response:
    """Load in the form that routers read; `include` chooses sections."""
    stats, engines = await context.stats(), context.engine.all
    wanted = (request.query_params.get("include") or "all").split(",")
    return json_response(
        {
            "timestamp": time.time(),
            "version": openspec.__version__,
            "dp_rank_count": len(engines),
            "loads": [_load_of(one, context.engine.info, wanted) for one in engines],
            "aggregate": {
                "total_running_reqs": stats.num_running,
                "total_waiting_reqs": stats.num_waiting,
                "total_reqs": stats.num_running + stats.num_waiting,
                "avg_token_usage": kv_cache_usage(stats),
            },
        }
    )


def _load_of(engine: Replica, info: EngineInfo, wanted: Sequence[str]) -> JsonObject:
    stats, page_size = engine.stats, info.page_size
    used = (stats.num_pages - stats.num_free_pages) * page_size
    sections: dict[str, Callable[[], JsonObject]] = {
        "core": lambda: {
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_total_reqs": stats.num_running + stats.num_waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "max_total_num_tokens": stats.num_pages * page_size,
            "token_usage": kv_cache_usage(stats),
            "max_running_requests": info.max_num_seqs,
        },
        "memory": lambda: {"memory": dict(info.memory_plan)},
        "spec": lambda: {"speculative": _speculation(stats)},
        "queues": lambda: {"queues": {"waiting": stats.num_waiting}},
    }
    entry: JsonObject = {"dp_rank": engine.index}
    for name, section in sections.items():
        if name in wanted or "all" in wanted or name == "core":
            entry = entry | section()
    return entry


async def tokenize(context: ServerContext, request: Request) -> Response:
    """A text, or messages, as token ids."""
    tokenizer, pool = context.tokenizer, context.text_pool
    async with received_json(context, request, TokenizeRequest) as (body, num_bytes, _):
        context.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either prompt or messages.", "prompt")

        async def ids() -> list[int]:
            if body.prompt is None:
                return (await render_chat(context, body, num_bytes)).token_ids
            text = body.prompt
            segments = await pool.run(num_bytes, lambda: tokenizer.segments(text))
            token_ids = (await pool.encode([segments]))[0]
            adds_special = body.add_special_tokens is not False
            return tokenizer.with_surroundings(token_ids) if adds_special else token_ids

        token_ids = await unless_gone(request, num_bytes, ids())

    def answer() -> Response:
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": context.engine.info.max_model_len,
                "tokens": token_ids,
                "token_strs": [tokenizer.token_text(token_id) for token_id in token_ids]
                if body.return_token_strs
                else None,
            }
        )

    return await pool.run(num_bytes, answer)


async def detokenize(context: ServerContext, request: Request) -> Response:
    """Token ids as text."""
    async with received_json(context, request, DetokenizeRequest) as (body, _, __):
        context.check_model(body.model)
        tokens = body.tokens

        def decode() -> Response:
            context.tokenizer.check_token_ids(tokens, "tokens")
            text = context.tokenizer.decode(tokens, skip_special_tokens=False)
            return json_response({"prompt": text})

        return await context.text_pool.run(len(tokens) * 8, decode)


async def tokenizer_info(context: ServerContext, _: Request) -> Response:
    """What evaluation harnesses need to know of a remote tokenizer."""
    tokenizer = context.tokenizer
    return json_response(
        {
            "tokenizer_class": tokenizer.class_name,
            "vocab_size": tokenizer.num_tokens,
            "model_max_length": context.engine.info.max_model_len,
            "eos_token": _text(tokenizer, tokenizer.eos_token_id),
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token": _text(tokenizer, tokenizer.bos_token_id),
            "bos_token_id": tokenizer.bos_token_id,
            "pad_token": _text(tokenizer, tokenizer.eos_token_id),
            "add_bos_token": tokenizer.adds_bos,
            "has_chat_template": tokenizer.has_chat_template,
            "special_tokens": dict(tokenizer.special_tokens),
        }
    )


async def abort_request(context: ServerContext, request: Request) -> Response:
    """Ends a request that came with the same API key, or all of them."""
    async with received_json(context, request, AbortRequest) as (body, _, __):
        pass
    if body.abort_all:
        context.check_admin(request.scope["headers"])
        return json_response({"num_aborted": context.lifecycle.abort_all()})
    request_id = body.request_id or body.rid
    if not request_id:
        raise RequestError("Give request_id.", "request_id")
    owner = request.scope["state"]["key"]
    return json_response({"num_aborted": context.lifecycle.abort(request_id, owner)})


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """Forgets all cached prefixes, and the responses that are kept."""
    context.check_admin(request.scope["headers"])
    context.responses.clear()
    await context.engine.reset_prefix_cache()
    return json_response({"message": "The prefix cache is empty, and no response is kept."})


_SHOWN_STATS = (
    *("num_running", "num_waiting", "num_pages", "num_free_pages", "num_prompt_tokens"),
    *("num_generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_expert_layers", "num_distinct_experts", "num_expert_rows"),
    *("experts_of_drafts", "experts_of_sequences"),
    *("exchange_rounds", "exchange_wait_seconds"),
)


def _engine_state(engine: Replica) -> JsonObject:
    stats = engine.stats
    return {
        "engine": engine.index,
        "pid": engine.pid,
        "is_alive": engine.is_alive,
        "num_restarts": engine.num_restarts,
        **{name: getattr(stats, name) for name in _SHOWN_STATS},
        "step_seconds": dict(step_seconds(stats)),
        "spec_decode": _speculation(stats),
    }


def _speculation(stats: EngineStats) -> JsonObject:
    return {
        **{name: getattr(stats, name) for name in SpecCounters.__struct_fields__},
        "acceptance_rate": acceptance_rate(stats),
        "acceptance_per_position": acceptance_per_position(stats),
        "mean_acceptance_length": mean_acceptance_length(stats),
    }


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)
