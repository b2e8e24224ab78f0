"""Places for work that waits: the smallest goes first, so that large work holds up little else."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class Turns:
    """A number of places. Belongs to one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._numbers = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits for a place, and has it within; of those that wait the smallest comes first."""
        await self.enter(size)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, size: int) -> None:
        """Waits for a place, which `leave` gives back."""
        if self._num_free > 0:  # so nobody waits
            self._num_free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, next(self._numbers), place)
        heapq.heappush(self._waiting, entry)
        try:
            await place
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            else:  # it came at the same moment
                self.leave()
            raise

    def leave(self) -> None:
        """Gives a place to the next one."""
        if self._waiting:
            heapq.heappop(self._waiting)[2].set_result(None)
        else:
            self._num_free += 1
