"""Where the server is between start and end, and which requests are in its hands."""

from __future__ import annotations

import asyncio
import logging
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
        self._jobs: dict[str, Abortable] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_jobs(self) -> int:
        """Generation requests in flight."""
        return len(self._jobs)

    def enter(self, job: Abortable) -> None:
        """Registers a request."""
        self._jobs[job.request_id] = job
        self._idle.clear()

    def leave(self, job: Abortable) -> None:
        """Takes a request out."""
        self._jobs.pop(job.request_id, None)
        if not self._jobs:
            self._idle.set()

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

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Waits for the running requests, then ends them."""
        self.is_draining = True
        if grace_s > 0:
            await asyncio.sleep(grace_s)
        self.is_refusing = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("ending %d requests that are still running", self.abort_all())
            await self.wait_idle(5.0)

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no request is in flight, but not for ever."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.error("%d requests did not end", self.num_jobs)
