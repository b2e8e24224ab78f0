"""Steps that the handlers of both kinds of generation share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from openspec.serve.context import ServerContext
from openspec.serve.generation import Job, Prompt
from openspec.serve.json_body import parse, read_body
from openspec.serve.request_models import GenerationFields
from openspec.serve.wire import encode

ModelT = TypeVar("ModelT", bound=BaseModel)
GenerationT = TypeVar("GenerationT", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came and what it is called."""

    time: float
    unique: str
    external_id: str
    """What the client calls it: `request_id` in the body, else X-Request-Id."""
    num_bytes: int
    """Of its body: how much work it is, whatever field it is in (see `TextPool.run`)."""


async def receive_json(
    context: ServerContext, request: Request, model: type[ModelT]
) -> tuple[ModelT, int]:
    """Reads and checks a body; also returns its size in bytes.

    Raises:
        ApiError: it cannot be read.
        RequestError: it is not what the model asks for.
    """
    config = context.config
    body = await read_body(
        request, max_bytes=config.max_body_bytes, timeout_s=config.request_timeout_s
    )
    return await context.text_pool.run(len(body), lambda: parse(model, body)), len(body)


async def receive_request(
    context: ServerContext, request: Request, model: type[GenerationT]
) -> tuple[Arrival, GenerationT]:
    """Reads a generation request, and turns it away early where the server is full."""
    now = time.monotonic()
    context.check_capacity()
    body, num_bytes = await receive_json(context, request, model)
    context.check_model(body.model)
    external_id = body.request_id or str(request.scope["state"]["request_id"])
    return Arrival(now, uuid.uuid4().hex, external_id, num_bytes), body


def answer_size(job: Job) -> int:
    """How much work it is to write the answer, in characters (see `TextPool.run`)."""
    sampling = job.sampling
    size = sum(processor.num_output_tokens for processor in job.processors)
    if sampling.logprobs is not None:
        size *= 8 + 4 * sampling.logprobs
    return size + sum(prompt_size(job, prompt) for prompt in job.prompts)


def prompt_size(job: Job, prompt: Prompt) -> int:
    """How much of that is the log-probabilities of a prompt."""
    num_logprobs = job.sampling.prompt_logprobs
    return 0 if num_logprobs is None else len(prompt.token_ids) * (8 + 4 * num_logprobs)


def json_response(value: object) -> Response:
    """200 with JSON."""
    return Response(encode(value), media_type="application/json")


async def stream_events(job: Job, events: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The events of a job that runs while they are read."""
    async with job:
        async for event in events:
            yield event
