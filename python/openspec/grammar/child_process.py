"""What an owner and its child processes share: environment, limits, clocks."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


def environment() -> dict[str, str]:
    """The owner's, in which the process finds this package."""
    root = str(Path(__file__).parents[2])
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
