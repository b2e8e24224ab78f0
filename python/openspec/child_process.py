"""What owners and their child processes share: frames, environment, limits, clocks.

A frame is a 4-byte little-endian length and so many bytes of content.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

from openspec.errors import EngineError

MAX_FRAME_BYTES = 1 << 30
_HEADER_BYTES = 4
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def frame(content: bytes) -> bytes:
    """The content as a frame."""
    return len(content).to_bytes(_HEADER_BYTES, "little") + content


class FrameSplitter:
    """Cuts a byte stream into the contents of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a frame has begun and not ended."""
        return len(self._buffer) > 0

    def feed(self, data: bytes) -> list[bytes]:
        """Contents that are complete with this data.

        Raises:
            EngineError: for a frame of impossible length.
        """
        self._buffer += data
        found: list[bytes] = []
        start = 0
        while (first := start + _HEADER_BYTES) <= len(self._buffer):
            num_bytes = int.from_bytes(self._buffer[start:first], "little")
            if num_bytes > MAX_FRAME_BYTES:
                raise EngineError(f"a frame of {num_bytes} bytes")
            if first + num_bytes > len(self._buffer):
                break
            found.append(bytes(self._buffer[first : first + num_bytes]))
            start = first + num_bytes
        del self._buffer[:start]
        return found


def environment() -> dict[str, str]:
    """The owner's, in which the process finds this package."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def write_all(stream: int, content: bytes) -> None:
    """Writes to a descriptor, however little it takes at a time."""
    left = memoryview(content)
    while left:
        left = left[os.write(stream, left) :]


def processor_s(pid: int) -> float:
    """Processor time of another process, in seconds; 0 where it has ended."""
    with suppress(OSError):
        # include/linux/posix-timers.h says how the clock of a process is named.
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def limit_memory(num_bytes: int) -> None:
    """Bounds the process's address space."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def die_first() -> None:
    """Has the system end this process, where memory runs out, before any of the server's."""
    with suppress(OSError):  # a system without it
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_owner() -> None:
    """Has the system kill this process with the thread that started it, whatever it does then.

    An owner that ended before is seen by the end of the input.
    """
    with suppress(AttributeError):  # a system without it
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def outlive_signals() -> None:
    """The owner drains first and then ends this process, whatever a terminal sends to all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
