"""Standby: a process that is ready to become an engine, so that it is there sooner."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from openspec.engine.processes.child import ENGINE_COMMAND, EngineChild
from openspec.errors import EngineError


class Standby:
    """At most one process, for whichever engine is started next.

    It has imported what an engine needs and waits for its first message. Until then it holds no
    weights, and nothing of a device.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """`command` is that of the engines."""
        self._command = command
        self._child: EngineChild | None = None
        self._is_closed = False

    def prepare(self) -> None:
        """Starts the process, unless there is one; if the system starts none, `take` says so."""
        if self._is_closed or (self._child is not None and self._child.is_running):
            return
        with contextlib.suppress(EngineError):
            self._child = EngineChild.start(self._command)

    def take(self) -> EngineChild:
        """The process that waits, else a new one; the caller ends it.

        Raises:
            EngineError: the system starts no process.
        """
        child, self._child = self._child, None
        if child is not None and child.is_running:
            return child
        return EngineChild.start(self._command)

    def close(self) -> None:
        """Ends the process, and starts none again."""
        self._is_closed = True
        child, self._child = self._child, None
        if child is not None:
            child.close()
