"""Writes records beside a server that never waits for them."""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from openspec.records.shards import (
    SUFFIX,
    Record,
    begin_of,
    check_identity,
    encoded,
    erase,
    num_bytes,
    open_folder,
    shards,
    size_of,
)

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # records
MAX_WAITING_BYTES = 8 << 20
BURST_S = 1.0
"""Of `max_rate`, what may come at once."""
SHARDS_OF_ALL = 8  # of the bytes and of the age that may be kept, a shard takes one part


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is kept."""

    share: float
    """Of the requests."""
    max_rate: float
    """Tokens a second, prompts included."""
    max_bytes: int
    ttl_s: float


class Recorder:
    """A queue, and the thread that empties it into shards."""

    def __init__(self, folder: Path, identity: str, limits: Limits) -> None:
        """Keeps what is offered, within the limits.

        Raises:
            ConfigError: the folder cannot be used, or has another target's records.
        """
        self._folder = open_folder(folder)
        check_identity(folder, identity)
        self._limits, self.share = limits, limits.share
        self._waiting: queue.Queue[tuple[int, bytes] | None] = queue.Queue(MAX_WAITING)
        self._num_taken = self._num_erased = 0  # the first ones, of those that were taken
        self._room, self._room_lock = MAX_WAITING_BYTES, threading.Lock()
        self._allowed, self._allowed_at = limits.max_rate * BURST_S, time.monotonic()
        self._shard: BinaryIO | None = None
        self._began = 0.0  # when the shard did, in seconds since 1970
        self._num_shards = 0
        self._is_broken = False
        self._writing = threading.Lock()
        self._ends_at = math.inf
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    @property
    def is_enabled(self) -> bool:
        """Whether requests that come now are kept."""
        return time.monotonic() < self._ends_at

    def enable(self, seconds: float) -> None:
        """Keeps requests that come in the next `seconds`; 0: none."""
        self._ends_at = time.monotonic() + seconds

    def takes(self, request_id: str) -> bool:
        """Whether a request is of the share that is kept."""
        return self.is_enabled and zlib.crc32(request_id.encode()) < self.share * 2**32

    def offer(self, tokens: list[int], prompt: int, temperature: float) -> bool:
        """Takes a finished text over; returns whether there was room. One thread calls it."""
        size = size_of(len(tokens))
        if self._is_broken or self._waiting.full() or size > self._room or not self._is_in_time():
            return False
        with self._room_lock:
            self._room -= size
        self._allowed -= len(tokens)
        self._num_taken += 1
        data = encoded(Record(tokens, prompt, int(time.time()), temperature))
        self._waiting.put((self._num_taken, data))
        return True

    def _is_in_time(self) -> bool:
        """Whether no more tokens came than may; a long text counts against those after it."""
        now, rate = time.monotonic(), self._limits.max_rate
        earned = rate * (now - self._allowed_at)
        self._allowed, self._allowed_at = min(rate * BURST_S, self._allowed + earned), now
        return self._allowed > 0

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        return sum(map(num_bytes, shards(self._folder)))

    def erase(self) -> int:
        """Removes all that is kept or waits; returns how many files that were."""
        with self._writing:
            self._num_erased = self._num_taken
            self._end_shard()
            return erase(self._folder)

    def close(self) -> None:
        """Writes what waits."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._guarded(self._expire)
        while (came := self._next()) is not None:
            number, data = came
            self._guarded(self._write, number, data)
            with self._room_lock:
                self._room += len(data)
        self._end_shard()

    def _next(self) -> tuple[int, bytes] | None:
        """A text and its number, or None at the end; what is too old goes while nothing comes."""
        while True:
            try:
                return self._waiting.get(timeout=self._shard_s)
            except queue.Empty:
                self._guarded(self._end_shard)
                self._guarded(self._expire)

    def _guarded(self, act: Callable[..., None], *given: object) -> None:
        try:
            with self._writing:
                act(*given)
        except OSError as error:
            if not self._is_broken:
                logger.error("%s: %s; nothing more is recorded", self._folder, error.strerror)
            self._is_broken = True

    def _write(self, number: int, data: bytes) -> None:
        if self._is_broken or number <= self._num_erased:
            return
        if self._shard is None or not self._has_room(self._shard, len(data)):
            self._end_shard()
            self._expire()
            self._shard = self._new_shard()
        self._shard.write(data)
        self._shard.flush()

    def _has_room(self, shard: BinaryIO, size: int) -> bool:
        is_gone = os.fstat(shard.fileno()).st_nlink == 0  # erased by a command
        is_old = time.time() - self._began > self._shard_s
        return not (is_gone or is_old) and shard.tell() + size <= self._max_shard_bytes

    @property
    def _max_shard_bytes(self) -> int:
        return self._limits.max_bytes // SHARDS_OF_ALL

    @property
    def _shard_s(self) -> float:
        """Seconds between the first and the last record of a shard, at most."""
        return self._limits.ttl_s / SHARDS_OF_ALL

    def _end_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None

    def _new_shard(self) -> BinaryIO:
        self._began = time.time()
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._num_shards}{SUFFIX}"
        self._num_shards += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        return os.fdopen(os.open(self._folder / name, flags, 0o600), "wb")

    def _expire(self) -> None:
        """Drops shards that would be too old next time, and the oldest so that one more fits."""
        paths = shards(self._folder)
        sizes = [num_bytes(path) for path in paths]
        total = sum(sizes) + self._max_shard_bytes
        oldest = time.time() - self._limits.ttl_s + self._shard_s
        for path, size in zip(paths, sizes, strict=True):
            if begin_of(path) < oldest or total > self._limits.max_bytes:
                path.unlink(missing_ok=True)
                total -= size
