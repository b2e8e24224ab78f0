"""POST /v1/responses: a chat in the form of OpenAI's newer API."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openspec.errors import RequestError
from openspec.serve.generation.answer import Answer, unless_gone
from openspec.serve.generation.body import Arrival, received_request
from openspec.serve.generation.chat_prompt import ChatJob, chat_job, render_chat
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.input_items import KeptItem, as_items
from openspec.serve.shapes.response_items import OutputWriter, ResponseObject, ResponseUsage
from openspec.serve.shapes.responses import (
    ResponsesRequest,
    add_kept,
    as_chat,
    check,
    referred_items,
    skipped_types,
)
from openspec.serve.shapes.wire import encode, json_response, sanitise, to_api_error
from openspec.text.outputs import OutputDelta, RequestOutputProcessor


async def create_response(context: ServerContext, request: Request) -> Response:
    """Answers a conversation in the form of the Responses API."""
    async with received_request(context, request, ResponsesRequest) as (arrival, body):
        check(body)
        for kind in sorted(skipped_types(body)):
            context.note_once(
                f"tools of type {kind[:64]!r} are skipped: only functions are supported"
            )
        pool, num_bytes = context.text_pool, arrival.num_bytes
        echo = await pool.run(num_bytes, lambda: _Echo.of(body))
        await _add_kept(context, arrival, body)
        chat_request = await pool.run(num_bytes, lambda: as_chat(body))
        items: list[KeptItem] = []
        if body.store is not False:
            items = await pool.run(num_bytes, lambda: as_items(body, arrival.unique))
        chat = await chat_job(
            context,
            request,
            arrival,
            body,
            chat_request,
            kind="resp",
            limit=body.max_output_tokens,
            param="input",
            format_param="text.format",
        )
    if body.store is not False:
        context.responses.begin(arrival.owner, chat.job.request_id, items)
    return await _Answer(context, body, chat, echo).respond(request)


async def count_input_tokens(context: ServerContext, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    async with received_request(context, request, ResponsesRequest) as (arrival, body):
        check(body)
        await _add_kept(context, arrival, body)
        num_bytes = arrival.num_bytes
        chat_request = await context.text_pool.run(num_bytes, lambda: as_chat(body))
        rendering = render_chat(context, chat_request, num_bytes, param="input")
        chat = await unless_gone(request, num_bytes, rendering)
    return json_response({"object": "response.input_tokens", "input_tokens": len(chat.token_ids)})


async def _add_kept(context: ServerContext, arrival: Arrival, body: ResponsesRequest) -> None:
    """Puts what the request refers to into its input.

    Raises:
        ApiError: 404, something of it is not kept.
        RequestError: the conversation is larger than a body may be.
    """
    kept, owner, previous = context.responses, arrival.owner, body.previous_response_id
    earlier = [] if previous is None else kept.conversation(owner, previous)
    known = {item_id: kept.item(owner, item_id) for item_id in referred_items(body)}
    num_bytes = arrival.num_bytes + sum(map(len, (*earlier, *known.values())))
    if num_bytes > context.config.max_body_bytes:
        raise RequestError(
            f"The conversation has {num_bytes} bytes; a request may have "
            f"{context.config.max_body_bytes}.",
            "input",
        )
    await context.text_pool.run(num_bytes, lambda: add_kept(body, earlier, known))


@dataclass(frozen=True, slots=True)
class _Echo:
    """What a response repeats of its request as JSON: it is written once, and sent three times."""

    instructions: msgspec.Raw
    metadata: msgspec.Raw
    text: msgspec.Raw
    tool_choice: msgspec.Raw
    tools: msgspec.Raw
    user: msgspec.Raw

    @classmethod
    def of(cls, body: ResponsesRequest) -> _Echo:
        given = body.text.format if body.text is not None else None
        shown_format = {"type": "text"} if given is None else given.model_dump(exclude_unset=True)
        parts = (
            body.instructions,
            body.metadata or {},
            {"format": shown_format},
            body.tool_choice or "auto",
            [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            body.user,
        )
        return cls(*(msgspec.Raw(encode(part)) for part in parts))

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return sum(len(getattr(self, name)) for name in self.__slots__)


class _Answer(Answer):
    """Builds one response."""

    stream_end = b""

    def __init__(
        self, context: ServerContext, body: ResponsesRequest, chat: ChatJob, echo: _Echo
    ) -> None:
        super().__init__(context, body, chat.job)
        self._request, self._echo = body, echo
        self.num_echo_bytes = echo.num_bytes
        self._keeps = body.store is not False
        self._writer = OutputWriter(chat.job.request_id.partition("-")[2])
        self._parser = chat.parser(context)

    def full(self) -> Response:
        """The finished response."""
        output = self.job.processors[0].output()
        self._writer.add(
            self._parser.push(
                output.text, output.token_ids, True, output.finish_reason, output.stop_reason
            )
        )
        return json_response(self._finished(output.finish_reason or "stop")[0])

    def begin(self) -> bytes:
        """The response as it begins."""
        response = self._response()
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._writer.event(kind, response=response) for kind in kinds)

    def events_of(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool, is_last: bool
    ) -> bytes:
        """The events of its pieces."""
        pieces = self._parser.push(
            delta.text, delta.token_ids, delta.finished, delta.finish_reason, delta.stop_reason
        )
        events = self._writer.add(pieces)
        if delta.finish_reason is not None:
            response, closing = self._finished(delta.finish_reason)
            events += closing
            events.append(self._writer.event(f"response.{response.status}", response=response))
        return b"".join(events)

    def on_error(self, error: Exception) -> bytes:
        """The response as it failed."""
        known = to_api_error(error)
        response = self._response()
        response.status, response.output = "failed", self._writer.items
        code = known.code or ("server_error" if known.status >= 500 else "invalid_prompt")
        response.error = {"code": code, "message": sanitise(known.message)}
        return self._writer.event("response.failed", response=response)

    def _finished(self, reason: str) -> tuple[ResponseObject, list[bytes]]:
        """The response and the last events of its items."""
        response = self._response()
        response.status = "completed" if reason == "stop" else "incomplete"
        if reason != "stop":
            detail = "max_output_tokens" if reason == "length" else reason
            response.incomplete_details = {"reason": detail}
        closing = self._writer.close(response.status)
        usage = self.usage()
        num_cached = usage.prompt_tokens_details["cached_tokens"]
        response.output = self._writer.items
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            {"cached_tokens": num_cached, "cache_write_tokens": 0},
            usage.completion_tokens,
            {"reasoning_tokens": self._parser.num_reasoning_tokens},
            usage.total_tokens,
        )
        response.metrics = self.metrics()
        if self._keeps:
            self.context.responses.finish(response)
        return response, closing

    def _response(self) -> ResponseObject:
        body, sampling, echo = self._request, self.job.sampling, self._echo
        reasoning = body.reasoning
        return ResponseObject(
            id=self.job.request_id,
            created_at=self.created,
            instructions=echo.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=echo.metadata,
            model=self.context.model_name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=self._keeps,
            reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
            seed=body.seed,
            temperature=sampling.temperature,
            text=echo.text,
            tool_choice=echo.tool_choice,
            tools=echo.tools,
            top_p=sampling.top_p,
            user=echo.user,
        )
