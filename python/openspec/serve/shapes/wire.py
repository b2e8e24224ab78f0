"""What leaves the server: answers and errors in the shapes of the OpenAI API.

msgspec structs, because they are encoded once per chunk. Error messages give nothing away.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openspec.errors import EngineError, RequestError, cut
from openspec.grammar.json_text import raw_number

logger = logging.getLogger(__name__)

ChoiceT = TypeVar("ChoiceT")

MAX_PIECE_BYTES = 1 << 20
"""That are handed to a connection at a time."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_PATH = re.compile(r"(?<![\w<:/.#])(?:/[\w.+-]+){2,}/?")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*", re.DOTALL)
_encoder = msgspec.json.Encoder(enc_hook=raw_number)
# They end no line of an event, but httpx, and so LiteLLM, reads lines as str.splitlines does, which
# cuts there: the client would lose the event.
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in ("\x85", "\u2028", "\u2029")]


def encode(value: object) -> bytes:
    """JSON."""
    return _encoder.encode(value)


class PieceResponse(Response):
    """An answer that goes out in pieces: a large one as a whole would hold up the loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends everything."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await send_body(send, bytes(self.body), is_last=True)


async def send_body(send: Send, body: bytes, is_last: bool) -> None:
    """Sends a body, or a part of one, piece by piece as the client takes it."""
    view = memoryview(body)
    for first in range(0, max(1, len(view)), MAX_PIECE_BYTES):
        end = first + MAX_PIECE_BYTES
        more = not is_last or end < len(view)
        piece = bytes(view[first:end])
        await send({"type": "http.response.body", "body": piece, "more_body": more})


def json_response(value: object) -> Response:
    """200 with JSON."""
    return PieceResponse(encode(value), media_type="application/json")


def encoded_list(values: Iterable[object]) -> msgspec.Raw:
    """The values as a list in JSON, each written by itself, so that other threads run meanwhile."""
    buffer = bytearray(b"[")
    for value in values:
        _encoder.encode_into(value, buffer, -1)
        buffer += b","
    buffer[len(buffer) - (len(buffer) > 1) :] = b"]"
    return msgspec.Raw(buffer)


def event(value: object) -> bytes:
    """JSON as one server-sent event."""
    buffer = bytearray(b"data: ")
    _encoder.encode_into(value, buffer, 6)
    buffer += b"\n\n"
    if not buffer.isascii():
        for end, escaped in _LINE_ENDS:
            if end in buffer:
                buffer = buffer.replace(end, escaped)
    return bytes(buffer)


class Usage(msgspec.Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    """How many of them are `cached_tokens`."""
    completion_tokens_details: dict[str, int] | UnsetType = UNSET
    """How many of them are `reasoning_tokens`."""


class SpeculationMetrics(msgspec.Struct):
    """A request's speculation, summed over its sequences. Terms as in openspec.messages."""

    method: str
    drafter_version: int
    """Of the draft head at the answer's end."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_forced_tokens: int
    num_accepted_forced_tokens: int
    num_copied_tokens: int
    num_accepted_copied_tokens: int
    num_accepted_tokens_per_pos: list[int]
    num_drafts_per_pos: list[int]
    acceptance_rate: float
    mean_acceptance_length: float
    acceptance_histogram: list[int]
    """Entry k: drafts of which exactly k tokens were accepted."""
    num_spec_steps: int
    """Steps with drafts: the histogram's sum."""
    num_steps: int
    """Steps that produced output, drafted or not."""
    num_accepted_tokens_per_step: list[int] | UnsetType = UNSET
    """If asked for: of these steps, in order."""


class Step(msgspec.Struct, gc=False):
    """A step of a choice, in requests that ask for details. Terms as in openspec.messages."""

    token_ids: list[int]
    tokens: list[str]
    """What each of them adds to the text; empty for a part of a character and for hidden ones."""
    draft_token_ids: list[int]
    draft_tokens: list[str]
    """Each as it reads alone."""
    draft_parents: list[int]
    draft_scores: list[float] | UnsetType
    accepted: list[int]
    num_forced_tokens: int
    """The first so many drafts a grammar left no choice of."""
    num_copied_tokens: int
    """So many after these are copied from the text so far, beside a drafter that has others."""
    num_rows: int
    num_sequences: int
    time_ms: float
    device_time_ms: float
    draft_time_ms: float | None
    wait_time_ms: list[float] | UnsetType = UNSET
    """By GPU where several share the model."""


class RequestMetrics(msgspec.Struct):
    """`metrics` of an answer."""

    time_to_first_token_ms: float | None
    speculative_decoding: SpeculationMetrics | None


class PromptLogprob(msgspec.Struct):
    """One candidate for a prompt position; `prompt_logprobs` has them by id, for each position."""

    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the form of /v1/completions: lists in JSON."""

    text_offset: msgspec.Raw
    token_logprobs: msgspec.Raw
    """Of each token."""
    tokens: msgspec.Raw
    top_logprobs: msgspec.Raw
    """For each token its candidates' by name."""


class CompletionChoice(msgspec.Struct):
    """One completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: msgspec.Raw | UnsetType | None = UNSET
    steps: list[Step] | UnsetType = UNSET


class Answer(msgspec.Struct, Generic[ChoiceT], kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Of chats; choices of /v1/completions have their own."""
    prompt_logprobs: msgspec.Raw | UnsetType | None = UNSET


class Completion(Answer[CompletionChoice], kw_only=True):
    """Answer and chunk of /v1/completions."""

    object: str = "text_completion"


class TokenLogprob(msgspec.Struct):
    """A token of a chat answer, or a candidate for its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob] | UnsetType = UNSET
    """The candidates; they have none themselves."""


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the form of /v1/chat/completions."""

    content: msgspec.Raw
    """A list of TokenLogprob in JSON."""
    refusal: None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    """Name and arguments (JSON text) of a call, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A call, or what a chunk adds to one; id, type and name come where it begins."""

    index: int | UnsetType = UNSET
    """In chunks."""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


class AssistantMessage(msgspec.Struct, kw_only=True):
    """A finished chat answer."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    """`reasoning_content` under the name that newer clients read."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    refusal: None = None


class ChatDelta(msgspec.Struct):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    steps: list[Step] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A piece of one chat answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    steps: list[Step] | UnsetType = UNSET


class ChatCompletion(Answer[ChatChoice], kw_only=True):
    """Answer of /v1/chat/completions."""

    object: str = "chat.completion"


class ChatChunk(Answer[ChatChunkChoice], kw_only=True):
    """Chunk of /v1/chat/completions."""

    object: str = "chat.completion.chunk"


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than 200, decided on while handling a request."""

    status: int
    message: str
    _: KW_ONLY
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None


def sanitise(message: str) -> str:
    """Takes tracebacks, file paths and memory addresses out of a message and bounds its length."""
    message = _TRACEBACK.sub("internal error", message)
    message = _ADDRESS.sub("<address>", message)
    message = _PATH.sub("<path>", message)
    return cut(message.encode("utf-8", "replace").decode())


def error_bytes(error: ApiError) -> bytes:
    """The JSON body that describes `error`."""
    body = {"message": sanitise(error.message), "type": error.kind}
    return encode({"error": {**body, "param": error.param, "code": error.code}})


ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors in Anthropic's API, by status. Other faults of a request are invalid."""


def anthropic_error_bytes(error: ApiError) -> bytes:
    """The JSON body that describes `error` in the shape of Anthropic's API."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_KINDS.get(error.status, other)
    body: dict[str, object] = {"type": kind, "message": sanitise(error.message)}
    if error.code is not None:
        body["details"] = {"error_code": error.code}
    return encode({"type": "error", "error": body})


def error_response(error: ApiError, as_anthropic: bool = False) -> Response:
    """The HTTP response for `error`."""
    body = anthropic_error_bytes(error) if as_anthropic else error_bytes(error)
    return Response(body, error.status, error.headers, media_type="application/json")


FAILURES = {
    "engine_dead": "The engine ended.",
    "engine_hung": "The engine hung and was ended.",
    "engine_restarting": "The engine is starting again.",
    "engine_late": "The engine has not been heard of for a moment.",
    "text_process_ended": "The process that prepares texts ended; try again.",
}
"""What failed, by the code of the error."""


def to_api_error(exc: Exception) -> ApiError:
    """Maps any exception to an answer; what nobody raised on purpose is logged and becomes 500."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, EngineError):
        logger.error("engine error: %s", exc)
        if exc.code == "text_process_ended":
            return overloaded(FAILURES[exc.code], retry_after_s=1, code=exc.code)
        message = FAILURES.get(exc.code or "", "The engine failed on this request.")
        return ApiError(500, message, kind="server_error", code=exc.code)
    logger.error("unexpected error while serving a request", exc_info=exc)
    return ApiError(500, "Internal server error.", kind="server_error")


def overloaded(
    message: str, *, retry_after_s: int, close: bool = False, code: str | None = None
) -> ApiError:
    """503 with Retry-After."""
    headers = {"retry-after": str(retry_after_s)}
    if close:
        headers["connection"] = "close"
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def not_found() -> ApiError:
    """404."""
    message = "There is no such path: / lists those that there are, and both APIs begin with /v1."
    return ApiError(404, message, kind="not_found_error")
