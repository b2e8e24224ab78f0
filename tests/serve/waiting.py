"""Waiting for what must happen, however slow or busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Only against waiting for ever: where it matters how long something takes, tests say it."""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
