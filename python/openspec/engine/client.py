"""EngineClient: the engine core in a child process, seen from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from openspec.config import EngineConfig
from openspec.engine.protocol import (
    Abort,
    Close,
    Fatal,
    FrameEncoder,
    FrameSplitter,
    Outputs,
    ReadStats,
    Ready,
    Rejected,
    ResetPrefixCache,
    Start,
    StartFailed,
    Stats,
    Submit,
    ToClient,
    ToEngine,
)
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "openspec.engine.process")
CLOSE_TIMEOUT_S = 10.0


class OutputStream(AsyncIterator[EngineOutput]):
    """Outputs of one request, in order; ends after the one with a finish reason.

    Outputs that arrived while nobody read are joined into one. Close it early (`aclose`, or leave
    `async with`) to abort the request within a step.
    """

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._arrived: list[EngineOutput] = []
        self._error: Exception | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    async def __anext__(self) -> EngineOutput:
        while not self._arrived:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        return arrived[0] if len(arrived) == 1 else join_outputs(arrived)

    async def aclose(self) -> None:
        """Aborts the request unless it is finished."""
        if not self._is_over:
            self._client.abort(self._request_id)
            self.end()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def push(self, output: EngineOutput) -> None:
        """Called by the client for every output; nothing, once the stream is closed."""
        if self._is_over:
            return
        self._arrived.append(output)
        if output.finish_reason is not None:
            self._is_over = True
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Called by the client when there will be no more outputs."""
        self._error = error
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join_outputs(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """One output that says what several in a row said."""
    first, last = outputs[0], outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    has_logprobs = any(output.logprobs is not None for output in outputs)
    return EngineOutput(
        request_id=last.request_id,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        num_cached_tokens=last.num_cached_tokens,
        spec_decode=last.spec_decode,
        error=last.error,
    )


class EngineClient:
    """Owns the child process. All methods belong to the event loop that called `start`."""

    def __init__(self) -> None:
        self._encoder = FrameEncoder()
        self._streams: dict[str, OutputStream] = {}
        self._stats_waiters: deque[asyncio.Future[EngineStats]] = deque()
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._info: EngineInfo | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reason: str | None = None
        self._is_alive = False
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        timeout_s: float = 600.0,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> EngineClient:
        """Starts the child and waits until the model is loaded.

        Raises:
            ConfigError: what the child found wrong with the configuration, in one line.
            EngineError: if the child died or did not get ready in time.
        """
        client = cls()
        try:
            await client._start(config, timeout_s, command)
        except BaseException:
            await client.close()
            raise
        return client

    async def _start(self, config: EngineConfig, timeout_s: float, command: Sequence[str]) -> None:
        own_end, child_end = socket.socketpair()
        with child_end:
            package_root = str(Path(__file__).parents[2])
            search_path = os.pathsep.join(
                filter(None, [package_root, os.environ.get("PYTHONPATH")])
            )
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    str(child_end.fileno()),
                    pass_fds=[child_end.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": search_path},
                )
            except BaseException:
                own_end.close()
                raise
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Connection(self), sock=own_end)
        self._is_alive = True
        self._send(Start(config, logging.getLogger().getEffectiveLevel()))
        try:
            self._info = await asyncio.wait_for(self._ready, timeout_s)
        except asyncio.TimeoutError:
            raise EngineError(f"the engine was not ready after {timeout_s:g} s") from None

    @property
    def info(self) -> EngineInfo:
        """What the engine told us when it was ready."""
        if self._info is None:
            raise EngineError("the engine is not ready")
        return self._info

    @property
    def is_alive(self) -> bool:
        """False once the child is gone or being closed."""
        return self._is_alive

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._process is None else self._process.pid

    def submit(self, request: EngineRequest) -> OutputStream:
        """Sends a request at once; iterate the stream for its outputs.

        A request that can never be served ends the iteration with `RequestError`; an engine that
        died ends it with `EngineError`.

        Raises:
            RequestError: if the request id is in use.
            EngineError: if the engine is gone.
        """
        if not self._is_alive:
            raise EngineError(self._reason or "the engine is closed")
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
        self._send(Submit(request))
        stream = OutputStream(self, request.request_id)
        self._streams[request.request_id] = stream
        return stream

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; its stream gets a last output, finish reason "abort"."""
        if self._is_alive and request_id in self._streams:
            self._send(Abort(request_id))

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine core.

        Raises:
            EngineError: if the engine is gone.
        """
        if not self._is_alive:
            raise EngineError(self._reason or "the engine is closed")
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send(ReadStats())
        return await waiter

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, once the engine has got the message.

        Raises:
            EngineError: if the engine is gone.
        """
        if self._is_alive:
            self._send(ResetPrefixCache())
        await self.stats()

    async def close(self) -> None:
        """Ends the child; open streams fail with `EngineError`."""
        self._reason = self._reason or "the engine is closed"
        if self._is_alive:
            self._send(Close())
        self._is_alive = False
        if self._process is not None and self._process.returncode is None:
            try:
                # A child that never got ready has nothing to finish.
                patience_s = CLOSE_TIMEOUT_S if self._info is not None else 0.1
                await asyncio.wait_for(self._process.wait(), patience_s)
            except asyncio.TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._transport is not None:
            self._transport.close()
        self._fail_all()
        if self._burial is not None:
            await self._burial

    # Called by the connection

    def connected(self, transport: asyncio.Transport) -> None:
        """The socket is open."""
        self._transport = transport

    def receive(self, message: ToClient) -> None:
        """Takes one message of the child."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    if output.finish_reason is not None:
                        del self._streams[output.request_id]
                    stream.push(output)
        elif isinstance(message, Rejected):
            stream = self._streams.pop(message.request_id, None)
            if stream is not None:
                stream.end(RequestError(message.message, message.param, message.code))
        elif isinstance(message, Stats):
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_result(message.stats)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, StartFailed):
            self._reason = message.message
            error = ConfigError if message.is_config_error else EngineError
            if not self._ready.done():
                self._ready.set_exception(error(message.message))
        elif isinstance(message, Fatal):
            self._reason = f"the engine failed: {message.message}"

    def disconnected(self) -> None:
        """The child closed its end, or died."""
        was_alive, self._is_alive = self._is_alive, False
        if was_alive:
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        if self._process is not None:
            try:
                status = await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S)
            except asyncio.TimeoutError:
                self._process.kill()
                status = await self._process.wait()
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            if self._reason is None:
                self._reason = f"the engine process died ({how})"
                logger.error("%s", self._reason)
        self._fail_all()

    def _fail_all(self) -> None:
        reason = self._reason or "the engine is closed"
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))
            self._ready.exception()  # retrieved, whether or not somebody waits
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end(EngineError(reason))
        while self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_exception(EngineError(reason))

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._encoder.encode(message))


class _Connection(asyncio.Protocol):
    """Bytes of the socket to messages."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(ToClient)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._client.connected(transport)

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.feed(data):
            self._client.receive(self._decoder.decode(body))

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.disconnected()
