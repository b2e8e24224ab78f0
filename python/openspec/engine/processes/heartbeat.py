"""The heartbeat of the engine's loop: one number in memory that engine process and client share.

The loop writes by when it should beat again, and the client looks how long ago that was. A thread
that beats on its own would go on beating while a kernel hangs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator

ROW_S = {"cpu": 0.25, "cuda": 0.001}
"""What a row of a step may take before a beat is overdue, by device: the largest models need
less."""


class Heartbeat:
    """The time by which the loop should beat again; none before its first beat.

    The clock stands still while the machine is suspended.
    """

    def __init__(self, fd: int) -> None:
        """Shares the memory of this descriptor, which may be closed then."""
        # One aligned word, so that nobody reads half of a beat.
        self._due_ns = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")

    def beat(self, within_s: float = 0.0) -> None:
        """The next beat is due within so many seconds."""
        self._due_ns[0] = time.monotonic_ns() + round(within_s * 1e9)

    @property
    def overdue_s(self) -> float:
        """Seconds since the next beat was due; 0 before that, and before the first beat."""
        due_ns = self._due_ns[0]
        return max(0.0, (time.monotonic_ns() - due_ns) / 1e9) if due_ns > 0 else 0.0


@contextlib.contextmanager
def heartbeat_memory() -> Iterator[int]:
    """A descriptor of memory for one heartbeat."""
    fd = os.memfd_create("openspec-heartbeat")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        yield fd
    finally:
        os.close(fd)
