"""Standby: a process that is ready to become an engine, so that one that died is back sooner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from openspec.engine.processes.child import EngineChild
from openspec.errors import EngineError


class Standby:
    """At most one process, for whichever engine is started next.

    It has imported what an engine needs and waits for its first message. Until then it holds no
    weights, and nothing of a device.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """`command` is that of the engines."""
        self._command = command
        self._starting: asyncio.Task[EngineChild] | None = None
        self._is_closed = False

    def prepare(self) -> None:
        """Starts the process, unless there is one."""
        if self._is_closed or (self._starting is not None and not self._has_failed()):
            return
        self._starting = asyncio.create_task(EngineChild.start(self._command))

    def _has_failed(self) -> bool:
        task = self._starting
        if task is None or not task.done():
            return False
        return task.cancelled() or task.exception() is not None or not task.result().is_running

    async def take(self) -> EngineChild:
        """The process that waits, else a new one; the caller ends it.

        Raises:
            EngineError: the system starts no process.
        """
        starting, self._starting = self._starting, None
        if starting is not None:
            child = await starting
            if child.is_running:
                return child
        return await EngineChild.start(self._command)

    async def close(self) -> None:
        """Ends the process, and starts none again."""
        self._is_closed = True
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(EngineError):
                await (await starting).close()
