"""Supervisor: one engine of a server, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from openspec.engine.processes.client import EngineClient
from openspec.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""After an engine that lived for a moment only; one that worked is replaced at once."""
LONGEST_PAUSE_S = 60.0
"""An engine that lives longer than this counts as one that worked."""


class Supervisor:
    """Owns one engine after the other; a server with several engines has one supervisor for each.

    All methods belong to the event loop of the engine.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[EngineClient]],
        max_restarts: int | None = 0,
        role: str = "the engine",
    ) -> None:
        """`start` makes an engine, after the first at most so many; None: without limit.

        `role` is its name in the log.
        """
        self.engine: EngineClient | None = None
        """The newest, alive or not."""
        self.num_restarts = 0
        """How often an engine ended and another was started, planned ones not counted."""
        self.is_restarting = False
        """Whether another engine is about to take the place of the newest."""
        self.must_start = True
        """Whether a first engine that does not start is an error, and not tried again."""
        self._start, self._max_restarts, self._role = start, max_restarts, role
        self._task: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine."""
        return self.engine is not None and self.engine.is_alive

    async def start(self) -> None:
        """Starts the first engine, and from then on another one when one ends.

        Raises:
            ConfigError: what the engine found wrong with the configuration.
            EngineError: the engine did not start.
        """
        try:
            self.engine = await self._start()
        except (ConfigError, EngineError) as error:
            if self.must_start:
                raise
            self._log_failure(error)
        self._task = asyncio.create_task(self._run(self.engine))

    async def replace(self) -> None:
        """Ends the engine as planned, and starts another.

        Raises:
            ConfigError, EngineError: it did not start; that is tried again like after a failure.
        """
        await self._stop()
        self.is_restarting = True
        started = None
        if self.engine is not None:
            await self.engine.close()
        try:
            self.engine = started = await self._start()
            self.is_restarting = False
        except (ConfigError, EngineError) as error:
            self._log_failure(error)
            raise
        finally:
            self._task = asyncio.create_task(self._run(started))

    async def close(self) -> None:
        """Ends the engine, and starts none again."""
        await self._stop()
        if self.engine is not None:
            await self.engine.close()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, engine: EngineClient | None) -> None:
        pause_s = FIRST_PAUSE_S if engine is None else 0.0
        while True:
            if engine is not None:
                since = time.monotonic()
                await engine.ended()
                await engine.close()
                if time.monotonic() - since > LONGEST_PAUSE_S:
                    pause_s = 0.0
            if self._max_restarts is not None and self.num_restarts >= self._max_restarts:
                self.is_restarting = False
                return
            self.is_restarting = True
            self.num_restarts += 1
            limit = "" if self._max_restarts is None else f" of {self._max_restarts}"
            logger.warning(
                "starting %s again %s, for the %d.%s times",
                self._role,
                f"in {pause_s:g} s" if pause_s > 0 else "at once",
                self.num_restarts,
                limit,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            try:
                self.engine = engine = await self._start()
            except (ConfigError, EngineError) as error:
                engine = None
                self._log_failure(error)
            else:
                self.is_restarting = False

    def _log_failure(self, error: Exception) -> None:
        logger.error("%s did not start: %s", self._role, error)
