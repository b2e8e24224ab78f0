"""Threads for work on text that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_INLINE_CHARS = 4096
"""Smaller work is done at once: a thread would cost more than it saves."""


class TextPool:
    """A few threads; more work than that waits its turn."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="openspec-text")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which handles about `size` characters, bytes or tokens."""
        if size <= MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drops what waits; what runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)
