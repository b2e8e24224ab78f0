"""EngineClient: the engine core in a child process, seen from asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from openspec.child_process import FrameSplitter
from openspec.config import EngineConfig
from openspec.engine.core.fan_out import sequence_ids
from openspec.engine.devices import Share
from openspec.engine.processes import protocol
from openspec.engine.processes.child import ENGINE_COMMAND, EngineChild
from openspec.engine.processes.output_stream import OutputStream
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.messages import DrafterState, EngineInfo, EngineOutput, EngineRequest, EngineStats

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
END_AT_ONCE_S = 0.1
"""What a child gets that has nothing to finish, or does not answer."""
WATCH_S = 0.5
LATE_S = 3.0
"""What the loop's next beat may be overdue before the engine counts as late."""


@dataclass(slots=True, eq=False)
class _Submission:
    """A request that has not crossed yet."""

    request: EngineRequest
    open_ids: set[str]
    """Its sequences without those that were aborted."""


class EngineClient(asyncio.Protocol):
    """Owns the child process. All methods belong to the event loop that called `start`.

    Submissions cross one by one as the engine reads them, in order of priority, and everything else
    overtakes them.
    """

    def __init__(self) -> None:
        self._splitter = FrameSplitter()
        self._decoder = msgspec.msgpack.Decoder(protocol.ToClient)
        self._streams: dict[str, OutputStream] = {}
        self._unsent: list[_Submission] = []
        self._is_writable = True
        self._stats_waiters: deque[asyncio.Future[EngineStats]] = deque()
        self._drafter_waiter: asyncio.Future[DrafterState] | None = None
        self.drafter: DrafterState | None = None
        """The draft head as it was told last; None: it was not."""
        self._child: EngineChild | None = None
        self._transport: asyncio.Transport | None = None
        self._info: EngineInfo | None = None
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reason: str | None = None
        self._is_alive = False
        self._is_hung = self._is_late = False
        self._last_stats: EngineStats | None = None
        self._watch: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        timeout_s: float = 600.0,
        command: Sequence[str] = ENGINE_COMMAND,
        watchdog_s: float = 0.0,
        share: Share | None = None,
        environ: Mapping[str, str] | None = None,
        child: EngineChild | None = None,
    ) -> EngineClient:
        """Starts the child, unless it is given, and waits until the model is loaded.

        With `watchdog_s`, a child whose loop stands still for so long is ended, a step of many rows
        later; 0: never. `share` is its part of the machine, all by default; `environ` is added to
        its environment.

        Raises:
            ConfigError: what the child found wrong with the configuration, in one line.
            EngineError: if the child died or did not get ready in time.
        """
        client, loop = cls(), asyncio.get_running_loop()
        try:
            client._child = child = child or EngineChild.start(command)
            await loop.create_connection(lambda: client, sock=child.socket)
            client._is_alive = True
            log_level = logging.getLogger().getEffectiveLevel()
            share = share or Share()
            client._send(protocol.Start(config, log_level, share, dict(environ or {})))
            try:
                client._info = await asyncio.wait_for(client._ready, timeout_s)
            except asyncio.TimeoutError:
                raise EngineError(f"the engine was not ready after {timeout_s:g} s") from None
        except BaseException:
            await client.close()
            raise
        client._watch = loop.create_task(client._end_if_hung(child, watchdog_s or math.inf))
        return client

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
    def is_late(self) -> bool:
        """Whether its loop has not been heard of for a while: it may hang, or go on in a moment."""
        return self._is_late

    @property
    def failure(self) -> str:
        """How it ended, as `EngineError.code` says it."""
        return "engine_hung" if self._is_hung else "engine_dead"

    @property
    def last_stats(self) -> EngineStats | None:
        """What an engine that failed counted until then; None: it could not tell."""
        return self._last_stats

    async def ended(self) -> None:
        """Returns once the child is gone, unless it was closed."""
        await self._ended.wait()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.process.pid

    @property
    def num_unfinished(self) -> int:
        """Sequences whose streams wait for outputs, whether or not the engine knows them."""
        return sum(one in stream.open_ids for one, stream in self._streams.items())

    @property
    def sequence_ids(self) -> Collection[str]:
        """Sequences without a last output, also those whose streams are closed."""
        return self._streams.keys()

    def submit(self, *requests: EngineRequest, stream: OutputStream | None = None) -> OutputStream:
        """Sends requests; iterate the stream for the outputs of all their sequences.

        A `stream` that is given has other engines' sequences as well.

        A request that can never be served ends the iteration with `RequestError`; an engine that
        died ends it with `EngineError`.

        Raises:
            RequestError: if a request id is in use.
            EngineError: if the engine is gone.
        """
        if not self._is_alive:
            raise EngineError(self._reason or "the engine is closed")
        submissions = [_Submission(request, set(sequence_ids(request))) for request in requests]
        request_ids = [one for submission in submissions for one in submission.open_ids]
        for request_id in request_ids:
            if request_id in self._streams:
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
        if stream is None:
            stream = OutputStream(self.abort, request_ids)
        self._streams.update(dict.fromkeys(request_ids, stream))
        for submission in submissions:
            insort(self._unsent, submission, key=lambda one: one.request.priority)
        self._send_unsent()
        return stream

    def abort(self, *request_ids: str) -> None:
        """Ends sequences within a step; each gets a last output, finish reason "abort".

        What has not crossed ends at once, and never does.
        """
        unsent = {one: submission for submission in self._unsent for one in submission.open_ids}
        crossed = []
        for request_id in request_ids:
            if request_id in unsent:
                unsent[request_id].open_ids.remove(request_id)
                stream = self._streams.pop(request_id)
                stream.push(EngineOutput(request_id=request_id, finish_reason="abort"))
            elif request_id in self._streams:
                crossed.append(request_id)
        self._unsent = [submission for submission in self._unsent if submission.open_ids]
        if crossed and self._is_alive:
            self._send(protocol.Abort(crossed))

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine core.

        Raises:
            EngineError: if the engine is gone.
        """
        if not self._is_alive:
            raise EngineError(self._reason or "the engine is closed")
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send(protocol.ReadStats())
        return await waiter

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, once the engine has got the message.

        Raises:
            EngineError: if the engine is gone.
        """
        if self._is_alive:
            self._send(protocol.ResetPrefixCache())
        await self.stats()

    async def stage_drafter(self, path: str, sha256: str | None = None) -> DrafterState:
        """Loads another draft head beside the one that drafts, while steps run.

        Raises:
            RequestError: it is not taken; nothing has changed.
            EngineError: if the engine is gone.
        """
        return await self._ask_drafter(protocol.StageDrafter(path, sha256))

    async def exchange_drafter(
        self,
        *,
        back: bool = False,
        flush_prefix_cache: bool = False,
        weight_version: str | None = None,
    ) -> DrafterState:
        """Has the head that was loaded draft, or with `back` the one that drafted before.

        Raises:
            RequestError: there is none.
            EngineError: if the engine is gone.
        """
        message = protocol.ExchangeDrafter(back, flush_prefix_cache, weight_version)
        return await self._ask_drafter(message)

    async def _ask_drafter(
        self, message: protocol.StageDrafter | protocol.ExchangeDrafter
    ) -> DrafterState:
        if not self._is_alive:
            raise EngineError(self._reason or "the engine is closed")
        if self._drafter_waiter is not None:
            raise RequestError("another head is being loaded; try again later", code="drafter_busy")
        waiter: asyncio.Future[DrafterState] = asyncio.get_running_loop().create_future()
        self._drafter_waiter = waiter
        self._send(message)
        return await waiter

    def set_vocabulary(self, tokens: list[bytes], vocab_size: int, stop_ids: list[int]) -> None:
        """The bytes of each token, once, before the first grammar."""
        self._send(protocol.SetVocabulary(tokens, vocab_size, stop_ids))

    def load_grammar(self, key: str, data: bytes) -> None:
        """What `_grammar.compile_...` returned, for requests submitted from here on."""
        self._send(protocol.LoadGrammar(key, data))

    def drop_grammar(self, key: str) -> None:
        """Forgets a grammar; requests that crossed keep it."""
        self._send(protocol.DropGrammar(key))

    async def close(self) -> None:
        """Ends the child; open streams fail with `EngineError`."""
        self._reason = self._reason or "the engine is closed"
        if self._is_alive:
            self._send(protocol.Close())
        self._is_alive = False
        if self._watch is not None:
            self._watch.cancel()
        if self._child is not None and self._child.is_running:
            # A child that never got ready has nothing to finish, and one that hangs never does.
            can_finish = self._info is not None and not (self._is_hung or self._is_late)
            await self._child.ended(CLOSE_TIMEOUT_S if can_finish else END_AT_ONCE_S)
        if self._transport is not None:
            self._transport.close()
        self._fail_all()
        if self._burial is not None:
            await self._burial

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        # Writing is paused while anything that was written has not been sent.
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of another class
        self._transport.set_write_buffer_limits(0)

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        self._is_writable = False

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._is_writable = True
        self._send_unsent()

    def data_received(self, data: bytes) -> None:
        """Takes what the child sent."""
        for body in self._splitter.feed(data):
            self._receive(self._decoder.decode(body))

    def _receive(self, message: protocol.ToClient) -> None:
        if isinstance(message, protocol.Outputs):
            for output in message.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    if output.finish_reason is not None:
                        del self._streams[output.request_id]
                    stream.push(output)
        elif isinstance(message, protocol.Rejected):
            for request_id in message.request_ids:
                if (stream := self._streams.pop(request_id, None)) is not None:
                    stream.end(RequestError(message.message, message.param, message.code))
        elif isinstance(message, protocol.Stats):
            self.drafter = message.drafter
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_result(message.stats)
        elif isinstance(message, protocol.DrafterAnswer):
            self._take_drafter(message)
        elif isinstance(message, protocol.Ready):
            if not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, protocol.StartFailed):
            self._reason = message.message
            error = ConfigError if message.is_config_error else EngineError
            if not self._ready.done():
                self._ready.set_exception(error(message.message))
        elif isinstance(message, protocol.Fatal):
            self._last_stats = message.stats
            self._reason = f"the engine failed: {message.message}"
            self._begin_burial()  # the process may take its time to end

    def _take_drafter(self, message: protocol.DrafterAnswer) -> None:
        self.drafter = message.drafter
        waiter, self._drafter_waiter = self._drafter_waiter, None
        if waiter is None or waiter.done():
            return
        if message.refusal is None:
            waiter.set_result(message.drafter)
        else:
            waiter.set_exception(RequestError(message.refusal, message.param, message.code))

    def connection_lost(self, exc: Exception | None) -> None:
        """The child closed its end, or died."""
        if exc is not None and not isinstance(exc, OSError) and self._is_alive:
            self._reason = f"what the engine says cannot be read: {exc}"
            logger.error("%s", self._reason)
        self._begin_burial()

    async def _end_if_hung(self, child: EngineChild, watchdog_s: float) -> None:
        num_looks = 0
        # Twice in a row: after both processes were stopped, the engine may be about to beat.
        while num_looks < 2:
            await asyncio.sleep(WATCH_S)
            if not self._is_alive:
                return
            overdue_s = child.heartbeat.overdue_s
            num_looks = num_looks + 1 if overdue_s > watchdog_s else 0
            if self._is_late != (is_late := overdue_s > LATE_S):
                self._is_late = is_late
                news = "gets no requests: it is late" if is_late else "is heard of again"
                logger.warning("the engine of process %d %s", child.process.pid, news)
        self._is_alive, self._is_hung = False, True
        self._reason = "the engine hung and was ended: a step took longer than the watchdog allows"
        names = list(self._streams)
        logger.error("%s; %d sequences fail: %s", self._reason, len(names), " ".join(names[:20]))
        self._fail_all()
        await child.kill_with_dump()
        await self._bury()

    def _begin_burial(self) -> None:
        was_alive, self._is_alive = self._is_alive, False
        if was_alive:
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    async def _bury(self) -> None:
        if self._reason is not None:
            self._fail_all()
        if self._child is not None:
            how = await self._child.ended(CLOSE_TIMEOUT_S)
            if self._reason is None:
                self._reason = f"the engine process died ({how})"
                logger.error("%s", self._reason)
        self._fail_all()
        self._ended.set()

    def _fail_all(self) -> None:
        reason = self._reason or "the engine is closed"
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))
            self._ready.exception()  # retrieved, whether or not somebody waits
        streams, self._streams = self._streams, {}
        self._unsent.clear()
        for stream in streams.values():
            stream.end(EngineError(reason, self.failure))
        while self._stats_waiters:
            waiter = self._stats_waiters.popleft()
            if not waiter.done():
                waiter.set_exception(EngineError(reason))
        if self._drafter_waiter is not None and not self._drafter_waiter.done():
            self._drafter_waiter.set_exception(EngineError(reason))
        self._drafter_waiter = None

    def _send_unsent(self) -> None:
        while self._unsent and self._is_writable:
            submission = self._unsent.pop(0)
            self._send(protocol.Submit(submission.request))
            if dropped := set(sequence_ids(submission.request)) - submission.open_ids:
                self._send(protocol.Abort(sorted(dropped)))

    def _send(self, message: protocol.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(protocol.frame(message))
