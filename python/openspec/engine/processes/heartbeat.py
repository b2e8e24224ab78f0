"""The heartbeat of the engine's loop: one number in memory that engine process and client share.

The loop writes by when it will beat again, and the client looks whether it has. A thread that beats
on its own would go on beating while a kernel hangs.
"""

from __future__ import annotations

import mmap
import os
import time

ROW_S = {"cpu": 0.25, "cuda": 0.001}
"""What a row of a step may take beside the limit, by device: the largest models need less."""


class Heartbeat:
    """The time by which the loop beats again; none before its first beat.

    The clock stands still while the machine is suspended.
    """

    def __init__(self, fd: int) -> None:
        """Shares the memory of this descriptor, which may be closed then."""
        self.limit_s = 0.0
        """Until when a beat is good; 0: for ever."""
        # One aligned word, so that nobody reads half of a beat.
        self._due_ns = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("q")

    def beat(self, more_s: float = 0.0) -> None:
        """The next beat comes within the limit and so much more."""
        if self.limit_s > 0:
            self._due_ns[0] = time.monotonic_ns() + round((self.limit_s + more_s) * 1e9)

    @property
    def is_late(self) -> bool:
        """Whether the next beat is overdue."""
        due_ns = self._due_ns[0]
        return 0 < due_ns < time.monotonic_ns()


def heartbeat_memory() -> int:
    """A descriptor of memory for one heartbeat; the caller closes it."""
    fd = os.memfd_create("openspec-heartbeat")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd
