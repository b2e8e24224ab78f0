"""Where the server is between start and end, and which requests are in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Protocol

logger = logging.getLogger(__name__)


class Abortable(Protocol):
    """A request that can be told to end within a step."""

    request_id: str
    external_id: str

    def abort(self) -> None:
        """Ends it."""


class Lifecycle:
    """Draining state and the register of running requests."""

    def __init__(self) -> None:
        self.is_draining = False
        """From the first signal on: not ready any more."""
        self.is_refusing = False
        """From the end of the grace period on: new requests get 503."""
        self.is_ending = False
        """From the end of the drain's patience on: not even what came in before may start."""
        self._jobs: dict[str, Abortable] = {}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_jobs(self) -> int:
        """Generation requests in flight."""
        return len(self._jobs)

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Holds up the end of the server, from a request's head until its answer is sent."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def enter(self, job: Abortable) -> None:
        """Registers a request that generates, within its `open_request`."""
        self._jobs[job.request_id] = job

    def leave(self, job: Abortable) -> None:
        """Takes it out."""
        self._jobs.pop(job.request_id, None)

    def abort(self, request_id: str) -> int:
        """Aborts the requests of this id, ours or the client's; returns how many."""
        found = [
            job for job in self._jobs.values() if request_id in (job.request_id, job.external_id)
        ]
        for job in found:
            job.abort()
        return len(found)

    def abort_all(self) -> int:
        """Aborts everything; returns how many requests that were."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.abort()
        return len(jobs)

    def end_all(self) -> int:
        """Aborts everything for good; returns how many requests are open."""
        self.is_ending = True
        self.abort_all()
        return self._num_open

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Waits for the open requests, then ends them."""
        self.is_draining = True
        if grace_s > 0:
            await asyncio.sleep(grace_s)
        self.is_refusing = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("ending %d requests that are still open", self.end_all())
            await self.wait_idle(5.0)

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no request is open, but not for ever."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.error("%d requests did not end", self._num_open)
