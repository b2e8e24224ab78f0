"""Supervisor: one engine of a server, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from openspec.engine.client import EngineClient
from openspec.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Supervisor:
    """Owns one engine after the other; a front with several engines has one supervisor for each.

    All methods belong to the event loop of the engine.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        """The newest, alive or not."""
        self.num_restarts = 0
        self.is_restarting = False
        """Whether another engine is about to take the place of the newest."""
        self._task: asyncio.Task[None] | None = None

    def restart_with(self, start: Callable[[], Awaitable[EngineClient]], max_restarts: int) -> None:
        """From here on, `start` makes another engine when one ends, at most so often."""
        self._task = asyncio.create_task(self._run(start, max_restarts))

    async def close(self) -> None:
        """Ends the engine, and starts none again."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.engine.close()

    async def _run(self, start: Callable[[], Awaitable[EngineClient]], max_restarts: int) -> None:
        pause_s = FIRST_PAUSE_S
        while self.num_restarts < max_restarts:
            if not self.is_restarting:
                await self.engine.ended()
                await self.engine.close()
                pause_s = FIRST_PAUSE_S
            self.is_restarting = True
            self.num_restarts += 1
            logger.warning(
                "starting the engine again in %g s, for the %d. of %d times",
                pause_s,
                self.num_restarts,
                max_restarts,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                self.engine = await start()
            except (ConfigError, EngineError) as error:
                logger.error("the engine did not start again: %s", error)
            else:
                self.is_restarting = False
        self.is_restarting = False
