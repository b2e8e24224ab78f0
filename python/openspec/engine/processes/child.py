"""The engine's process as its parent sees it: how it starts, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from openspec.child_process import environment
from openspec.engine.processes.heartbeat import Heartbeat, heartbeat_memory
from openspec.errors import EngineError

ENGINE_COMMAND = (sys.executable, "-m", "openspec.engine.processes.process")
LOOK_S = 0.01
DUMP_S = 0.5
"""What a hung engine gets to write where it hangs."""


class EngineChild:
    """One child process, with this end of its socket and the memory of its heartbeat."""

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, heartbeat: Heartbeat
    ) -> None:
        self.process = process
        self.socket = sock
        self.heartbeat = heartbeat

    @classmethod
    def start(cls, command: Sequence[str]) -> EngineChild:
        """Starts the command, which waits for its first message; see `protocol.Start`.

        Raises:
            EngineError: the system starts no process.
        """
        with contextlib.ExitStack() as on_failure:
            try:
                own_end, child_end = socket.socketpair()
                on_failure.enter_context(own_end)
                with child_end, heartbeat_memory() as memory:
                    fds = (child_end.fileno(), memory)
                    process = subprocess.Popen(
                        [*command, *map(str, fds)],
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        env=environment(),
                    )
                    heartbeat = Heartbeat(memory)
            except OSError as error:
                raise EngineError(f"no process for an engine can be started: {error}") from None
            on_failure.pop_all()
        return cls(process, own_end, heartbeat)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    async def ended(self, patience_s: float) -> str:
        """Waits for its end, and kills it after so long; returns how it ended."""
        deadline = time.monotonic() + patience_s
        while (status := self.process.poll()) is None:
            if time.monotonic() >= deadline:
                self.process.kill()
            await asyncio.sleep(LOOK_S)
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Ends it where it is in nobody's hands yet, and has nothing to finish or to free."""
        self.socket.close()
        self.process.kill()
        self.process.wait()

    async def kill_with_dump(self) -> None:
        """Has it write where it hangs, then kills it."""
        self.process.send_signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_S)
        self.process.kill()
