"""Reading a request body: bounded, timed, strictly JSON, validated in one place."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from openspec.errors import RequestError
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.chat import ChatCompletionRequest, CompletionRequest, GenerationFields
from openspec.serve.shapes.messages import MessagesRequest
from openspec.serve.shapes.responses import ResponsesRequest
from openspec.serve.shapes.wire import ApiError

MAX_OBJECT_KEYS = 16384
MAX_VALUES = 1 << 20
"""In one body: the parser lets nothing else run meanwhile."""
CONTAINER_COST = 8
"""An object or a list takes about as long as so many numbers."""

ModelT = TypeVar("ModelT", bound=BaseModel)
GenerationT = TypeVar("GenerationT", bound=GenerationFields)

_ENGINE_HEADER = "X-Data-Parallel-Rank"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNION_HINTS = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "must be a string or a list of strings",
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came and what it is called."""

    time: float
    unique: str
    external_id: str
    """What the client calls it: `request_id` in the body, else X-Request-Id."""
    num_bytes: int
    """Of its body: how much work it is, whatever field it is in (see `TextPool.run`)."""
    engine: int | None
    """Which engine it must go to, by X-Data-Parallel-Rank; None: whichever suits."""


async def receive_request(
    context: ServerContext, request: Request, model: type[GenerationT]
) -> tuple[Arrival, GenerationT]:
    """Reads a generation request, and turns it away early where the server is full."""
    now = time.monotonic()
    context.check_capacity()
    engine = _named_engine(request, len(context.engine.all))
    body, num_bytes = await receive_json(context, request, model)
    context.check_model(body.model)
    _refuse_unsupported(body)
    options = body.stream_options
    if not body.stream and options and (options.include_usage or options.continuous_usage_stats):
        raise RequestError("stream_options needs stream to be true", "stream_options")
    external_id = body.request_id or str(request.scope["state"]["request_id"])
    return Arrival(now, uuid.uuid4().hex, external_id, num_bytes, engine), body


def _named_engine(request: Request, num_engines: int) -> int | None:
    """What routers put into a header that place requests by engine, as they do it with vLLM."""
    given = request.headers.get(_ENGINE_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", given) or int(given) >= num_engines:
        known = "0" if num_engines == 1 else f"0 to {num_engines - 1}"
        raise RequestError(
            f"{_ENGINE_HEADER} must be the number of an engine of this server: {known}.",
            _ENGINE_HEADER,
        )
    return int(given)


async def receive_json(
    context: ServerContext, request: Request, model: type[ModelT]
) -> tuple[ModelT, int]:
    """Reads and checks a body; also returns its size in bytes.

    Raises:
        ApiError: it cannot be read.
        RequestError: it is not what the model asks for.
    """
    config = context.config
    with context.body_bytes.share() as take:
        body = await _read_body(request, take, config.max_body_bytes, config.request_timeout_s)
        return await context.text_pool.run(len(body), lambda: parse(model, body)), len(body)


async def _read_body(
    request: Request, take: Callable[[int], None], max_bytes: int, timeout_s: float
) -> bytes:
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
        return await asyncio.wait_for(_read(request, take, max_bytes), timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, "The request body did not arrive in time.") from None
    except ClientDisconnect:
        raise ApiError(400, "The client went away.") from None


async def _read(request: Request, take: Callable[[int], None], max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        take(len(chunk))
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
    _check_num_values(body)
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


def _check_num_values(body: bytes) -> None:
    """Refuses a body of too many values, counted by its punctuation outside of strings."""
    if len(body) <= MAX_VALUES:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num = unescaped.count(b'"') // 2
    if num <= MAX_VALUES:
        outside = b"".join(unescaped.split(b'"')[::2])
        num_containers = outside.count(b"[") + outside.count(b"{")
        num = outside.count(b",") + CONTAINER_COST * num_containers
    if num > MAX_VALUES:
        raise RequestError(
            f"The request body has over {MAX_VALUES} values, of which an object or a list counts "
            f"as {CONTAINER_COST}."
        )


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
    first = max(errors, key=lambda error: sum(map(_is_field, error["loc"])))
    name = str(first["loc"][0])[:100] if first["loc"] else None
    if name in _UNION_HINTS and len(errors) > 1:
        return RequestError(f"{name} {_UNION_HINTS[name]}", name)
    location = ".".join(str(part) for part in first["loc"] if _is_field(part))[:200]
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{location}: {message}" if location else message, name)


def _is_field(part: int | str) -> bool:
    """False for the names pydantic gives to the branches of a union, such as `list[int]`."""
    return isinstance(part, int) or (part not in ("str", "int") and part.isidentifier())


def _fields(names: str, *neutral: object) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), neutral)


# Fields of other servers, with the values that ask for nothing.
_UNSUPPORTED = {
    **_fields(
        "custom_logit_processor custom_params ebnf guided_decoding_backend guided_json_object "
        "guided_whitespace_pattern input_embeds json_schema kv_transfer_params lora_path "
        "max_new_tokens n_predict prompt_embeds regex samplers session_params thinking_token_budget"
    ),
    **_fields("bad_words_ids logits_processors stop_regex", []),
    **_fields("early_stopping no_stop_trim return_hidden_states return_logprob", False),
    **_fields("use_beam_search", False),
    **_fields("dry_multiplier dynatemp_range min_new_tokens mirostat no_repeat_ngram_size", 0),
    **_fields("top_a xtc_probability", 0),
    **_fields("beam_width length_penalty repeat_penalty typical_p", 1),
    **_fields("grammar", ""),
    **_fields("mm_processor_kwargs", {}),
    **_fields("chat_template"),
    **_fields("function_call", "none"),
    **_fields("functions", []),
}
_UNSUPPORTED_BY_MODEL = {
    CompletionRequest: {
        **_fields("max_completion_tokens messages reasoning_effort top_logprobs"),
        **_fields("chat_template_kwargs", {}),
        **_fields("tool_choice", "none", "auto"),
        **_fields("tools", []),
    },
    ChatCompletionRequest: {
        **_fields("audio prediction web_search_options"),
        **_fields("best_of", 1),
        **_fields("documents", []),
        **_fields("modalities", ["text"]),
        **_fields("separate_reasoning stream_reasoning", True),
        **_fields("store", False),
        **_fields("suffix", ""),
    },
    ResponsesRequest: {
        **_fields("context_management conversation max_tool_calls max_tokens"),
        **_fields("max_completion_tokens messages moderation prompt"),
        **_fields("response_format", {"type": "text"}),
        **_fields("logprobs echo", False),
        **_fields("top_logprobs", 0),
        **_fields("truncation", "disabled"),
    },
    MessagesRequest: {
        **_fields("container output_format"),
        **_fields("mcp_servers", []),
        **_fields("max_completion_tokens prompt reasoning_effort"),
        **_fields("response_format", {"type": "text"}),
        **_fields("logprobs echo", False),
        **_fields("top_logprobs", 0),
        **_fields("chat_template_kwargs", {}),
    },
}


def _refuse_unsupported(request: GenerationFields) -> None:
    """Refuses a field known from other servers that would have to be ignored here."""
    known = _UNSUPPORTED | _UNSUPPORTED_BY_MODEL[type(request)]
    for name, value in (request.model_extra or {}).items():
        if name in known and value is not None and value not in known[name]:
            raise RequestError(f"{name} is not supported by this server.", name)
