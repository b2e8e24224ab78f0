"""What every handler needs: the engine, the tokenizer, the settings, the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from openspec.checkpoint.config import ModelConfig
from openspec.config import EngineConfig
from openspec.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from openspec.serve.http_errors import ApiError, overloaded
from openspec.serve.lifecycle import Lifecycle
from openspec.serve.serve_config import ServeConfig
from openspec.serve.server_metrics import ServerMetrics
from openspec.serve.text_pool import TextPool
from openspec.text.tokenizer import Tokenizer

STATS_MAX_AGE_S = 0.1
STATS_TIMEOUT_S = 2.0


class OutputStream(Protocol):
    """The part of `engine_client.OutputStream` that the server uses."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...
    async def __anext__(self) -> EngineOutput: ...
    async def aclose(self) -> None:
        """Aborts the request unless it is finished."""


class Engine(Protocol):
    """The part of `EngineClient` that the server uses."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it is gone."""
        ...

    def submit(self, request: EngineRequest, /) -> OutputStream:
        """Sends a request."""
        ...

    def abort(self, request_id: str, /) -> None:
        """Ends a request within a step."""

    async def stats(self) -> EngineStats:
        """Counters and gauges."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forgets cached prefixes."""

    async def close(self) -> None:
        """Ends the engine."""


@dataclass(slots=True)
class ServerContext:
    """One server. Belongs to one event loop."""

    config: ServeConfig
    engine_config: EngineConfig
    engine: Engine
    model: ModelConfig
    tokenizer: Tokenizer
    model_names: list[str]
    """What requests may call the model; answers carry the first."""
    metrics: ServerMetrics = field(init=False)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    text_pool: TextPool = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    num_sequences: int = 0
    """In flight, running or waiting."""
    _stats: EngineStats = field(default_factory=EngineStats)
    _stats_time: float = 0.0
    _stats_task: asyncio.Task[EngineStats] | None = None

    def __post_init__(self) -> None:
        self.model = self.model.with_eos_token(self.tokenizer.eos_token_id)
        self.metrics = ServerMetrics(self.model_name, self.engine.info)
        self.text_pool = TextPool(self.config.num_text_threads)

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    @property
    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.engine.is_alive and not self.lifecycle.is_draining

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not served here.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    def check_capacity(self) -> None:
        """Refuses a request while the queue is full, the engine gone or the server ending.

        Raises:
            ApiError: 503.
        """
        if self.lifecycle.is_ending:
            raise overloaded("The server is shutting down.", retry_after_s=5, close=True)
        if not self.engine.is_alive:
            raise overloaded("The engine is not running.", retry_after_s=10)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self.num_sequences >= self.engine.info.max_num_seqs + limit:
            self.metrics.rejections.add(reason="queue_full")
            raise overloaded("Too many requests are waiting; try again later.", retry_after_s=1)

    async def stats(self) -> EngineStats:
        """The engine's statistics, at most a moment old.

        However many ask, the engine is asked once; while it does not answer, the last known ones.
        """
        if time.monotonic() - self._stats_time < STATS_MAX_AGE_S or not self.engine.is_alive:
            return self._stats
        if self._stats_task is None:
            self._stats_task = asyncio.create_task(self.engine.stats())
            self._stats_task.add_done_callback(self._take_stats)
        await asyncio.wait({self._stats_task}, timeout=STATS_TIMEOUT_S)
        return self._stats

    def _take_stats(self, task: asyncio.Task[EngineStats]) -> None:
        self._stats_task = None
        if not task.cancelled() and task.exception() is None:
            self._stats = task.result()
            self._stats_time = time.monotonic()
            self.metrics.update(self._stats)
