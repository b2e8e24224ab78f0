"""One server from start to end: address, engine, HTTP, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvicorn

import openspec
from openspec.checkpoint.config import ModelConfig
from openspec.config import EngineConfig
from openspec.engine.client import EngineClient
from openspec.errors import ConfigError
from openspec.serve.app import build_app
from openspec.serve.context import Engine, ServerContext
from openspec.serve.http_protocol import MAX_HEAD_BYTES, timed_protocol
from openspec.serve.listening import address_of, allow_reuse, bound_socket
from openspec.serve.serve_config import ServeConfig
from openspec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

StartEngine = Callable[[EngineConfig], Awaitable[Engine]]
CLOSE_CONNECTIONS_S = 1
MAX_OPEN_FILES = 65536


async def serve(
    engine_config: EngineConfig,
    config: ServeConfig,
    start_engine: StartEngine = EngineClient.start,
) -> None:
    """Serves until a signal ends it.

    Raises:
        ConfigError: what is wrong with the settings, the model or the address.
        EngineError: the engine did not start.
    """
    started = time.monotonic()
    _raise_file_limit()
    with bound_socket(config) as sock:
        signals = _Signals()
        with signals.installed():
            context = await signals.unless_stopped(_load(engine_config, config, start_engine))
            if context is None:
                return
            try:
                await _run(context, sock, signals, started)
            finally:
                context.text_pool.close()
                await context.engine.close()


async def _load(
    engine_config: EngineConfig, config: ServeConfig, start_engine: StartEngine
) -> ServerContext:
    model = ModelConfig.from_folder(engine_config.model_path)
    engine_task = asyncio.ensure_future(start_engine(engine_config))
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, engine_config.model_path)
    except BaseException:
        engine_task.cancel()
        with contextlib.suppress(BaseException):
            await (await engine_task).close()
        raise
    engine = await engine_task
    try:
        if tokenizer.num_tokens > model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.num_tokens} tokens, but the model's vocabulary is "
                f"{model.vocab_size}; take both from the same checkpoint"
            )
        return ServerContext(
            config=config,
            engine_config=engine_config,
            engine=engine,
            model=model,
            tokenizer=tokenizer,
            model_names=model_names(engine_config, config),
        )
    except BaseException:
        await engine.close()
        raise


def model_names(engine_config: EngineConfig, config: ServeConfig) -> list[str]:
    """The names that requests may use, the one in answers first."""
    if config.served_model_name:
        return list(config.served_model_name)
    names = [Path(engine_config.model_path).resolve().name]
    if engine_config.model is not None and engine_config.model not in names:
        names.append(engine_config.model)
    return names


def http_server(context: ServerContext) -> HttpServer:
    """The HTTP side of a server; run it with `serve(sockets=[...])`."""
    config = context.config
    return HttpServer(
        uvicorn.Config(
            build_app(context),
            loop="none",
            http=timed_protocol(config.request_timeout_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(config.keep_alive_timeout_s)),
            timeout_graceful_shutdown=CLOSE_CONNECTIONS_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


async def _run(
    context: ServerContext, sock: socket.socket, signals: _Signals, started: float
) -> None:
    server = http_server(context)
    address = address_of(sock, context.config)
    server.on_listening = lambda: _log_ready(context, address, time.monotonic() - started)
    ending = asyncio.create_task(_end_on_signal(context, server, signals))
    gc.collect()
    gc.freeze()
    try:
        await server.serve(sockets=[sock])
    finally:
        ending.cancel()


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    on_listening: Callable[[], None] | None = None
    """Called once connections are accepted."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        for sock in sockets or ():
            allow_reuse(sock, True)
        await super().startup(sockets)
        if self.on_listening is not None:
            self.on_listening()


async def _end_on_signal(context: ServerContext, server: uvicorn.Server, signals: _Signals) -> None:
    await signals.first.wait()
    config, lifecycle = context.config, context.lifecycle
    logger.info("stopping: %d requests in flight", lifecycle.num_jobs)
    drain = asyncio.create_task(lifecycle.drain(config.drain_grace_s, config.shutdown_timeout))
    second = asyncio.create_task(signals.second.wait())
    await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
    second.cancel()
    if not drain.done():
        logger.warning("stopping now: %d requests are cut off", lifecycle.num_jobs)
        drain.cancel()
        lifecycle.is_refusing = True
        lifecycle.end_all()
        await lifecycle.wait_idle(0.5)
        server.force_exit = True
    server.should_exit = True


class _Signals:
    """SIGTERM and SIGINT as events."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catches both signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def unless_stopped(self, work: Awaitable[ServerContext]) -> ServerContext | None:
        """The result of `work`; None if a signal came first, which cancels it."""
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self.first.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            # It may end all the same, where it was about to when it was cancelled.
            context = await task
            context.text_pool.close()
            await context.engine.close()
        return None

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _log_ready(context: ServerContext, address: str, seconds: float) -> None:
    # The engine's own lines before this one tell the method and the memory plan.
    logger.info(
        "openspec %s serves %s on %s, ready after %.1f s",
        openspec.__version__,
        " alias ".join(context.model_names),
        address,
        seconds,
    )
    if context.config.host not in ("127.0.0.1", "::1", "localhost") and not context.config.api_key:
        logger.warning("whoever can reach %s can use this server: no API key is set", address)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
