"""The server as an application of Ray Serve: `serve run openspec.serve.ray_app:build model=...`.

A replica is an actor with one engine process. Ray's proxy passes requests on to the application of
`app.py` as they come, so that streams, errors and headers are the server's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openspec.config import EngineConfig, engine_config, engine_group
from openspec.engine.processes.log import log_to_stderr
from openspec.engine.processes.standby import Standby
from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig
from openspec.serve.generation.context import ServerContext
from openspec.serve.ray_metrics import export
from openspec.serve.server.app import build_app
from openspec.serve.server.run import load, model_names, with_default_max_tokens
from openspec.settings.names import Names, with_revisions
from openspec.settings.setting import Raw, check_ranges, group_of, number
from openspec.settings.setting import build as build_settings

NOT_OF_REPLICAS = frozenset(
    {"host", "port", "uds", "request_timeout_s", "drain_grace_s", "restart_engine", "replicas"}
    | {"min_replicas", "devices"}
)
"""Settings of the server whose matter is Ray's: connections, how many engines and where."""
RECONFIGURABLE = frozenset(
    {"api_key", "admin_api_key", "allowed_origins", "access_log", "pages", "default_max_tokens"}
    | {"max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes"}
)
"""Settings of the server that `user_config` may change while it runs."""

ENDING_S = 1.0
"""For answers to be written when Ray has waited for requests long enough."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """How Ray Serve runs the replicas. `deployments` in a config file of Serve wins over these."""

    num_replicas: int = number(1, 0, 1 << 16)
    """Replicas, each with an engine."""
    min_replicas: int = number(1, 0, 1 << 16)
    """With max_replicas: as few as that, when little is asked."""
    max_replicas: int | None = number(None, 1, 1 << 16)
    """Switches autoscaling by queue length on: so many replicas at most."""
    target_ongoing_requests: float | None = number(None, 0.01, 1e6)
    """Requests of a replica, running or waiting, that autoscaling aims at. Default:
    max_num_seqs."""
    max_ongoing_requests: int | None = number(None, 1, 1 << 20)
    """Requests of a replica beyond which Ray keeps more for others. Default: twice max_num_seqs."""
    num_gpus: float | None = number(None, 0, 1024)
    """GPUs of a replica. Default: tensor_parallel_size, or 0 with device cpu or in a cluster
    without GPUs."""
    num_cpus: float = number(1, 0, 1024)
    """CPUs of a replica. On a CPU its engine has as many threads, unless num_threads says more."""
    health_check_period_s: float = number(10.0, 0.1, 3600)
    """Seconds between looks at an engine."""


def build(args: Mapping[str, Raw]) -> serve.Application:
    """The application. `args` are settings of engine and server by name, and those of `RayConfig`.

    Raises:
        ConfigError: for an unknown name or a value that does not fit.
    """
    engine, server, ray_config = parse(args)
    num_gpus = ray_config.num_gpus
    if num_gpus is None:
        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1
        uses_gpus = engine.device == "cuda" or (engine.device == "auto" and has_gpus)
        num_gpus = engine.tensor_parallel_size if uses_gpus else 0
    if num_gpus == 0 and engine.num_threads is None:
        engine = dataclasses.replace(engine, num_threads=max(1, math.ceil(ray_config.num_cpus)))
    options: dict[str, Any] = {"num_replicas": ray_config.num_replicas}
    if ray_config.max_replicas is not None:
        options = {
            "autoscaling_config": {
                "min_replicas": ray_config.min_replicas,
                "max_replicas": ray_config.max_replicas,
                "target_ongoing_requests": ray_config.target_ongoing_requests
                or engine.max_num_seqs,
            }
        }
    deployment = OpenSpec.options(
        ray_actor_options={"num_cpus": ray_config.num_cpus, "num_gpus": num_gpus},
        max_ongoing_requests=ray_config.max_ongoing_requests or 2 * engine.max_num_seqs,
        health_check_period_s=ray_config.health_check_period_s,
        # What is still running then is cut off; Ray sends nothing new from the start of it.
        graceful_shutdown_timeout_s=server.shutdown_timeout,
        **options,
    )
    application: serve.Application = deployment.bind(engine, server)
    return application


def parse(args: Mapping[str, Raw]) -> tuple[EngineConfig, ServeConfig, RayConfig]:
    """Settings of a replica's engine, of its server and of the deployment.

    Raises:
        ConfigError: for an unknown name or a value that does not fit.
    """
    groups = [group_of("server", ServeConfig, tuple(NOT_OF_REPLICAS)), group_of("ray", RayConfig)]
    names = Names([engine_group(), *groups])
    for key in args:
        name = names.name_of(key)
        if name in NOT_OF_REPLICAS and name not in names:
            raise ConfigError(f"{key}: not of a replica; Ray Serve has options of its own for it")
    values = with_revisions(names.read(args.items()))
    engine = engine_config(values)
    server = build_settings(
        ServeConfig,
        {
            **{name: raw for name, raw in values.items() if name not in NOT_OF_REPLICAS},
            "restart_engine": 0,  # Ray starts another replica
        },
    )
    server.check()
    if engine.drafter_dir is not None:
        raise ConfigError(
            "drafter_dir: a request for another draft head would reach one of Ray's replicas; "
            "drop it, or start servers with python -m openspec.serve"
        )
    ray_config = build_settings(RayConfig, values)
    check_ranges(ray_config)
    if ray_config.max_replicas is not None and ray_config.max_replicas < ray_config.min_replicas:
        raise ConfigError(
            f"max_replicas ({ray_config.max_replicas}) is less than min_replicas "
            f"({ray_config.min_replicas}); raise the one or lower the other"
        )
    num_gpus, num_ranks = ray_config.num_gpus, engine.tensor_parallel_size
    if num_gpus and num_ranks > 1 and num_gpus != num_ranks:
        raise ConfigError(
            f"num_gpus ({num_gpus:g}) of a replica must be its tensor_parallel_size, {num_ranks}; "
            "drop num_gpus"
        )
    return engine, server, ray_config


class Replica:
    """One server without a port: what Ray Serve starts, asks for its health, changes and ends."""

    context: ServerContext
    _export: asyncio.Task[None]

    async def __init__(self, engine: EngineConfig, config: ServeConfig) -> None:  # type: ignore[misc]
        """Loads the model; Ray counts the replica as ready once this is done."""
        log_to_stderr(config.log_level.upper(), "replica")
        folders = await asyncio.to_thread(engine.with_folders)
        names = model_names(engine, folders, config)
        self._own_config = with_default_max_tokens(engine, config)
        context = await load(folders, self._own_config, names, Standby())
        _ingress.app = build_app(context)
        self._export = asyncio.create_task(export(context))
        self.context = context

    async def check_health(self) -> None:
        """Raises while no engine runs: Ray then starts another replica in its place.

        The watchdog has ended an engine that hangs by then.
        """
        self.context.check_alive()

    def reconfigure(self, user_config: Mapping[str, Raw]) -> None:
        """Takes over settings of the server while requests run; others are as at the start.

        Raises:
            ConfigError: for a setting that only a new replica can have, or a value that is wrong.
        """
        self.context.config = reconfigured(self._own_config, user_config)
        _ingress.app = build_app(self.context)

    async def __del__(self) -> None:
        """Ends the engine. Ray has waited for the requests, as long as `shutdown_timeout`."""
        context = self.__dict__.get("context")
        if context is None:  # it did not start
            return
        self._export.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._export
        await context.lifecycle.drain(0.0, ENDING_S)
        context.close()
        await context.engine.close()


def reconfigured(config: ServeConfig, user_config: Mapping[str, Raw]) -> ServeConfig:
    """The settings with those of a `user_config`.

    Raises:
        ConfigError: for a setting that only a new replica can have, or a value that is wrong.
    """
    by_name = {one.name: one for one in group_of("server", ServeConfig).settings}
    values: dict[str, Any] = {}
    for name, raw in user_config.items():
        if name not in RECONFIGURABLE:
            raise ConfigError(
                f"user_config: {name!r} cannot change while a replica runs; it takes "
                f"{', '.join(sorted(RECONFIGURABLE))}"
            )
        values[name] = by_name[name].convert(raw, f"user_config: {name}")
    changed = dataclasses.replace(config, **values)
    changed.check()
    return changed


class _Ingress:
    """What Ray calls: the application of the replica in this process."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "path": scope["path"][len(prefix) :] or "/"}

        async def send_untagged(message: Message) -> None:
            # Ray puts the request's id into the answer, as the server does.
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_untagged)


_ingress = _Ingress()


def _ingress_of_process() -> ASGIApp:
    """Called in the replica's process once it is loaded."""
    from openspec.serve import ray_app  # not the pickled copy of this module

    return ray_app._ingress


OpenSpec = serve.deployment(name="OpenSpec")(serve.ingress(_ingress_of_process)(Replica))
