"""Reading a request body: bounded, timed, strictly JSON, validated in one place."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from openspec.errors import RequestError
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.chat import ChatCompletionRequest, CompletionRequest, GenerationFields
from openspec.serve.shapes.messages import MessagesRequest
from openspec.serve.shapes.responses import ResponsesRequest
from openspec.serve.shapes.wire import ApiError
from openspec.text.json_reader import MAX_VALUES, TOO_MANY_VALUES, num_values, read_json
from openspec.text.pool import MAX_INLINE_CHARS

ModelT = TypeVar("ModelT", bound=BaseModel)
GenerationT = TypeVar("GenerationT", bound=GenerationFields)

_ENGINE_HEADER = "X-Data-Parallel-Rank"
_CONTENT = frozenset(
    (
        "messages prompt input instructions system tools tool_choice response_format text "
        "output_config output_format structured_outputs structural_tag guided_json guided_regex "
        "guided_choice guided_grammar json_schema regex ebnf chat_template_kwargs metadata user "
        "logit_bias allowed_token_ids bad_words stop stop_sequences stop_token_ids"
    ).split()
)
"""Fields that only the prompt, the grammar and the sampling parameters are made of."""
_UNION_HINTS = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "must be a string or a list of strings",
    "input": "must be a string or a list of items",
    "system": "must be a string or a list of text blocks",
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came and what it is called."""

    time: float
    unique: str
    external_id: str
    """What the client calls it: `request_id` in the body, else X-Request-Id."""
    owner: bytes | None
    """The API key that it came with; None where the server has none."""
    num_bytes: int
    """Of its body: how much work it is, whatever field it is in (see `TextPool.run`)."""
    is_recorded: bool
    """Whether its texts may be kept, where the server keeps any."""
    engine: int | None
    """Which engine it must go to, by X-Data-Parallel-Rank; None: whichever suits."""
    held: contextlib.ExitStack
    """What its body takes of the server until its prompt is ready; closing it forgets the body."""


@contextlib.asynccontextmanager
async def received_request(
    context: ServerContext, request: Request, model: type[GenerationT]
) -> AsyncIterator[tuple[Arrival, GenerationT]]:
    """Reads a generation request, and turns it away early where the server is full.

    Leaving gives back what it takes of the server until it runs, and forgets its content.
    """
    now = time.monotonic()
    context.check_capacity()
    engine = _named_engine(request, len(context.engine.all))
    async with received_json(context, request, model) as (body, num_bytes, held):
        held.callback(forget, body)
        context.check_model(body.model)
        _refuse_unsupported(body)
        options = body.stream_options
        has_usage = options and (options.include_usage or options.continuous_usage_stats)
        if has_usage and not body.stream:
            raise RequestError("stream_options needs stream to be true", "stream_options")
        state = request.scope["state"]
        external_id = body.request_id or str(state["request_id"])
        owner: bytes | None = state["key"]
        is_recorded = _may_be_recorded(context, request, body, owner)
        yield (
            Arrival(
                now, uuid.uuid4().hex, external_id, owner, num_bytes, is_recorded, engine, held
            ),
            body,
        )


def _may_be_recorded(
    context: ServerContext, request: Request, body: GenerationFields, owner: bytes | None
) -> bool:
    """Whether nobody said no: in the body, by its header, or the operator of this key."""
    says_no = body.capture is False or getattr(body, "store", None) is False
    if says_no or request.headers.get("x-openspec-capture") == "0":
        return False
    keys = context.config.capture_keys
    return keys is None or (owner is not None and owner.decode() in keys)


def forget(body: BaseModel) -> None:
    """Drops what only the prompt and the grammar are made of, which may be large.

    Who answers keeps the rest of the request for as long as the answer takes.
    """
    for name in _CONTENT & body.__dict__.keys():
        body.__dict__[name] = None
    if body.model_extra:
        body.model_extra.clear()


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


@contextlib.asynccontextmanager
async def received_json(
    context: ServerContext, request: Request, model: type[ModelT]
) -> AsyncIterator[tuple[ModelT, int, contextlib.ExitStack]]:
    """A checked body, its size in bytes, and what it takes of the server until it is left.

    Raises:
        ApiError: it cannot be read, or there is no room for it.
        RequestError: it is not what the model asks for.
    """
    config = context.config
    with contextlib.ExitStack() as held:
        take = held.enter_context(context.body_bytes.share())
        data = await _read_body(request, take, config.max_body_bytes, config.request_timeout_s)
        num_bytes = len(data)
        held.enter_context(context.preparation())
        if num_bytes > MAX_INLINE_CHARS:
            places = context.bodies.of(num_bytes)
            await places.enter(num_bytes)
            held.callback(places.leave)
            if await request.is_disconnected():
                raise ApiError(400, "The client went away.")
        body = await context.text_pool.run(num_bytes, partial(parse, model, data))
        del data  # which takes about as much as its values
        yield body, num_bytes, held


async def _read_body(
    request: Request, take: Callable[[int], None], max_bytes: int, timeout_s: float
) -> bytes:
    headers = request.headers
    # An explicit JSON type is demanded because a browser cannot send it across origins unasked:
    # without this, any web page could drive a server bound to the loopback address.
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "Content-Type must be application/json.")
    if headers.get("content-encoding", "").lower() not in ("", "identity"):
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

    Raises:
        RequestError: naming the first offending field.
    """
    if num_values(body) > MAX_VALUES:
        raise RequestError(f"The request body has {TOO_MANY_VALUES}.")
    value = read_json(body.removeprefix(BOM_UTF8), "The request body")
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.")
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise _validation_error(exc) from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None


def _validation_error(exc: ValidationError) -> RequestError:
    # Of a union every branch complains; the deepest complaint is the closest to the mistake.
    errors = exc.errors(include_url=False, include_context=False, include_input=False)[:32]
    first = max(errors, key=lambda error: sum(map(_is_field, error["loc"])))
    name = str(first["loc"][0])[:100] if first["loc"] else None
    is_whole = not any(isinstance(part, str) and _is_field(part) for part in first["loc"][1:])
    if name in _UNION_HINTS and len(errors) > 1 and is_whole:
        return RequestError(f"{name} {_UNION_HINTS[name]}", name)
    location = ".".join(str(part) for part in first["loc"] if _is_field(part))[:200]
    message = _WORDS.get(first["type"], first["msg"])
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    return RequestError(f"{location}: {message}" if location else message, name)


_WORDS = {
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "too_short": "must not be empty",
}
"""What is wrong, by pydantic's name of it, where its own words speak of Python."""


def _is_field(part: int | str) -> bool:
    """False for the names pydantic gives to the branches of a union, such as `list[int]`."""
    return isinstance(part, int) or (part not in ("str", "int") and part.isidentifier())


def _fields(names: str, *neutral: object) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), neutral)


# Fields of other servers, with the values that ask for nothing.
_UNSUPPORTED = {
    **_fields(
        "custom_logit_processor custom_params guided_json_object guided_whitespace_pattern "
        "input_embeds kv_transfer_params lora_path max_new_tokens n_predict prompt_embeds samplers "
        "session_params thinking_token_budget"
    ),
    **_fields("bad_words_ids logits_processors stop_regex", []),
    **_fields("early_stopping no_stop_trim return_hidden_states return_logprob", False),
    **_fields("use_beam_search", False),
    **_fields("dry_multiplier dynatemp_range min_new_tokens mirostat no_repeat_ngram_size", 0),
    **_fields("top_a xtc_probability", 0),
    **_fields("beam_width length_penalty repeat_penalty typical_p", 1),
    **_fields("grammar", ""),
    **_fields("guided_decoding_backend", "auto", "guidance", "outlines", "xgrammar"),
    **_fields("mm_processor_kwargs", {}),
    **_fields("chat_template"),
    **_fields("function_call", "none"),
    **_fields("functions", []),
    **_fields("thinking_budget"),
    **_fields("reasoning_budget", -1),
    **_fields("reasoning_format", "auto", "deepseek", "parsed"),
    **_fields("data_sources lora", []),
    **_fields("extra_body options parameters sampling_params vllm_xargs", {}),
    **_fields("disable_thinking enable_search watermark", False),
    **_fields("detokenize do_sample parse_tool_calls", True),
    **_fields("n_probs min_keep", 0),
    **_fields("tfs_z", 1),
    **_fields("top_n_sigma", -1, 0),
    **_fields(
        "adapter_id format generation_config guided_decoding max_reasoning_tokens "
        "max_thinking_tokens prompt_mode random_seed search_parameters structured_output "
        "template_kwargs thinking_config"
    ),
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
        **_fields("suffix", ""),
    },
    ResponsesRequest: {
        **_fields("conversation max_tool_calls max_tokens reasoning_effort"),
        **_fields("context_management", []),
        **_fields("max_completion_tokens messages moderation prompt"),
        **_fields("response_format", {"type": "text"}),
        **_fields("logprobs echo", False),
        **_fields("top_logprobs", 0),
        **_fields("truncation", "disabled"),
        **_fields("enable_thinking think thinking"),
    },
    MessagesRequest: {
        **_fields("compaction container"),
        **_fields("mcp_servers", []),
        **_fields("max_completion_tokens prompt reasoning_effort"),
        **_fields("enable_thinking think reasoning"),
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
