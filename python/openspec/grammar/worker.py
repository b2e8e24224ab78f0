"""The process that compiles grammars, each in a child that can be ended.

Its first frame (`child_process.py`) is a `Start` in msgpack, each after it a `Request`. A `Reply`
(`lanes.py`) answers, in any order; while requests wait, one comes every second at least. The
process ends with its input. `text/grammars/worker.py` says what is compiled.
"""

from __future__ import annotations

import gc
import os
import select
import time
from collections.abc import Callable

import msgspec

from openspec.grammar.child_process import Frames, die_first, frame, outlive_signals
from openspec.grammar.lanes import MAX_WAIT_S, Lanes, Reply, Work

STDIN, STDOUT = 0, 1
_ALIVE = frame(msgspec.msgpack.encode(Reply(0, "alive")))


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What all grammars are compiled for, and within which limits."""

    tokens: list[bytes]
    vocab_size: int
    stop_ids: list[int]
    limit_s: float
    """Processor time for one grammar."""
    memory: int
    """Bytes that compiling one may take."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A demand by a number of its own; without one, nobody waits for that number any more."""

    number: int
    demand: bytes = b""


def serve(begin: Callable[[Start], Work]) -> None:
    """Answers until the input ends; `begin` loads what compiling takes."""
    outlive_signals()
    die_first()
    frames, contents = Frames(), list[bytes]()
    while not contents:
        received = os.read(STDIN, 1 << 20)
        if not received:
            return
        contents = frames.push(received)
    start = msgspec.msgpack.decode(contents.pop(0), type=Start)
    lanes = Lanes(begin(start), start.limit_s, start.memory, lambda reply: _send(frame(reply)))
    gc.freeze()  # what is shared with the children stays so
    said_s = time.monotonic()
    while True:
        for content in contents:
            request = msgspec.msgpack.decode(content, type=Request)
            if request.demand:
                lanes.take(request.number, request.demand)
            else:
                lanes.drop(request.number)
        wait_s = lanes.step()
        if time.monotonic() - said_s > MAX_WAIT_S:
            _send(_ALIVE)
            said_s = time.monotonic()
        contents = []
        poll = select.poll()
        for stream in (STDIN, *lanes.pipes):
            poll.register(stream, select.POLLIN)
        for stream, _ in poll.poll(None if wait_s is None else wait_s * 1000):
            if stream != STDIN:
                lanes.hear(stream)
            elif received := os.read(STDIN, 1 << 20):
                contents = frames.push(received)
            else:
                lanes.close()
                return


def _send(content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(STDOUT, left) :]
