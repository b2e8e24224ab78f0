"""From settings to the engines of a server: how many, where, and what becomes of one that ends."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable

from openspec.config import EngineConfig
from openspec.engine.child import ENGINE_COMMAND
from openspec.engine.client import EngineClient
from openspec.engine.devices import Place, places
from openspec.engine.memory import available_memory
from openspec.engine.replicas import Replicas
from openspec.errors import ConfigError, EngineError
from openspec.serve.config import ServeConfig

logger = logging.getLogger(__name__)


async def start_engines(
    engine_config: EngineConfig,
    config: ServeConfig,
    command: tuple[str, ...] = ENGINE_COMMAND,
) -> Replicas:
    """Starts the engines, and waits for as many as the server must have.

    Raises:
        ConfigError: what is wrong with the settings or the model.
        EngineError: an engine did not start.
    """
    # In a thread, because it may ask nvidia-smi.
    all_places = await asyncio.to_thread(
        places,
        config.num_replicas,
        config.devices,
        os.environ,
        available_memory(),
        may_use_gpus=engine_config.device != "cpu",
    )
    if config.devices is not None:
        engine_config = dataclasses.replace(engine_config, device="cuda")
    if config.min_replicas is not None and config.min_replicas > len(all_places):
        raise ConfigError(
            f"min_replicas ({config.min_replicas}) is more than there are replicas, "
            f"{len(all_places)}; lower it or raise --replicas"
        )
    is_one = len(all_places) == 1
    # Whoever watches a server with one engine starts the server again.
    max_restarts = 0 if config.restart_engine is None and is_one else config.restart_engine
    locks: dict[str | None, asyncio.Lock] = {}

    def starting(place: Place) -> Callable[[], Awaitable[EngineClient]]:
        lock = locks.setdefault(place.device, asyncio.Lock())

        async def start() -> EngineClient:
            # One after the other where they share a device: each measures its steps as it starts.
            async with lock:
                try:
                    return await EngineClient.start(
                        engine_config,
                        command=command,
                        watchdog_s=config.watchdog_timeout,
                        share=place.share,
                        environ=place.environ,
                    )
                except (ConfigError, EngineError) as error:
                    if is_one:
                        raise
                    where = f" on device {place.device}" if place.device is not None else ""
                    raise type(error)(f"engine {place.share.replica}{where}: {error}") from None

        return start

    for place in all_places:
        if place.device is not None:
            logger.info("engine %d: device %s", place.share.replica, place.device)
    engines = Replicas(
        [starting(place) for place in all_places],
        max_restarts,
        caches_prefixes=engine_config.enable_prefix_caching,
    )
    await engines.start(config.min_replicas)
    return engines
