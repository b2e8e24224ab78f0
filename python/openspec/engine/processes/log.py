"""A log on stderr that holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading

MAX_LINES = 4096
FLUSH_S = 1.0


class StderrLog(logging.Handler):
    """Writes in a thread; where stderr is a full pipe that nobody reads, lines wait for it.

    What does not fit into MAX_LINES is dropped, and a line says how many that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._num_dropped = 0
        self._writer = threading.Thread(target=self._write, name="openspec-log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a line."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Waits for the last lines to be written, but not for ever."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._writer.join(FLUSH_S)
        super().close()

    def _write(self) -> None:
        while (text := self._lines.get()) is not None:
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                text += f"\n{num_dropped} lines of the log were dropped: nobody read them"
            line = f"{text}\n".encode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                # Not through sys.stderr, whose lock would hold up the end of the process.
                while line:
                    line = line[os.write(2, line) :]


def open_standard_files() -> None:
    """Opens /dev/null in place of each standard file that is closed.

    Otherwise the next file or socket of the process gets the number 0, 1 or 2, and what is meant
    for the terminal goes there. Comes before anything that stays open.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def log_to_stderr(level: int | str, role: str) -> StderrLog:
    """Sends all logging there; `role` names this process in each line."""
    handler = StderrLog()
    line = f"%(asctime)s %(levelname)s {role}: %(message)s"
    logging.basicConfig(level=level, format=line, handlers=[handler])
    return handler
