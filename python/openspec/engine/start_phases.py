"""What the parts of a start take, for one line of the log."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """Parts of a start, one after the other, in seconds."""

    def __init__(self, age_s: float = 0.0) -> None:
        """The first part began `age_s` seconds ago."""
        self._start = self._last = time.monotonic() - age_s
        self._parts: list[str] = []

    @property
    def seconds(self) -> float:
        """What all parts took so far."""
        return self._last - self._start

    def end(self, name: str) -> None:
        """Ends a part; the next one begins."""
        now = time.monotonic()
        self._parts.append(f"{name} {now - self._last:.2f}")
        self._last = now

    def __str__(self) -> str:
        return f"{', '.join(self._parts)}: {self.seconds:.2f} s"


def process_age_s() -> float:
    """Seconds since the system started this process, imports and all."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
