"""From settings to the engines of a server: how many, where, and what becomes of one that ends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os

import msgspec

from openspec.config import EngineConfig
from openspec.engine.devices import Place, places
from openspec.engine.memory import available_memory
from openspec.engine.processes.client import EngineClient
from openspec.engine.processes.replicas import Replicas
from openspec.engine.processes.standby import Standby
from openspec.errors import ConfigError, EngineError
from openspec.messages import StepTime
from openspec.serve.config import ServeConfig

logger = logging.getLogger(__name__)

STANDBY_PAUSE_S = 1.0
"""After the last engine is ready, so that the server is, too, before another process imports."""


class _Device:
    """What the engines on one device have in common.

    The first one measures its steps while no other one works there. Those after it, and whatever
    takes the place of one that ended, start side by side with its times.
    """

    def __init__(self) -> None:
        self.measuring = asyncio.Lock()
        self.step_times: list[StepTime] | None = None


async def start_engines(
    engine_config: EngineConfig, config: ServeConfig, standby: Standby
) -> Replicas:
    """Starts the engines, and waits for as many as the server must have.

    `standby` makes their processes. It is closed with the engines.

    Raises:
        ConfigError: what is wrong with the settings or the model.
        EngineError: an engine did not start.
    """
    # In a thread, because it may ask nvidia-smi.
    all_places = await asyncio.to_thread(
        places,
        config.replicas,
        config.devices,
        os.environ,
        available_memory(),
        may_use_gpus=engine_config.device != "cpu",
        num_ranks=engine_config.tensor_parallel_size,
    )
    if config.devices is not None:
        engine_config = dataclasses.replace(engine_config, device="cuda")
    if config.min_replicas is not None and config.min_replicas > len(all_places):
        raise ConfigError(
            f"min_replicas ({config.min_replicas}) is more than there are replicas, "
            f"{len(all_places)}; lower it or raise --replicas"
        )
    is_one = len(all_places) == 1
    devices: dict[str | None, _Device] = {}
    num_loading = 0
    is_shared = {one.device: one.share.num_on_device > 1 for one in all_places}

    async def start(place: Place) -> EngineClient:
        device = devices.setdefault(place.device, _Device())
        async with device.measuring:
            if device.step_times is None:
                engine = await load(place, None)
                device.step_times = engine.info.step_times
                return engine
        return await load(place, device.step_times)

    async def load(place: Place, step_times: list[StepTime] | None) -> EngineClient:
        nonlocal num_loading
        num_loading += 1
        try:
            child = standby.take()
            if step_times is None and is_shared[place.device]:
                standby.prepare()  # the next engine on this device imports meanwhile
            engine = await EngineClient.start(
                engine_config,
                watchdog_s=config.watchdog_timeout,
                share=msgspec.structs.replace(place.share, step_times=step_times),
                environ=place.environ,
                child=child,
            )
        except (ConfigError, EngineError) as error:
            if is_one:
                raise
            where = f" on device {place.device}" if place.device is not None else ""
            raise type(error)(f"engine {place.share.replica}{where}: {error}") from None
        finally:
            num_loading -= 1
        # Memory that lies idle: a server with one engine has better uses for it.
        if num_loading == 0 and not is_one and config.restart_engine > 0:
            asyncio.get_running_loop().call_later(STANDBY_PAUSE_S, standby.prepare)
        return engine

    for place in all_places:
        if place.device is not None:
            logger.info("engine %d: device %s", place.share.replica, place.device)
    engines = Replicas(
        [functools.partial(start, place) for place in all_places],
        config.restart_engine,
        caches_prefixes=engine_config.enable_prefix_caching,
        standby=standby,
    )
    await engines.start(config.min_replicas)
    return engines
