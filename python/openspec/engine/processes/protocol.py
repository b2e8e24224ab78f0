"""What client and engine process say to each other: msgpack frames on a socket pair, no pickle.

All outputs of a step travel in one frame.
"""

from __future__ import annotations

import select
import socket
import time
from typing import TypeAlias

import msgspec

from openspec import child_process
from openspec.config import EngineConfig
from openspec.engine.devices import Share
from openspec.messages import DrafterState, EngineInfo, EngineOutput, EngineRequest, EngineStats

_CHUNK_BYTES = 1 << 18
_encoder = msgspec.msgpack.Encoder()
READ_S = 0.005
"""What reading between two steps may take, so that a flood cannot hold up the steps."""


class Start(msgspec.Struct, tag="start", frozen=True):
    """The first message: load this."""

    config: EngineConfig
    log_level: int
    share: Share = Share()
    environ: dict[str, str] = {}
    """What its environment has of its own."""


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Run a request; its prompt crosses once for all its sequences."""

    request: EngineRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End sequences; if one is unknown, nothing happens."""

    request_ids: list[str]


class ReadStats(msgspec.Struct, tag="read_stats", frozen=True):
    """Send `Stats`."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Forget all cached prefixes."""


class StageDrafter(msgspec.Struct, tag="stage_drafter", frozen=True):
    """Load another draft head beside the one that drafts, while steps run; one at a time."""

    path: str
    sha256: str | None = None


class ExchangeDrafter(msgspec.Struct, tag="exchange_drafter", frozen=True):
    """Have the head that was loaded draft, or with `back` the one that drafted before."""

    back: bool = False
    flush_prefix_cache: bool = False
    weight_version: str | None = None


class SetVocabulary(msgspec.Struct, tag="set_vocabulary", frozen=True):
    """The bytes of each token, before the first grammar; see `_grammar.Vocabulary`."""

    tokens: list[bytes]
    vocab_size: int
    stop_ids: list[int]


class LoadGrammar(msgspec.Struct, tag="load_grammar", frozen=True):
    """What `_grammar.compile_...` returned, for requests that name the key."""

    key: str
    data: bytes


class DropGrammar(msgspec.Struct, tag="drop_grammar", frozen=True):
    """Forget a grammar; requests that have it keep it."""

    key: str


class Close(msgspec.Struct, tag="close", frozen=True):
    """End the process."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The model could not be loaded, and why; one line."""

    message: str
    is_config_error: bool


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """News after a step."""

    outputs: list[EngineOutput]


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """A request that can never be served, by the ids of its sequences."""

    request_ids: list[str]
    message: str
    param: str | None
    code: str | None


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Answer to the oldest unanswered `ReadStats`."""

    stats: EngineStats
    drafter: DrafterState


class DrafterAnswer(msgspec.Struct, tag="drafter_answer", frozen=True):
    """Answer to the oldest unanswered `StageDrafter` or `ExchangeDrafter`."""

    drafter: DrafterState
    refusal: str | None = None
    """Why nothing was done."""
    param: str | None = None
    code: str | None = None


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The engine is broken; the process ends."""

    message: str
    stats: EngineStats | None
    """The last ones, with the failures that broke it; None: it does not know them any more."""


ToEngine: TypeAlias = (
    Start
    | Submit
    | Abort
    | ReadStats
    | ResetPrefixCache
    | StageDrafter
    | ExchangeDrafter
    | SetVocabulary
    | LoadGrammar
    | DropGrammar
    | Close
)
ToClient: TypeAlias = Ready | StartFailed | Outputs | Rejected | Stats | DrafterAnswer | Fatal


def frame(message: ToEngine | ToClient) -> bytes:
    """One message as a frame."""
    return child_process.frame(_encoder.encode(message))


class EngineChannel:
    """The engine's end: blocking sends, receives that block only when asked to."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._splitter = child_process.FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: ToClient) -> None:
        """Sends one message; OSError if the client is gone."""
        self._socket.sendall(frame(message))

    def receive(self, wait_s: float | None = 0.0) -> list[ToEngine]:
        """All messages that are there, as far as `READ_S` allows; waits for a first one.

        The rest of a frame that has begun is on its way, and worth waiting for.

        Raises:
            EOFError: if the client is gone.
        """
        messages: list[ToEngine] = []
        end = time.monotonic() + READ_S
        while True:
            must_wait = wait_s != 0 and not messages
            left_ms = max(0.0, (end - time.monotonic()) * 1000)
            if left_ms == 0 and not must_wait:
                return messages
            wait_ms = None if wait_s is None else wait_s * 1000
            timeout_ms = wait_ms if must_wait else left_ms if self._splitter.has_part else 0
            if not self._poll.poll(timeout_ms):
                return messages
            data = self._socket.recv(_CHUNK_BYTES)
            if not data:
                raise EOFError
            messages += [self._decoder.decode(body) for body in self._splitter.feed(data)]
