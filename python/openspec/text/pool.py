"""Where the server works on text: threads, and processes that can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from openspec.errors import EngineError, RequestError
from openspec.grammar.child_process import OK, environment, frame
from openspec.text.chat_template import Segment
from openspec.text.tokenizer import Tokenizer
from openspec.text.turns import SMALL, Lanes, Turns
from openspec.text.worker import ENCODE_S, RENDER_S, to_json

T = TypeVar("T")

WORKER_COMMAND = (sys.executable, "-m", "openspec.text.worker")
NUM_THREADS = 2
"""That parse and tokenize large requests, beside one for small ones; as many processes for huge
texts."""
MAX_INLINE_CHARS = 4096
"""Smaller work is done at once: a thread would cost more than it saves."""
MAX_THREAD_CHARS = 1 << 20
"""Larger texts are encoded by a process of their own, which ends with its request."""
LEFT_S = 0.3
"""That a process goes on when its client has left: as long as it takes to start another one."""
MIN_BUSY = 0.04
"""The part of its time in which a process must have worked, or it stood still."""


class TextPool:
    """A few threads, processes for huge texts, and two that render chats, small and large ones.

    More work than that waits, and of what waits the smallest goes first. Belongs to one event loop.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        """`folder` holds the tokenizer's files."""
        self._executor = ThreadPoolExecutor(1 + NUM_THREADS, thread_name_prefix="openspec-text")
        self._threads, self._huge = Lanes(1, NUM_THREADS), Turns(NUM_THREADS)
        self._rendering = Lanes(1, 1)
        self._tokenizer = tokenizer
        self._folder = to_json({"folder": str(folder)})
        templates = tokenizer.chat_templates
        settings = {
            "sources": templates.sources,
            "special_tokens": templates.special_tokens,
            "variables": templates.variables,
            "now": templates.now.isoformat(),
        }
        refusal = ("the chat template takes too long", "messages")
        first = to_json({"templates": settings})
        self._renderer = TextProcess(first, RENDER_S, refusal)
        self._large_renderer = TextProcess(first, RENDER_S, refusal)
        """Started by the first large chat."""
        self._processes = {self._renderer, self._large_renderer}
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Starts the process that renders; without it, the first chat does."""
        if self._tokenizer.has_chat_template:
            await self._renderer.start()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which handles about `size` characters, bytes or tokens.

        Raises:
            EngineError: closed.
        """
        if size <= MAX_INLINE_CHARS:
            return work()
        loop, threads = asyncio.get_running_loop(), self._threads.of(size)

        def leave(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(threads.leave)

        await threads.enter(size)
        try:
            done = self._executor.submit(work)
        except RuntimeError:
            threads.leave()
            raise EngineError("the server has ended", "text_process_ended") from None
        # Of the work, not of who waits for it: a thread goes on when its client has left.
        done.add_done_callback(leave)
        return await asyncio.wrap_future(done)

    async def render(self, request: bytes) -> list[Segment]:
        """The chat of a request: the arguments of `ChatTemplates.render` in JSON.

        Raises:
            RequestError: as there, or it takes too long.
            EngineError: the process ended meanwhile, twice.
        """
        renderer = self._renderer if len(request) <= SMALL else self._large_renderer
        async with self._rendering.of(len(request)).turn(len(request)):
            try:
                reply = await renderer.ask(request)
            finally:
                if not (renderer.is_running or self._is_closed):
                    replacing = asyncio.create_task(renderer.start())
                    self._replacing.add(replacing)
                    replacing.add_done_callback(self._replacing.discard)
        return await self.run(
            len(reply), lambda: [Segment(text, special) for text, special in json.loads(reply)]
        )

    async def encode(self, texts: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Token ids of texts, each in segments; of huge ones in a process of their own.

        Raises:
            RequestError: one of them is not Unicode text, or it takes too long.
            EngineError: the process ended meanwhile, twice.
        """
        size = sum(len(segment.text) for segments in texts for segment in segments)
        if size <= MAX_THREAD_CHARS:
            return await self.run(size, lambda: list(map(self._tokenizer.segment_ids, texts)))
        async with self._huge.turn(size):
            request = await self.run(
                size, lambda: to_json([[(s.text, s.is_special) for s in text] for text in texts])
            )
            process = TextProcess(self._folder, ENCODE_S, ("the text takes too long to encode",))
            self._processes.add(process)
            try:
                reply = await process.ask(request)
            finally:
                process.end()
                self._processes.discard(process)
        return await self.run(len(reply), lambda: _id_lists(reply))

    def close(self) -> None:
        """Drops what waits; running threads are not waited for, processes are ended."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()


def _processor_s(pid: int) -> float:
    """Processor time of a process, in seconds; 0 where it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of the process
    return 0.0


def _id_lists(reply: bytes) -> list[list[int]]:
    numbers, lists = array("I", reply), []
    start = 0
    while start < len(numbers):
        end = start + 1 + numbers[start]
        lists.append(numbers[start + 1 : end].tolist())
        start = end
    return lists


class TextProcess:
    """One `openspec.text.worker`, for one request at a time; replaced where it ended."""

    def __init__(self, first: bytes, limit_s: float, refusal: tuple[str, ...]) -> None:
        """`first` says what it does; `refusal` is the RequestError of what takes too long."""
        self._first, self._limit_s, self._refusal = frame(first), limit_s, refusal
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether the next request finds it."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Starts it where it does not run."""
        async with self._lock:
            await self._started()

    async def ask(self, request: bytes) -> bytes:
        """The process's answer. It is ended soon after nobody waits for the answer any more.

        A request whose process ended, or stood still, is sent to another one, once.

        Raises:
            RequestError: refused, or it takes too long.
            EngineError: the second process ended, too.
        """
        work = asyncio.ensure_future(self._reply_or_again(request))
        # A refusal of what nobody waits for is not to be logged.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            reply = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=LEFT_S)
            raise
        finally:
            work.cancel()
        if not reply:
            raise EngineError("a process that prepares texts ended", "text_process_ended")
        if reply[:1] != OK:
            raise RequestError(*json.loads(reply[1:]))
        return reply[1:]

    async def _reply_or_again(self, request: bytes) -> bytes:
        async with self._lock:
            reply = await self._reply(request)
            return reply if reply or self._is_closed else await self._reply(request)

    async def _reply(self, request: bytes) -> bytes:
        """The reply of one process; empty where it ended, or was ended as it stood still.

        Raises:
            RequestError: it takes too long.
        """
        loop = asyncio.get_running_loop()
        reader, writer = await self._started()
        assert self._process is not None
        pid, is_slow = self._process.pid, False
        started_s = _processor_s(pid)

        def end_late() -> None:
            nonlocal is_slow
            is_slow = _processor_s(pid) - started_s > self._limit_s * MIN_BUSY
            self.end()

        timer = loop.call_later(self._limit_s, end_late)
        reply = b""
        try:
            writer.write(frame(request))
            size = int.from_bytes(await reader.readexactly(4), "little")
            reply = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            if is_slow:
                raise RequestError(*self._refusal) from None
        finally:
            timer.cancel()
            if not reply:
                self.end()
        return reply

    def close(self) -> None:
        """Ends it for good."""
        self._is_closed = True
        self.end()

    def end(self) -> None:
        """Ends it at once."""
        if self._process is not None and self._streams is not None:
            self._process.kill()
            # Freeing its memory may take a while.
            threading.Thread(target=self._process.wait, daemon=True).start()
            self._streams[1].close()
        self._process = self._streams = None

    async def _started(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or not self.is_running:
            self.end()
            own_end, child_end = socket.socketpair()
            with child_end:
                self._process = subprocess.Popen(
                    WORKER_COMMAND,
                    stdin=child_end.fileno(),
                    stdout=child_end.fileno(),
                    env=environment(),
                )
            self._streams = await asyncio.open_connection(sock=own_end, limit=1 << 24)
            self._streams[1].write(self._first)
        return self._streams
