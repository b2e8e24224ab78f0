"""Work beside a server: when it may have the device."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from openspec.adapt.cycle.server import ServerConfig
from openspec.settings.setting import number

logger = logging.getLogger(__name__)

IDLE_S = 0.2
"""A server without requests for so long leaves the device to others."""
ASKED_EVERY_S, SAID_AFTER_S, LONGEST_PIECE_S = 0.01, 30.0, 1.0


@dataclass(frozen=True)
class BesideConfig(ServerConfig):
    """A server that this works beside, and what is left to it."""

    duty: float = number(0.0, 0.0, 1.0)
    """Share of the time in which this works while --server has requests; 0: only without any."""

    def beside(self) -> Duty:
        """What each piece of the work waits for."""
        server = self.opened()
        return Duty(1.0, lambda: 0) if server is None else Duty(self.duty, server.num_requests)


class Duty:
    """Turns of work; a piece that has begun ends."""

    def __init__(self, share: float, num_requests: Callable[[], int]) -> None:
        self._share, self._num_requests = share, num_requests
        self._begun_at = self._busy_at = time.monotonic()

    def __call__(self, _: int = 0) -> None:
        """Returns when the next piece may begin. What came since the last one did was work."""
        begin = now = time.monotonic()
        worked, has_said = min(begin - self._begun_at, LONGEST_PIECE_S), False
        while self._share < 1.0:
            if self._num_requests() > 0:
                self._busy_at = now
            if now - self._busy_at >= IDLE_S or self._share * (now - begin + worked) > worked:
                break
            if now - begin > SAID_AFTER_S and not has_said:
                logger.info("the server always has requests; --duty takes a share of its time")
                has_said = True
            time.sleep(ASKED_EVERY_S)
            now = time.monotonic()
        self._begun_at = now
