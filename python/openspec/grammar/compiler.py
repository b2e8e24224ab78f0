"""Compiles grammars in processes of their own, and keeps them by the hash of their source."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from openspec.errors import EngineError, RequestError
from openspec.grammar.child_process import OK, environment, frame
from openspec.grammar.worker import Start

WORKER_COMMAND = (sys.executable, "-m", "openspec.grammar.worker")
NUM_PROCESSES = 2
"""So that one grammar that takes its whole time does not hold up all others."""
MAX_WAITING = 64
FORGET_S = 60.0
"""How long it is known that a grammar could not be compiled."""
MAX_REFUSALS = 1024


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling may take."""

    timeout_s: float
    memory: int
    """Bytes of address space of a process that compiles."""
    cache_bytes: int
    """Compiled grammars that are kept, all together; none is larger than a quarter of it."""

    @classmethod
    def within(cls, available: int, timeout_s: float = 10.0) -> GrammarLimits:
        """Limits where so many bytes of memory are free."""
        return cls(timeout_s, max(available // 4, 1 << 30), max(available // 64, 16 << 20))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """What the engine loads."""

    key: str
    data: bytes


class GrammarCompiler:
    """Grammars for one vocabulary. All methods are thread-safe."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        vocab_size: int,
        stop_ids: Sequence[int],
        limits: GrammarLimits,
        on_forget: Callable[[str], None] | None = None,
    ) -> None:
        """`tokens` as `_grammar.Vocabulary` takes them; processes start with the first grammar.

        `on_forget` is told, in any thread, the key of each grammar that is kept no longer.
        """
        start = Start(list(tokens), vocab_size, list(stop_ids), limits.timeout_s, limits.memory)
        self._start, self._limits = frame(msgspec.msgpack.encode(start)), limits
        self._on_forget = on_forget or (lambda _: None)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._waiting: dict[str, _Job] = {}
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._executor = ThreadPoolExecutor(NUM_PROCESSES, thread_name_prefix="openspec-grammar")
        self._local = threading.local()
        self._processes: list[_Process] = []
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
        """Bytes of the compiled grammars in memory."""
        return self._num_bytes

    def compile(self, source: str, param: str = "structured_outputs") -> CompiledGrammar:
        """The compiled grammar of a source (see `source_of`); waits for it.

        Raises:
            RequestError: the library refuses it, or a limit is hit; naming `param`.
            EngineError: too many wait, or the compiler is closed.
        """
        ticket = self.submit(source)
        try:
            return ticket.result(param)
        finally:
            ticket.leave()

    def submit(self, source: str) -> Ticket:
        """Begins to compile a source and does not wait for it.

        Requests for the same source share one compilation.

        Raises:
            EngineError: too many wait, or the compiler is closed.
        """
        key = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
        with self._lock:
            if self._is_closed:
                raise EngineError("the compiler of grammars is closed")
            if key in self._kept:
                self._kept.move_to_end(key)
                future: Future[CompiledGrammar] = Future()
                future.set_result(self._kept[key])
                return Ticket(future, lambda: None)
            refusal = self._refused.get(key)
            if refusal is not None and time.monotonic() - refusal[0] < FORGET_S:
                future = Future()
                future.set_exception(_Refused(refusal[1]))
                return Ticket(future, lambda: None)
            job = self._waiting.get(key)
            if job is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise EngineError("too many grammars wait to be compiled", "grammars_waiting")
                job = self._waiting[key] = _Job()
                job.future = self._executor.submit(self._run, key, source, job)
            job.num_waiting += 1
        found = job
        return Ticket(job.future, lambda: self._leave(key, found))

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.end()

    def _leave(self, key: str, job: _Job) -> None:
        with self._lock:
            job.num_waiting -= 1
            if job.num_waiting or job.future.done():
                return
            self._waiting.pop(key, None)
            if not job.future.cancel() and job.process is not None:
                job.process.end()  # nobody waits for it any more

    def _run(self, key: str, source: str, job: _Job) -> CompiledGrammar:
        process = getattr(self._local, "process", None)
        if process is None:
            process = self._local.process = _Process(self._start, self._limits.timeout_s)
            with self._lock:
                self._processes.append(process)
        job.process = process
        try:
            data = process.ask(source.encode())
            most = self._limits.cache_bytes // 4
            if len(data) > most:
                raise _Refused(f"its compiled form has {len(data)} bytes, more than {most}")
        except _Refused as error:
            with self._lock:
                self._waiting.pop(key, None)
                if job.num_waiting:
                    self._refused[key] = (time.monotonic(), str(error))
                    while len(self._refused) > MAX_REFUSALS:
                        self._refused.popitem(last=False)
            raise
        except BaseException:
            with self._lock:
                self._waiting.pop(key, None)
            raise
        grammar = CompiledGrammar(key, data)
        forgotten = []
        with self._lock:
            self._waiting.pop(key, None)
            self._kept[key] = grammar
            self._num_bytes += len(data)
            while self._num_bytes > self._limits.cache_bytes:
                old, dropped = self._kept.popitem(last=False)
                self._num_bytes -= len(dropped.data)
                forgotten.append(old)
        for old in forgotten:
            self._on_forget(old)
        return grammar


class _Job:
    """A source that is being compiled, or waits."""

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar] = Future()
        self.num_waiting = 0
        self.process: _Process | None = None


class _Refused(Exception):
    """Why a grammar cannot be compiled."""


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
            raise RequestError(f"{param}: the grammar cannot be used: {error}", param) from None

    def leave(self) -> None:
        """The request waits no longer; a compilation for which nobody waits is ended."""
        if self._leave is not None:
            self._leave()
        self._leave = None


class _Process:
    """One `openspec.grammar.worker`, for one grammar at a time; replaced where it ended."""

    def __init__(self, start: bytes, limit_s: float) -> None:
        self._start, self._limit_s = start, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = False

    def ask(self, source: bytes) -> bytes:
        """The compiled grammar.

        Raises:
            _Refused: the library refuses it, or a limit is hit.
        """
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        self._is_late = False
        reply = b""
        timer = threading.Timer(self._limit_s, self._on_time)
        try:
            timer.start()
            process.stdin.write(frame(source))
            process.stdin.flush()
            size = int.from_bytes(process.stdout.read(4), "little")
            reply = process.stdout.read(size)
            if len(reply) < max(size, 1):
                reply = b""
        except (OSError, ValueError):
            reply = b""  # it ended
        finally:
            timer.cancel()
            if not reply:
                self.end()
        if not reply:
            late = f"compiling it takes longer than {self._limit_s:g} s"
            raise _Refused(late if self._is_late else "compiling it takes too much memory")
        if reply[:1] != OK:
            raise _Refused(reply[1:].decode("utf-8", "replace"))
        return reply[1:]

    def _on_time(self) -> None:
        self._is_late = True
        self.end()

    def end(self) -> None:
        """Ends the process at once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            threading.Thread(target=process.wait, daemon=True).start()

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                WORKER_COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # found out by the caller
                process.stdin.write(self._start)
        return process
