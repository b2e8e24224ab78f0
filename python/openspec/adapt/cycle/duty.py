"""Work beside a server on the same device: when a piece of it may begin."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from openspec.adapt.cycle.server import ServerConfig
from openspec.errors import ConfigError
from openspec.llm import LLM
from openspec.settings.setting import number

logger = logging.getLogger(__name__)

IDLE_S = 0.2
"""A server without requests for so long leaves its device to others."""
ASKED_EVERY_S, ANSWER_HOLDS_S, SAID_AFTER_S = 0.05, 0.01, 30.0
MOST_ASKING = 0.05
"""Of the time while there are requests, where answers are slow."""
BUSY = "the server has requests all the time, or does not answer; --duty 0.2 takes a share of it"


class BusyServerError(ConfigError):
    """There was no time in which a server had no requests."""


@dataclass(frozen=True)
class BesideConfig(ServerConfig):
    """A server on the same device, and what is left to it."""

    duty: float = number(0.0, 0.0, 1.0)
    """Share of its time that this takes while --server has requests; 0: works only without any."""

    def beside(self, llm: LLM, until: float = math.inf) -> Duty:
        """Has steps of `llm` wait for --server from here on; without a share, `until` then."""
        server = self.opened()
        num_requests = (lambda: 0) if server is None else server.num_requests
        duty = Duty(self.duty, num_requests, llm.engine.info.device == "cuda", until)
        if server is not None and self.duty < 1.0:
            llm.around_step = duty.piece
        return duty


class Duty:
    """Pieces of work, one at a time whatever threads there are, and none within another."""

    def __init__(
        self, share: float, num_requests: Callable[[], int], is_cuda: bool = False,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        """Without a share, a piece that still waits at the time `until` is given up."""
        self._num_requests, self._is_cuda, self._lock = num_requests, is_cuda, threading.RLock()
        self._until = math.inf if share else until
        self._next_at = 0.0 if share else math.inf
        self._pause = 1 / share - 1 if share else math.inf  # for each second of work
        self._ask_at, self._busy_at, self._waited = 0.0, time.monotonic(), 0.0
        self._is_busy = False

    def clock(self) -> float:
        """Seconds since some moment, those left out in which a piece waited."""
        return time.monotonic() - self._waited

    @contextmanager
    def piece(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Waits for its turn, or until `check` raises; the device is done with it when it ends."""
        with self._lock:
            self._wait(check)
            begin = time.monotonic()
            try:
                yield
            finally:
                if self._is_cuda:
                    torch.cuda.synchronize()
                end = time.monotonic()
                self._next_at = end + max(end - begin, 1e-9) * self._pause

    def _wait(self, check: Callable[[], None]) -> None:
        begin, now, is_said = time.monotonic(), time.monotonic(), False
        while not (now >= self._next_at or self._is_idle(now)):
            check()
            if now > self._until:
                raise BusyServerError(f"no time is left: {BUSY}")
            if now - begin > SAID_AFTER_S and not is_said:
                logger.info("waiting: %s", BUSY)
                is_said = True
            time.sleep(min(ASKED_EVERY_S, self._next_at - now))
            now = time.monotonic()
        self._waited += now - begin

    def _is_idle(self, now: float) -> bool:
        if now >= self._ask_at:
            self._is_busy, begin = self._num_requests() > 0, now
            now = time.monotonic()
            slow = (now - begin) / MOST_ASKING if self._is_busy else 0.0
            self._ask_at = now + max(ANSWER_HOLDS_S, slow)
        if self._is_busy:
            self._busy_at = now
        return now - self._busy_at >= IDLE_S
