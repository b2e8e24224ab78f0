"""One server from start to end: address, engine, HTTP, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvicorn

import openspec
from openspec.checkpoint.folder import split_revision
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig
from openspec.engine.processes.standby import Standby
from openspec.engine.start_phases import Phases
from openspec.errors import ConfigError, EngineError
from openspec.serve.config import ServeConfig
from openspec.serve.generation.context import ServerContext
from openspec.serve.server.app import build_app
from openspec.serve.server.connection import LAST_S, ClientConnection
from openspec.serve.server.engines import start_engines
from openspec.serve.server.listening import address_of, allow_reuse
from openspec.text.pool import TextPool
from openspec.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EMBEDDED_MAX_TOKENS = 1024
CLOSE_CONNECTIONS_S = 2 * LAST_S
"""After which what still answers is cancelled: by then nobody is there to answer."""
END_S = 5.0
"""What open requests get to be answered when no engine is left."""
KEEP_ALIVE_TIMEOUT_S = 30
"""That an idle connection stays open."""
MAX_OPEN_FILES = 65536
MAX_HEAD_BYTES = 64 * 1024
_ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def serve(
    engine_config: EngineConfig,
    folders: EngineConfig,
    config: ServeConfig,
    sock: socket.socket,
    standby: Standby,
    phases: Phases,
) -> None:
    """Serves on a bound socket until a signal ends it.

    `engine_config` has the names that were asked for, `folders` what became of them. `standby`
    makes the processes of the engines. `phases` has what came before.

    Raises:
        ConfigError: what is wrong with the settings or the model.
        EngineError: an engine did not start, or all ended too often to be started again.
    """
    phases.end("imports")
    _raise_file_limit()
    _share_one_arena()
    config = with_default_max_tokens(engine_config, config)
    names = model_names(engine_config, folders, config)
    asyncio.run(_serve(folders, config, names, sock, standby, phases))


def with_default_max_tokens(engine_config: EngineConfig, config: ServeConfig) -> ServeConfig:
    """The settings with a limit for the embedded model, which may not end its answers itself."""
    if engine_config.model is not None or config.default_max_tokens is not None:
        return config
    logger.info(
        "chats that name no limit end after %d tokens; --default-max-tokens changes that",
        EMBEDDED_MAX_TOKENS,
    )
    return dataclasses.replace(config, default_max_tokens=EMBEDDED_MAX_TOKENS)


async def _serve(
    engine_config: EngineConfig,
    config: ServeConfig,
    names: list[str],
    sock: socket.socket,
    standby: Standby,
    phases: Phases,
) -> None:
    signals = _Signals()
    with signals.installed():
        context = await signals.unless_stopped(load(engine_config, config, names, standby))
        if context is None:
            return
        phases.end("tokenizer and engine")
        try:
            await _run(context, sock, signals, phases)
        finally:
            context.close()
            await context.engine.close()


async def load(
    engine_config: EngineConfig, config: ServeConfig, names: list[str], standby: Standby
) -> ServerContext:
    """Starts the engines and reads the tokenizer: what `build_app` needs.

    Raises:
        ConfigError: what is wrong with the settings or the model.
        EngineError: an engine did not start.
    """
    model = ModelConfig.from_folder(engine_config.model_path)
    engine_task = asyncio.create_task(start_engines(engine_config, config, standby))
    try:
        tokenizer = await asyncio.to_thread(read_tokenizer, engine_config.model_path, config)
        if tokenizer.num_tokens > model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.num_tokens} tokens, but the model's vocabulary is "
                f"{model.vocab_size}; take both from the same checkpoint"
            )
        text_pool = TextPool(tokenizer, engine_config.model_path)
        await text_pool.start()
        gc.collect()  # while the engine loads
    except BaseException:
        engine_task.cancel()
        with contextlib.suppress(BaseException):
            await (await engine_task).close()
        raise
    try:
        engine = await engine_task
    except BaseException:
        text_pool.close()
        raise
    return ServerContext(
        config=config,
        engine_config=engine_config,
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        model_names=names,
        text_pool=text_pool,
    )


def read_tokenizer(folder: Path, config: ServeConfig) -> Tokenizer:
    """The model's tokenizer, with the templates and the date that the server is to use.

    Raises:
        ConfigError: a file that cannot be used.
    """
    own_template = None if config.chat_template is None else Path(config.chat_template)
    return Tokenizer.from_folder(folder, own_template, config.template_time)


def model_names(asked: EngineConfig, folders: EngineConfig, config: ServeConfig) -> list[str]:
    """The names that requests may use, the one in answers first."""
    if config.served_model_name:
        return list(config.served_model_name)
    if asked.model is not None and asked.model != folders.model:
        return [split_revision(asked.model)[0]]  # an id of the hub
    names = [folders.model_path.resolve().name]
    if folders.model is not None and folders.model not in names:
        names.append(folders.model)
    return names


def http_server(context: ServerContext) -> HttpServer:
    """The HTTP side of a server; run it with `serve(sockets=[...])`."""
    config = context.config
    limits = {"timeout_s": config.request_timeout_s}
    return HttpServer(
        uvicorn.Config(
            build_app(context),
            loop="none",
            http=type("_Connection", (ClientConnection,), limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=round(CLOSE_CONNECTIONS_S),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


async def _run(
    context: ServerContext, sock: socket.socket, signals: _Signals, phases: Phases
) -> None:
    server = http_server(context)
    address = address_of(sock, context.config)
    server.on_listening = lambda: _log_ready(context, address, phases)
    ending = asyncio.create_task(_end(context, server, signals))
    signals.on_hangup = lambda: context.engine.roll(context.config.shutdown_timeout)
    gc.freeze()
    try:
        await server.serve(sockets=[sock])
    finally:
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending


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


async def _end(context: ServerContext, server: uvicorn.Server, signals: _Signals) -> None:
    """Ends the server at a signal, or once all engines are given up.

    Raises:
        EngineError: the latter.
    """
    signal_came = asyncio.create_task(signals.first.wait())
    given_up = asyncio.create_task(context.engine.given_up())
    try:
        await asyncio.wait({signal_came, given_up}, return_when=asyncio.FIRST_COMPLETED)
        if signal_came.done():
            await _end_on_signal(context, server, signals)
        else:
            await context.lifecycle.drain(0.0, END_S)  # whoever waits is told
            raise EngineError("the engine ended too often, and is not started again")
    finally:
        signal_came.cancel()
        given_up.cancel()
        server.should_exit = True


async def _end_on_signal(context: ServerContext, server: uvicorn.Server, signals: _Signals) -> None:
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


class _Signals:
    """SIGTERM and SIGINT as events, SIGHUP as a call."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_hangup: Callable[[], object] = lambda: logger.warning(
            "SIGHUP: nothing to restart, the server is only starting"
        )
        self._had_terminal = _has_terminal()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catches the signals; SIGHUP not where nohup has it ignored."""
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self._on_signal, signal.SIGINT: self._on_signal}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._on_hangup
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
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
            context.close()
            await context.engine.close()
        return None

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def _on_hangup(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._on_signal()  # it was closed: nobody asks for a restart
        elif not self.first.is_set():
            self.on_hangup()


def _has_terminal() -> bool:
    """Whether there is a terminal whose end also ends this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _log_ready(context: ServerContext, address: str, phases: Phases) -> None:
    phases.end("listen")
    logger.info("start-up: %s", phases)
    # The engine's own lines before this one tell the method and the memory plan.
    logger.info(
        "openspec %s serves %s on %s, ready after %.1f s",
        openspec.__version__,
        " alias ".join(context.model_names),
        address,
        phases.seconds,
    )
    if context.config.host not in ("127.0.0.1", "::1", "localhost") and not context.config.api_key:
        logger.warning("whoever can reach %s can use this server: no API key is set", address)


def _share_one_arena() -> None:
    """Has all threads take memory from one place, so that it goes back after large bodies.

    The C library would give each thread a place of its own, of which a trim frees little.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
