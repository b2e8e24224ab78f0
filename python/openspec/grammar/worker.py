"""A process that compiles grammars and that its owner can end.

    python -m openspec.grammar.worker

A frame is its length (4 bytes, little-endian) and its content. The first one on stdin is a `Start`
in msgpack. Each after it is a grammar's source, answered by a frame on stdout that begins with OK,
then the compiled grammar, or with REFUSED, then the reason. The process ends with its input, and by
itself where a grammar takes too long.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

OK = b"+"
REFUSED = b"-"
MORE_S = 1.0
"""The owner's clock ends the process sooner; its own one outlives the owner."""


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What all grammars are compiled for, and within which limits."""

    tokens: list[bytes]
    vocab_size: int
    stop_ids: list[int]
    limit_s: float
    memory: int
    """Bytes of address space."""


def frame(content: bytes) -> bytes:
    """The content with its length before it."""
    return len(content).to_bytes(4, "little") + content


def main() -> None:
    """Serves until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains, then ends this process
        signal.signal(number, signal.SIG_IGN)
    from openspec import _grammar

    start = msgspec.msgpack.decode(_read(), type=Start)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = start.memory if hard == resource.RLIM_INFINITY else min(start.memory, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    vocabulary = _grammar.Vocabulary(start.tokens, start.vocab_size, start.stop_ids)
    while True:
        source = _read().decode()
        # SIGALRM's default ends C++.
        signal.setitimer(signal.ITIMER_REAL, start.limit_s + MORE_S)
        try:
            reply = OK + _grammar.compile_structural_tag(vocabulary, source)
        except MemoryError:
            reply = REFUSED + b"it takes too much memory"
        except UnicodeDecodeError as error:  # of a message that quotes half a character
            reply = REFUSED + error.object
        except (ValueError, RuntimeError) as error:
            reply = REFUSED + str(error).encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(frame(reply))
        sys.stdout.buffer.flush()


def _read() -> bytes:
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    content = sys.stdin.buffer.read(size)
    if not content or len(content) < size:
        sys.exit()
    return content


if __name__ == "__main__":
    main()
