"""Places for work that waits: the smallest goes first, so that large work holds up little else."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

SMALL = 1 << 16
"""Characters or bytes: tens of milliseconds of work at most."""


class Lanes:
    """Places for large work, and places of its own for small work, which waits for no large one."""

    def __init__(self, num_small: int, num_large: int) -> None:
        self._small, self._large = Turns(num_small), Turns(num_large)

    def of(self, size: int) -> Turns:
        """The places for work of this size."""
        return self._small if size <= SMALL else self._large


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
            if not place.cancelled():  # it came at the same moment
                self.leave()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def leave(self) -> None:
        """Gives a place to the next one."""
        while self._waiting:
            place = heapq.heappop(self._waiting)[2]
            if not place.done():
                place.set_result(None)
                return
        self._num_free += 1
