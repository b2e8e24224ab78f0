"""A log on stderr that holds nobody up."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from dataclasses import dataclass, field

MAX_LINES = 4096
FLUSH_S = 1.0
MAX_ALIKE = 10
"""Warnings of one kind that differ, in one second."""


class Repeats(logging.Filter):
    """Lets a warning or an error through once a second: a client could make any number of them.

    The next one of its kind says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        if record.exc_info:
            text += f" {record.exc_info[1]!r}"
        kind = self._kinds.setdefault((record.name, str(record.msg)), _Kind(record.created))
        num_before = 0
        if record.created - kind.since >= 1:
            num_before = kind.num_left_out
            kind.since, kind.num_left_out = record.created, 0
            kind.texts.clear()
        if text in kind.texts or len(kind.texts) == MAX_ALIKE:
            kind.num_left_out += 1
            return False
        kind.texts.add(text)
        if num_before:
            record.msg = f"{record.getMessage()} (and {num_before} more like it)"
            record.args = ()
        return True


@dataclass(slots=True)
class _Kind:
    """Lines of one kind: since when they are counted, those that were written, and the others."""

    since: float
    texts: set[str] = field(default_factory=set)
    num_left_out: int = 0


class StderrLog(logging.Handler):
    """Writes in a thread; where stderr is a full pipe that nobody reads, lines wait for it.

    What does not fit into MAX_LINES is dropped, and a line says how many that were; so are
    `Repeats`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(Repeats())
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
