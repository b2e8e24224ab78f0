"""Writes records beside a server that never waits for them."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import zlib
from pathlib import Path
from typing import BinaryIO

from openspec.records.shards import (
    SUFFIX,
    Record,
    check_identity,
    encoded,
    erase,
    open_folder,
    shards,
)

logger = logging.getLogger(__name__)

MAX_WAITING = 4096  # records
SHARDS_OF_ALL = 8  # of the bytes that may be kept, a shard takes one part


class Recorder:
    """A queue, and the thread that empties it into shards."""

    def __init__(
        self, folder: Path, identity: str, *, share: float, max_bytes: int, ttl_s: float
    ) -> None:
        """Keeps a `share` of what is offered, at most `max_bytes`, and nothing older than `ttl_s`.

        Raises:
            ConfigError: the folder cannot be used, or has another target's records.
        """
        self._folder = open_folder(folder)
        check_identity(folder, identity)
        self._share, self._max_bytes, self._ttl_s = share, max_bytes, ttl_s
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        self._shard: BinaryIO | None = None
        self._num_shards = 0
        self._is_broken = False
        self._writing = threading.Lock()
        self.is_enabled = True
        """Whether requests that come now are kept."""
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def takes(self, request_id: str) -> bool:
        """Whether a request is of the share that is kept."""
        return self.is_enabled and zlib.crc32(request_id.encode()) < self._share * 2**32

    def offer(self, tokens: list[int], prompt: int, temperature: float) -> bool:
        """Hands a finished text over; returns whether there was room for it."""
        if self._is_broken:
            return False
        try:
            self._waiting.put_nowait(Record(tokens, prompt, int(time.time()), temperature))
        except queue.Full:
            return False
        return True

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        with self._writing:
            return sum(path.stat().st_size for path in shards(self._folder))

    def erase(self) -> int:
        """Removes all that is kept or waits; returns how many files that were."""
        with self._writing:
            with contextlib.suppress(queue.Empty):
                while self._waiting.get_nowait() is not None:
                    pass
                self._waiting.put(None)  # whoever closes waits for it
            if self._shard is not None:
                self._shard.close()
                self._shard = None
            return erase(self._folder)

    def close(self) -> None:
        """Writes what waits."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            if self._is_broken:
                continue
            try:
                with self._writing:
                    self._write(encoded(record))
            except OSError as error:
                self._is_broken = True
                logger.error("%s: %s; nothing more is recorded", self._folder, error.strerror)
        if self._shard is not None:
            self._shard.close()

    def _write(self, data: bytes) -> None:
        shard = self._shard
        is_gone = shard is None or os.fstat(shard.fileno()).st_nlink == 0  # erased by a command
        if shard is None or is_gone or shard.tell() + len(data) > self._max_shard_bytes:
            self._begin_shard()
            self._expire()
        assert self._shard is not None
        self._shard.write(data)
        self._shard.flush()

    @property
    def _max_shard_bytes(self) -> int:
        return self._max_bytes // SHARDS_OF_ALL

    def _begin_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._num_shards}{SUFFIX}"
        self._num_shards += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._shard = os.fdopen(os.open(self._folder / name, flags, 0o600), "wb")

    def _expire(self) -> None:
        """Drops shards that are too old, and the oldest until a new one has room."""
        *older, _ = shards(self._folder)
        sizes = {path: path.stat().st_size for path in older}
        total = sum(sizes.values()) + self._max_shard_bytes
        for path in older:
            is_old = time.time() - path.stat().st_mtime > self._ttl_s
            if is_old or total > self._max_bytes:
                path.unlink()
                total -= sizes[path]
