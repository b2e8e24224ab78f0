"""What processes that answer requests share: frames, limits and the loop that answers.

A frame is its length (4 bytes, little-endian) and its content. The first one on stdin says what to
do. Each after it is a request, answered by a frame on stdout that begins with OK or REFUSED. The
process ends with its input, and by itself where a request takes too long.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OK = b"+"
REFUSED = b"-"
MORE_S = 1.0
"""The owner's clock ends the process sooner; its own one outlives the owner."""


class Refusal(Exception):
    """A request that is answered with REFUSED and this content."""

    def __init__(self, content: bytes) -> None:
        self.content = content


def frame(content: bytes) -> bytes:
    """The content with its length before it."""
    return len(content).to_bytes(4, "little") + content


class Frames:
    """Takes a stream of bytes apart into the contents of its frames."""

    def __init__(self) -> None:
        self._left = bytearray()

    def push(self, received: bytes) -> list[bytes]:
        """The frames that are whole now."""
        self._left += received
        start, found = 0, []
        while (first := start + 4) <= len(self._left):
            end = first + int.from_bytes(self._left[start:first], "little")
            if end > len(self._left):
                break
            found.append(bytes(self._left[first:end]))
            start = end
        del self._left[:start]
        return found


def environment() -> dict[str, str]:
    """The owner's, in which the process finds this package."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def limit_memory(num_bytes: int) -> None:
    """Bounds the process's address space."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def die_first() -> None:
    """Has the system end this process, where memory runs out, before any of the server's."""
    with suppress(OSError):  # a system without it
        Path("/proc/self/oom_score_adj").write_text("1000")


def outlive_signals() -> None:
    """The owner drains first and then ends this process, whatever a terminal sends to all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def serve(begin: Callable[[bytes], tuple[Callable[[bytes], bytes], float]]) -> None:
    """Answers until the input ends.

    `begin` makes of the first frame the function that answers, which may raise `Refusal`, and the
    seconds that one answer may take.
    """
    outlive_signals()
    answer, limit_s = begin(_read())
    while True:
        request = _read()
        signal.setitimer(signal.ITIMER_REAL, limit_s + MORE_S)  # SIGALRM's default ends C++ too
        try:
            reply = OK + answer(request)
        except Refusal as refusal:
            reply = REFUSED + refusal.content
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(frame(reply))
        sys.stdout.buffer.flush()


def _read() -> bytes:
    size = int.from_bytes(sys.stdin.buffer.read(4), "little")
    content = sys.stdin.buffer.read(size)
    if not content or len(content) < size:
        sys.exit()
    return content
