"""POST /v1/messages: a chat in the form of Anthropic's API. Nothing is stored."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal, NoReturn

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from openspec.grammar.json_text import spelled
from openspec.serve.generation.answer import Answer, unless_gone
from openspec.serve.generation.body import received_json, received_request
from openspec.serve.generation.chat_prompt import ChatJob, chat_job, render_chat
from openspec.serve.generation.context import ServerContext
from openspec.serve.shapes.messages import (
    CountTokensRequest,
    MessagesFields,
    MessagesRequest,
    as_chat,
    check,
    skipped_tools,
)
from openspec.serve.shapes.wire import (
    RequestMetrics,
    anthropic_error_bytes,
    encode,
    event,
    json_response,
    to_api_error,
)
from openspec.text.outputs import OutputDelta, RequestOutputProcessor
from openspec.text.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning

SIGNATURE = "unsigned"
"""Of thinking. Clients demand one and send it back; this server does not look at it."""
RAW_INPUT = "_raw"
"""Holds the arguments of a call that are no JSON object, which a whole answer cannot carry."""
_STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
    "abort": "pause_turn",  # it is not whole, and the client may send it back to go on
}


class Block(msgspec.Struct, kw_only=True):
    """A part of the answer: text, thinking or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, object] | UnsetType = UNSET


class MessageUsage(msgspec.Struct):
    """Token counts; the whole prompt is the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    service_tier: str = "standard"


class Message(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    metrics: RequestMetrics | UnsetType = UNSET


async def create_message(context: ServerContext, request: Request) -> Response:
    """Answers a conversation in the form of Anthropic's Messages API."""
    async with received_request(context, request, MessagesRequest) as (arrival, body):
        check(body)
        body.stop = body.stop_sequences or body.stop
        _note_skipped(context, body)
        chat_request = await context.text_pool.run(arrival.num_bytes, lambda: as_chat(body))
        chat = await chat_job(
            context,
            request,
            arrival,
            body,
            chat_request,
            kind="msg",
            limit=body.max_tokens,
            format_param=body.form[1],
        )
    return await _Answer(context, body, chat).respond(request)


async def count_tokens(context: ServerContext, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    async with received_json(context, request, CountTokensRequest) as (body, num_bytes, _):
        context.check_model(body.model)
        chat_request = await context.text_pool.run(num_bytes, lambda: as_chat(body))
        chat = await unless_gone(request, num_bytes, render_chat(context, chat_request, num_bytes))
    return json_response({"input_tokens": len(chat.token_ids)})


def _note_skipped(context: ServerContext, body: MessagesFields) -> None:
    for kind in sorted(skipped_tools(body)):
        context.note_once(
            f"tools of type {kind[:64]!r} are skipped: only custom ones are supported"
        )
    if body.thinking is not None and body.thinking.budget_tokens is not None:
        context.note_once("thinking.budget_tokens has no effect: max_tokens bounds thinking, too")


class BlockWriter:
    """Makes blocks of an answer's pieces, and an event of every step on the way."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._texts: list[str] = []
        self._is_open = False

    def add(self, pieces: Iterable[Piece]) -> list[bytes]:
        """The events of more pieces."""
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                opening = Block(type="thinking", thinking="", signature="")
                delta = {"type": "thinking_delta", "thinking": piece.text}
                events += self._more(opening, piece.text, delta)
            elif isinstance(piece, Content):
                delta = {"type": "text_delta", "text": piece.text}
                events += self._more(Block(type="text", text=""), piece.text, delta)
            elif isinstance(piece, CallStart):
                block = Block(type="tool_use", id=piece.call_id, name=piece.name, input={})
                events += self._begin(block)
            elif isinstance(piece, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": piece.text}
                events.append(self._delta(piece.text, delta))
            else:
                events += self.close()
        return events

    def close(self) -> list[bytes]:
        """The events at the end of the block that is open, if one is."""
        if not self._is_open:
            return []
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._texts)
        events = []
        if block.type == "tool_use":
            block.input = _input(text)
        elif block.type == "thinking":
            events.append(self._delta("", {"type": "signature_delta", "signature": SIGNATURE}))
            block.thinking, block.signature = text, SIGNATURE
        else:
            block.text = text
        return [*events, named("content_block_stop", index=len(self.blocks) - 1)]

    def _begin(self, block: Block) -> list[bytes]:
        closing = self.close()
        self.blocks.append(block)
        self._texts, self._is_open = [], True
        index = len(self.blocks) - 1
        return [*closing, named("content_block_start", index=index, content_block=block)]

    def _more(self, opening: Block, text: str, delta: dict[str, str]) -> list[bytes]:
        goes_on = self._is_open and self.blocks[-1].type == opening.type
        return [*([] if goes_on else self._begin(opening)), self._delta(text, delta)]

    def _delta(self, text: str, delta: dict[str, str]) -> bytes:
        self._texts.append(text)
        return named("content_block_delta", index=len(self.blocks) - 1, delta=delta)


def named(kind: str, **fields: object) -> bytes:
    """One event with its name."""
    return f"event: {kind}\n".encode() + event({"type": kind, **fields})


def _input(text: str) -> dict[str, object]:
    """Arguments as an object, whose numbers stay as they are spelled."""
    if not text.strip():
        return {}
    try:
        value: object = json.loads(text, parse_float=spelled, parse_constant=_no_constant)
        encode(value)  # an escape that is half a character cannot be sent
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {RAW_INPUT: text}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class _Answer(Answer):
    """Builds one message."""

    stream_end = b""

    def __init__(self, context: ServerContext, body: MessagesRequest, chat: ChatJob) -> None:
        super().__init__(context, body, chat.job)
        self._writer = BlockWriter()
        self._parser = chat.parser(context)

    def full(self) -> Response:
        """The finished message."""
        output = self.job.processors[0].output()
        self._writer.add(
            self._parser.push(
                output.text, output.token_ids, True, output.finish_reason, output.stop_reason
            )
        )
        self._writer.close()
        message = self._message()
        message.stop_reason, message.stop_sequence = self._stop(
            output.finish_reason, output.stop_reason
        )
        message.metrics = self.metrics()
        return json_response(message)

    def events_of(
        self, processor: RequestOutputProcessor, delta: OutputDelta, is_first: bool, is_last: bool
    ) -> bytes:
        """The events of its pieces; the first tells how much of the prompt was cached."""
        events = (
            [named("message_start", message=self._message()), named("ping")] if is_first else []
        )
        pieces = self._parser.push(
            delta.text, delta.token_ids, delta.finished, delta.finish_reason, delta.stop_reason
        )
        events += self._writer.add(pieces)
        if delta.finish_reason is not None:
            events += self._writer.close()
            reason, sequence = self._stop(delta.finish_reason, delta.stop_reason)
            end = {"stop_reason": reason, "stop_sequence": sequence}
            usage, metrics = self._usage(), self.metrics()
            events.append(named("message_delta", delta=end, usage=usage, metrics=metrics))
            events.append(named("message_stop"))
        return b"".join(events)

    def on_error(self, error: Exception) -> bytes:
        """The last event of a stream that breaks."""
        return b"event: error\ndata: " + anthropic_error_bytes(to_api_error(error)) + b"\n\n"

    def _stop(self, finish_reason: str | None, stop: int | str | None) -> tuple[str, str | None]:
        reason = _STOP_REASONS[self._parser.finish_reason(finish_reason) or "stop"]
        if reason == "end_turn" and isinstance(stop, str):
            return "stop_sequence", stop
        return reason, None

    def _message(self) -> Message:
        return Message(
            id=self.job.request_id,
            model=self.context.model_name,
            content=self._writer.blocks,
            usage=self._usage(),
        )

    def _usage(self) -> MessageUsage:
        usage = self.usage()
        num_cached = usage.prompt_tokens_details["cached_tokens"]
        num_thinking = self._parser.num_reasoning_tokens
        return MessageUsage(
            usage.prompt_tokens - num_cached,
            0,
            num_cached,
            usage.completion_tokens,
            {"thinking_tokens": num_thinking},
        )
