"""EngineClient: the engine core in a child process, seen from asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator

from openspec.config import EngineConfig
from openspec.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats


class OutputStream(AsyncIterator[EngineOutput]):
    """Outputs of one request, in order; ends after the one with a finish reason.

    Outputs that arrived while nobody read are joined into one. Close it early (`aclose`, or leave
    `async with`) to abort the request within a step.
    """

    async def __anext__(self) -> EngineOutput:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Aborts the request unless it is finished."""

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class EngineClient:
    """Owns the child process. All methods belong to the event loop that called `start`."""

    @classmethod
    async def start(cls, config: EngineConfig, timeout_s: float = 600.0) -> EngineClient:
        """Starts the child and waits until the model is loaded.

        Raises:
            ConfigError: what the child found wrong with the configuration, in one line.
            EngineError: if the child died or did not get ready in time.
        """
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What the engine told us when it was ready."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """False once the child is gone or being closed."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> OutputStream:
        """Sends a request at once; iterate the stream for its outputs.

        A request that can never be served ends the iteration with `RequestError`; an engine that
        died ends it with `EngineError`.

        Raises:
            RequestError: if the request id is in use.
            EngineError: if the engine is gone.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; its stream gets a last output, finish reason "abort"."""

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine core."""
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""

    async def close(self) -> None:
        """Ends the child; open streams fail with `EngineError`."""
