"""Two lanes in which grammars are compiled: short work first, and nobody waits for who is slow.

The compile process has the vocabulary in memory. It forks a child for each grammar, so that ending
one costs the next nothing. It is one thread that starts, hears and ends its children: it alone
knows their states. All limits are processor time of the child.

* The fast lane gives each newcomer a slice, so small that nobody waits for more than `PROMISED_S`.
* Who needs more begins anew, with a whole slice, and after that in the slow lane, where one at a
  time may use the whole limit. While others wait there the limit is smaller.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from openspec.child_process import FrameSplitter, die_with_owner, frame, limit_memory, processor_s
from openspec.errors import RequestError

SLICE_S = 0.25
FEWEST_S = 0.015
"""Of a newcomer, however many wait."""
PROMISED_S = 1.0
"""What newcomers together may take before the last of them has its turn."""
LEAST_SHARE = 0.1
"""Of the whole limit, in the slow lane, however many wait there."""
MAX_SLOW = 32
"""That wait in the slow lane: who is slow keeps no place of a newcomer's."""
WALL_FACTOR = 20
WALL_GRACE_S = 2.0
"""A child that gets no processor is ended by the clock on the wall, far later."""
MAX_WAIT_S = 1.0

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
"""Ends that a child has brought upon itself; others come from outside."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What became of a request. `alive` is of none: the process says that it runs."""

    number: int
    kind: Literal["done", "refused", "late", "ended", "alive"]
    data: bytes = b""
    num_bytes: int = 0
    """Of `done`: what an engine takes to hold it."""
    message: str = ""
    param: str | None = None
    """The field that a refusal speaks of; None: that of the answer's content."""


Work = Callable[[bytes], tuple[bytes, int]]
"""Compiles a demand; gives the grammar and the bytes that it takes in an engine."""


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    demand: bytes
    came_s: float
    """On the fast lane's clock of processor time."""
    granted_s: float = 0.0
    """What its last attempt had, in vain."""
    num_ends: int = 0
    """Attempts in which the child ended by itself."""


@dataclass(slots=True, eq=False)
class _Attempt:
    job: _Job
    pid: int
    pipe: int
    started_s: float = field(default_factory=time.monotonic)
    reply: bytearray = field(default_factory=bytearray)
    has_crashed: bool = False

    def used_s(self) -> float:
        """Its processor time, or what the clock on the wall leaves of it."""
        wall_s = (time.monotonic() - self.started_s - WALL_GRACE_S) / WALL_FACTOR
        return max(processor_s(self.pid), wall_s)

    def end(self) -> float:
        """Ends the child; returns the processor time that it took."""
        os.close(self.pipe)
        os.kill(self.pid, signal.SIGKILL)  # not waited for yet, so the id is still its own
        _, status, used = os.wait4(self.pid, 0)
        self.has_crashed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES
        return used.ru_utime + used.ru_stime


class Lanes:
    """The requests of one compile process. Belongs to one thread."""

    def __init__(
        self, work: Work, limit_s: float, memory: int, send: Callable[[bytes], None]
    ) -> None:
        """`memory`: bytes that one child may take; `send` gets the replies, encoded."""
        self._work, self._limit_s, self._memory, self._send = work, limit_s, memory, send
        self._fresh: deque[_Job] = deque()
        self._again: deque[_Job] = deque()
        self._slow: deque[_Job] = deque()
        self._in_fast: _Attempt | None = None
        self._in_slow: _Attempt | None = None
        self._spent_s = 0.0  # in the fast lane, by those that have left it
        self._is_slow_next = False

    @property
    def pipes(self) -> list[int]:
        """What `hear` is to be called with once there is something to read."""
        return [attempt.pipe for attempt in self._attempts]

    @property
    def _attempts(self) -> list[_Attempt]:
        return [one for one in (self._in_fast, self._in_slow) if one is not None]

    def take(self, number: int, demand: bytes) -> None:
        """A new request."""
        running_s = self._in_fast.used_s() if self._in_fast else 0.0
        self._fresh.append(_Job(number, demand, self._spent_s + running_s))

    def drop(self, number: int) -> None:
        """Nobody waits for a request any more."""
        for waiting in (self._fresh, self._again, self._slow):
            for job in waiting:
                if job.number == number:
                    waiting.remove(job)
                    return
        for attempt in self._attempts:
            if attempt.job.number == number:
                self._leave(attempt)

    def close(self) -> None:
        """Ends all children."""
        for attempt in self._attempts:
            self._leave(attempt)

    def step(self) -> float | None:
        """Ends who has had its time and starts who may.

        Returns the seconds after which to come back; None: nobody waits.
        """
        waits = []
        if self._in_fast is not None:
            waits.append(self._check_fast(self._in_fast))
        if self._in_slow is not None:
            waits.append(self._check_slow(self._in_slow))
        if self._in_fast is None and (job := self._next_of(self._fresh, self._again)):
            self._in_fast = self._start(job)
            waits.append(0.0)
        if self._in_slow is None and (job := self._next_slow()):
            self._in_slow = self._start(job)
            waits.append(0.0)
        return min(max(min(waits), FEWEST_S / 4), MAX_WAIT_S) if waits else None

    def hear(self, pipe: int) -> None:
        """Reads what a child says; its end brings the reply."""
        for attempt in self._attempts:
            if attempt.pipe == pipe:
                said = os.read(pipe, 1 << 20)
                attempt.reply += said
                if not said:
                    self._hear_end(attempt)

    def _hear_end(self, attempt: _Attempt) -> None:
        job, whole = attempt.job, FrameSplitter().feed(bytes(attempt.reply))
        self._leave(attempt)
        if whole:
            self._send(whole[0])
            return
        job.num_ends += 1
        if job.num_ends == 1:
            self._again.appendleft(job)
        elif attempt.has_crashed:
            self._answer(job, "refused", "compiling it breaks off: make it simpler")
        else:
            self._answer(job, "ended", "the compile process ended")

    def _leave(self, attempt: _Attempt) -> None:
        used_s = attempt.end()
        attempt.job.granted_s = max(attempt.job.granted_s, used_s)
        if attempt is self._in_slow:
            self._in_slow = None
        else:
            self._in_fast = None
            self._spent_s += used_s

    def _check_fast(self, attempt: _Attempt) -> float:
        used_s = attempt.used_s()
        if used_s >= self._limit_s:
            return self._refuse(attempt, self._limit_s)
        if not self._fresh and not self._again:
            return self._limit_s - used_s
        slice_s = self._slice_s()
        if used_s < slice_s:
            return slice_s - used_s
        if self._in_slow is None:
            self._in_fast, self._in_slow = None, attempt
            attempt.job.granted_s = SLICE_S
            self._spent_s += used_s
        else:
            self._put_back(attempt)
        return 0.0

    def _check_slow(self, attempt: _Attempt) -> float:
        used_s, job = attempt.used_s(), attempt.job
        if job.granted_s < SLICE_S:
            if used_s < SLICE_S:
                return SLICE_S - used_s
            if self._again or self._slow:
                self._put_back(attempt)
                return 0.0
            job.granted_s = SLICE_S
        num_waiting = len(self._again) + len(self._slow)
        limit_s = self._limit_s * max(LEAST_SHARE, 1 / (1 + num_waiting))
        return limit_s - used_s if used_s < limit_s else self._refuse(attempt, limit_s)

    def _slice_s(self) -> float:
        """What who is in the fast lane may take, so that those behind it wait as promised."""
        shares = [
            (PROMISED_S - (self._spent_s - job.came_s)) / (place + 1)
            for place, job in enumerate(self._fresh)
        ]
        return min([SLICE_S, max(FEWEST_S, min(shares, default=SLICE_S))])

    def _put_back(self, attempt: _Attempt) -> None:
        job = attempt.job
        if max(job.granted_s, attempt.used_s()) >= SLICE_S and len(self._slow) >= MAX_SLOW:
            self._refuse(attempt, SLICE_S)
            return
        self._leave(attempt)
        (self._again if job.granted_s < SLICE_S else self._slow).append(job)

    def _refuse(self, attempt: _Attempt, limit_s: float) -> float:
        self._leave(attempt)
        crowd = "" if limit_s == self._limit_s else ", the limit while others wait as well"
        message = f"compiling it takes longer than {limit_s:.3g} s of processor time{crowd}"
        self._answer(attempt.job, "late" if crowd else "refused", message)
        return 0.0

    def _answer(self, job: _Job, kind: Literal["refused", "late", "ended"], message: str) -> None:
        self._send(msgspec.msgpack.encode(Reply(job.number, kind, message=message)))

    def _next_slow(self) -> _Job | None:
        """By turns, so that neither kind starves."""
        queues = [self._again, self._slow]
        if self._is_slow_next:
            queues.reverse()
        self._is_slow_next = not self._is_slow_next
        return self._next_of(*queues, self._fresh)

    def _next_of(self, *queues: deque[_Job]) -> _Job | None:
        return next((queue.popleft() for queue in queues if queue), None)

    def _start(self, job: _Job) -> _Attempt | None:
        owner = os.getpid()
        pipe, child_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(pipe)
            os.close(child_end)
            self._answer(job, "ended", "no compile process could be started")
            return None
        if pid == 0:
            try:
                self._be_child(job, owner, child_end)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(child_end)
        return _Attempt(job, pid, pipe)

    def _be_child(self, job: _Job, owner: int, pipe: int) -> None:
        die_with_owner()
        if os.getppid() != owner:
            return
        for stream in (0, 1):  # the owner's ends: it would not see that the process has ended
            os.close(stream)
        with open("/proc/self/statm") as sizes:
            has = int(sizes.read().split()[0]) * resource.getpagesize()
        limit_memory(has + self._memory)
        content = frame(msgspec.msgpack.encode(_reply(self._work, job)))
        with open(pipe, "wb") as stream_out:
            stream_out.write(content)


def _reply(work: Work, job: _Job) -> Reply:
    try:
        data, num_bytes = work(job.demand)
        return Reply(job.number, "done", data, num_bytes)
    except RequestError as error:
        return Reply(job.number, "refused", message=str(error), param=error.param)
    except MemoryError:
        return Reply(job.number, "refused", message="compiling it takes too much memory")
    except RecursionError:
        return Reply(job.number, "refused", message="it is nested too deeply")
