"""Compiled grammars of a server or an LLM: made by a process of their own, kept by their demand."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import select
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from openspec.child_process import FrameSplitter, environment, frame, write_all
from openspec.errors import EngineError, RequestError
from openspec.grammar.lanes import Reply
from openspec.grammar.worker import Request, Start

logger = logging.getLogger(__name__)

MAX_WAITING = 96
FORGET_S = 60.0
"""How long it is known that a grammar could not be compiled."""
MAX_REFUSALS = 1024
SILENCE_S = 30.0
"""Of a process that should compile: it says something every second."""
MEMORY_SHARE = 8
"""The part of the free memory that compiling one grammar may take; two compile at a time."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling may take."""

    timeout_s: float
    """Processor time for one grammar."""
    memory: int
    """Bytes that compiling one may take."""
    room: int
    """Bytes of compiled grammars in an engine, all together; one takes a quarter at most."""

    @classmethod
    def within(cls, available: int, room: int, timeout_s: float = 10.0) -> GrammarLimits:
        """Limits where so many bytes of memory are free."""
        return cls(timeout_s, available // MEMORY_SHARE, room)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What the engine loads."""

    key: str
    data: bytes
    num_bytes: int
    """That an engine takes to hold it."""


@dataclass(slots=True)
class _Kept:
    grammar: CompiledGrammar
    num_users: int = 0


class GrammarCompiler:
    """Grammars for one vocabulary. All methods are thread-safe."""

    def __init__(
        self,
        command: Sequence[str],
        tokens: Sequence[bytes],
        vocab_size: int,
        stop_ids: Sequence[int],
        limits: GrammarLimits,
        on_forget: Callable[[str], None] | None = None,
    ) -> None:
        """`command` starts a process of `grammar/worker.py`, which it does with the first grammar.

        `tokens` as `_grammar.Vocabulary` takes them. `on_forget` is told, in any thread, the key of
        each grammar that is kept no longer.
        """
        start = Start(list(tokens), vocab_size, list(stop_ids), limits.timeout_s, limits.memory)
        self._command, self._start = command, frame(msgspec.msgpack.encode(start))
        self._limits, self._on_forget = limits, on_forget or (lambda _: None)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._jobs: dict[int, _Job] = {}
        self._by_key: dict[str, _Job] = {}
        self._num_jobs = 0
        self._refused: OrderedDict[str, tuple[float, _Refused]] = OrderedDict()
        self._process: _Process | None = None
        self._is_closed = False

    def keeps(self, key: str) -> bool:
        """Whether a compiled grammar is in memory."""
        return key in self._kept

    @property
    def num_kept(self) -> int:
        """Compiled grammars in memory."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the compiled grammars in memory, as an engine holds them."""
        return self._num_bytes

    def compile(self, demand: bytes, param: str = "structured_outputs") -> CompiledGrammar:
        """The compiled grammar of a demand; waits for it.

        Raises:
            RequestError: it is refused, or a limit is hit; naming `param`, or a field beside it.
            EngineError: as `submit`, or the process ended (`grammar_process_ended`).
        """
        ticket = self.submit(demand)
        try:
            return ticket.result(param)
        finally:
            ticket.leave()

    def submit(self, demand: bytes) -> Ticket:
        """Begins to compile a demand and does not wait for it.

        Requests for the same demand share one compilation.

        Raises:
            EngineError: too many wait (`grammars_waiting`), or the compiler is closed.
        """
        key = hashlib.blake2b(demand, digest_size=16).hexdigest()
        with self._lock:
            if self._is_closed:
                raise EngineError("the compiler of grammars is closed")
            future: Future[CompiledGrammar] = Future()
            if key in self._kept:
                self._kept.move_to_end(key)
                future.set_result(self._kept[key].grammar)
                return Ticket(future, lambda: None)
            refusal = self._refused.get(key)
            if refusal is not None and time.monotonic() - refusal[0] < FORGET_S:
                future.set_exception(refusal[1])
                return Ticket(future, lambda: None)
            job = self._by_key.get(key)
            if job is None:
                if len(self._jobs) >= MAX_WAITING:
                    raise EngineError("too many grammars wait to be compiled", "grammars_waiting")
                self._num_jobs += 1
                future.set_running_or_notify_cancel()  # nobody else may end it
                job = self._by_key[key] = _Job(key, Request(self._num_jobs, demand), future)
                self._jobs[self._num_jobs] = job
                self._started().send(job.request)
            job.num_waiting += 1
        found = job
        return Ticket(job.future, lambda: self._leave(found))

    def hold(self, grammar: CompiledGrammar) -> None:
        """Keeps a grammar for one more user, until `release`.

        Raises:
            EngineError: those in use leave no room for it (`grammars_full`).
        """
        with self._lock:
            is_kept, forgotten = self._keep(grammar)
            if is_kept:
                self._kept[grammar.key].num_users += 1
        self._tell(forgotten)
        if not is_kept:
            raise EngineError("the grammars in use leave no room for another", "grammars_full")

    def release(self, grammar: CompiledGrammar) -> None:
        """Ends one use of it."""
        with self._lock:
            self._kept[grammar.key].num_users -= 1

    def close(self) -> None:
        """Ends the process; who waits is told."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._by_key.clear()
        if process is not None:
            process.end()
        for job in jobs:
            job.future.set_exception(EngineError("the compiler of grammars is closed"))

    def _forget_job(self, job: _Job) -> None:
        del self._jobs[job.request.number], self._by_key[job.key]

    def _started(self) -> _Process:
        if self._process is None:
            self._process = _Process(
                self._command, self._start, lambda: bool(self._jobs), self._hear, self._restart
            )
        return self._process

    def _leave(self, job: _Job) -> None:
        with self._lock:
            job.num_waiting -= 1
            if job.num_waiting == 0 and self._jobs.get(job.request.number) is job:
                self._forget_job(job)
                if self._process is not None:
                    self._process.send(Request(job.request.number))

    def _keep(self, grammar: CompiledGrammar) -> tuple[bool, list[str]]:
        """Whether it is kept now, and the keys of those that had to go; with the lock held."""
        forgotten: list[str] = []
        if grammar.key in self._kept:
            self._kept.move_to_end(grammar.key)
            return True, forgotten
        unused = [one.grammar for one in self._kept.values() if not one.num_users]
        least = self._num_bytes - sum(one.num_bytes for one in unused)
        if least + grammar.num_bytes > self._limits.room:
            return False, forgotten
        for old in unused:
            if self._num_bytes + grammar.num_bytes <= self._limits.room:
                break
            del self._kept[old.key]
            self._num_bytes -= old.num_bytes
            forgotten.append(old.key)
        self._kept[grammar.key] = _Kept(grammar)
        self._num_bytes += grammar.num_bytes
        return True, forgotten

    def _tell(self, forgotten: Sequence[str]) -> None:
        for key in forgotten:
            self._on_forget(key)

    def _hear(self, reply: Reply) -> None:
        """A reply of the process, in its thread."""
        forgotten: list[str] = []
        with self._lock:
            job = self._jobs.get(reply.number)
            if job is None:
                return  # nobody waits any more
            self._forget_job(job)
            most = self._limits.room // 4
            error: Exception | None = None
            if reply.kind == "ended":
                error = EngineError(reply.message, "grammar_process_ended")
            elif reply.kind != "done":
                error = _Refused(reply.message, reply.param)
            elif reply.num_bytes > most:
                error = _Refused(f"compiled it takes {reply.num_bytes} bytes, more than {most}")
            grammar = CompiledGrammar(job.key, reply.data, reply.num_bytes)
            if error is None:
                _, forgotten = self._keep(grammar)
            elif isinstance(error, _Refused) and reply.kind != "late":
                self._refused[job.key] = (time.monotonic(), error)
                while len(self._refused) > MAX_REFUSALS:
                    self._refused.popitem(last=False)
        self._tell(forgotten)
        if error is None:
            job.future.set_result(grammar)
        else:
            job.future.set_exception(error)

    def _restart(self, process: _Process) -> None:
        """The process ended by itself: what it had is tried once more, in a new one."""
        with self._lock:
            if process is not self._process:
                return
            self._process = None
            failed = [job for job in self._jobs.values() if job.is_second]
            for job in failed:
                self._forget_job(job)
            for job in self._jobs.values():
                job.is_second = True
                self._started().send(job.request)
        logger.warning("the process that compiles grammars ended")
        for job in failed:
            job.future.set_exception(
                EngineError("the compile process ended", "grammar_process_ended")
            )


@dataclass(slots=True, eq=False)
class _Job:
    """A demand that is being compiled, or waits."""

    key: str
    request: Request
    future: Future[CompiledGrammar]
    num_waiting: int = 0
    is_second: bool = False
    """Whether a process has ended with it."""


class _Refused(Exception):
    """Why a grammar cannot be compiled, and the field that says so (None: the content's)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Ticket:
    """One request's wait for a grammar."""

    def __init__(self, future: Future[CompiledGrammar], leave: Callable[[], None]) -> None:
        self.future = future
        self._leave: Callable[[], None] | None = leave

    def result(self, param: str) -> CompiledGrammar:
        """Waits.

        Raises:
            RequestError, EngineError: as `GrammarCompiler.compile`.
        """
        try:
            return self.future.result()
        except _Refused as error:
            field = error.param or param
            raise RequestError(f"{field}: {error}", field) from None

    def leave(self) -> None:
        """The request waits no longer; a compilation for which nobody waits is ended."""
        if self._leave is not None:
            self._leave()
        self._leave = None


class _Process:
    """One `grammar/worker.py`, from its start to its end."""

    def __init__(
        self,
        command: Sequence[str],
        start: bytes,
        is_busy: Callable[[], bool],
        hear: Callable[[Reply], None],
        on_end: Callable[[_Process], None],
    ) -> None:
        """`is_busy`: whether it should say something. The others are called in its threads."""
        self._command, self._is_busy, self._hear, self._on_end = command, is_busy, hear, on_end
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox.put(start)
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        threading.Thread(target=self._run, name="openspec-grammar", daemon=True).start()

    def send(self, request: Request) -> None:
        """Never waits."""
        self._outbox.put(frame(msgspec.msgpack.encode(request)))

    def end(self) -> None:
        """Ends the process at once."""
        self._is_ended = True
        if self._popen is not None:
            self._popen.kill()

    def _run(self) -> None:
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(
                self._command, bufsize=0, stdin=pipe, stdout=pipe, env=environment()
            ) as self._popen:
                writer = threading.Thread(target=self._write, args=(self._popen,), daemon=True)
                writer.start()
                if not self._is_ended:
                    self._read(self._popen)
                self._popen.kill()
                self._outbox.put(None)
                writer.join()
        except OSError:
            logger.exception("the process that compiles grammars could not be started")
        finally:
            self._on_end(self)

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            while (content := self._outbox.get()) is not None:
                write_all(process.stdin.fileno(), content)
        except OSError:
            process.kill()  # the reader sees the end

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        stream, frames, poll = process.stdout.fileno(), FrameSplitter(), select.poll()
        poll.register(stream, select.POLLIN)
        while True:
            if not poll.poll(SILENCE_S * 1000):
                if self._is_busy():
                    return
                continue
            received = os.read(stream, 1 << 20)
            if not received:
                return
            for content in frames.feed(received):
                self._hear(msgspec.msgpack.decode(content, type=Reply))
