"""Replica: one engine of a server, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from openspec.engine.processes.client import EngineClient
from openspec.errors import ConfigError, EngineError
from openspec.messages import DrafterState, EngineInfo, EngineStats, total_stats

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
"""After an engine that lived for a moment only; one that worked is replaced at once."""
LONGEST_PAUSE_S = 60.0
"""An engine that lives longer than this counts as one that worked."""
RESTART_WINDOW_S = 600.0
"""In which the restarts of an engine are counted."""
STATS_MAX_AGE_S = 0.1
STATS_TIMEOUT_S = 0.1
LOOK_S = 0.02
END_S = 5.0
"""What aborted sequences may take to end."""
MAX_KEYS = 1 << 17


class SentPrefixes:
    """Prefixes of the prompts that an engine was sent, by page; the longest unused are forgotten.

    It bets on what the engine's prefix cache holds. Being wrong costs a prompt's computation.
    """

    def __init__(self, num_pages: int) -> None:
        """Remembers as many pages as the engine has."""
        self._most = min(num_pages, MAX_KEYS)
        self._keys: OrderedDict[int, bool] = OrderedDict()
        """Whether a page followed in a prompt."""

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[int]) -> int:
        """How many of a prompt's pages are known, from the first one on."""
        for place, key in enumerate(keys):
            if key not in self._keys:
                return place
        return len(keys)

    def is_own(self, keys: Sequence[int]) -> bool:
        """Whether the prompt continues one that was sent, and not only begins like others."""
        num_known = self.num_known(keys)
        return num_known > 0 and not self._keys[keys[num_known - 1]]

    def add(self, keys: Sequence[int]) -> None:
        """Remembers the pages of a prompt that was sent."""
        # The first page last: it is forgotten after those that are of no use without it.
        has_next = False
        for key in reversed(keys[: self._most]):
            self._keys[key] = has_next or self._keys.get(key, False)
            self._keys.move_to_end(key)
            has_next = True
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._keys.clear()


class Replica:
    """One of the engines: who is in its place at the moment, and what it was sent.

    Owns one engine after the other. All methods belong to the event loop of the engine.
    """

    def __init__(
        self,
        index: int,
        start: Callable[[], Awaitable[EngineClient]],
        max_restarts: int = 0,
        role: str = "the engine",
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        """`start` makes an engine, and within `RESTART_WINDOW_S` at most so many in its place.

        When one more ends it is given up, which `on_given_up` is told. With 0 it is never started
        again, and nobody is told. `role` is its name in the log.
        """
        self.index = index
        self._newest: EngineClient | None = None
        """Alive or not."""
        self.num_restarts = 0
        """How often an engine ended and another was started, planned ones not counted."""
        self.is_restarting = False
        """Whether another engine is about to take the place of the newest."""
        self.must_start = True
        """Whether a first engine that does not start is an error, and not tried again."""
        self.is_given_up = False
        """Whether it ended too often to be started again."""
        self.failures: Counter[str] = Counter()
        """How often an engine ended that should not have, by `EngineError.code`."""
        self._start, self._max_restarts, self._role = start, max_restarts, role
        self._on_given_up = on_given_up
        self._restart_times: deque[float] = deque()
        self._task: asyncio.Task[None] | None = None
        self.is_leaving = False
        """Whether it gets no more requests, because it is about to be replaced."""
        self.num_placed = 0
        self.prefixes = SentPrefixes(0)
        self.stats = EngineStats()
        """The last known ones; counters are those of all its engines so far."""
        self._past = EngineStats()
        """Counters of the engines that ended."""
        self.grammars: set[str] | None = None
        """Keys of those it was sent; None: not even the vocabulary."""
        self._stats_time = 0.0
        self._stats_task: asyncio.Task[EngineStats] | None = None

    @property
    def engine(self) -> EngineClient:
        """The newest engine, alive or not.

        Raises:
            EngineError: there was none so far.
        """
        if self._newest is None:
            raise EngineError(f"engine {self.index} has not started", "engine_restarting")
        return self._newest

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._newest is not None and self._newest.is_alive

    @property
    def is_accepting(self) -> bool:
        """Whether it gets requests."""
        return self.is_alive and not self.is_leaving and not self.engine.is_late

    @property
    def pid(self) -> int | None:
        """Process id of its newest engine; None: there was none so far."""
        return None if self._newest is None else self._newest.pid

    @property
    def drafter(self) -> DrafterState | None:
        """The draft head of its newest engine, as it was told last; None: it was not."""
        return None if self._newest is None else self._newest.drafter

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine has not ended yet."""
        return len(self.engine.sequence_ids)

    @property
    def failure(self) -> str | None:
        """Why it gets none, as `EngineError.code` says it."""
        if self.is_accepting:
            return None
        if self.is_restarting or self.is_leaving or self._newest is None:
            return "engine_restarting"
        return "engine_late" if self.is_alive else self.engine.failure

    def begin(self, info: EngineInfo) -> None:
        """Another engine is about to take the place: it knows nothing."""
        self.num_placed = 0
        self.prefixes = SentPrefixes(info.num_pages)
        self.grammars = None
        empty = EngineStats(num_pages=info.num_pages, num_free_pages=info.num_pages)
        self.stats = total_stats([self._past, empty])
        self._stats_time = 0.0

    async def read_stats(self) -> None:
        """Renews `stats` where they are older than a moment, unless the engine is too busy."""
        if not self.is_alive:
            return
        if time.monotonic() - self._stats_time >= STATS_MAX_AGE_S:
            if self._stats_task is None:
                self._stats_task = asyncio.create_task(self.engine.stats())
                self._stats_task.add_done_callback(self._take_stats)
            await asyncio.wait({self._stats_task}, timeout=STATS_TIMEOUT_S)
        # Sequences that the engine has not read yet wait, too.
        self.stats.num_waiting = max(0, self.engine.num_unfinished - self.stats.num_running)

    def _take_stats(self, task: asyncio.Task[EngineStats]) -> None:
        self._stats_task = None
        if not task.cancelled() and task.exception() is None:
            self.stats = total_stats([self._past, task.result()])
            self._stats_time = time.monotonic()

    def _keep_counters(self, last: EngineStats | None) -> None:
        """The engine ended with these statistics, or with those known before; it holds nothing."""
        self._past = msgspec.structs.replace(
            self.stats if last is None else total_stats([self._past, last]),
            **dict.fromkeys(("num_running", "num_waiting", "num_pages", "num_free_pages"), 0),
        )
        self.stats = total_stats([self._past, EngineStats()])

    async def empty(self, patience_s: float) -> None:
        """Waits until it has no sequences; after so long those that are left are aborted."""
        if not await self._is_idle(patience_s) and self.is_alive:
            logger.warning("engine %d: %d sequences are cut off", self.index, self.num_sequences)
            self.engine.abort(*self.engine.sequence_ids)
            await self._is_idle(END_S)

    async def _is_idle(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while self.is_alive and self.num_sequences > 0:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def start(self) -> None:
        """Starts the first engine, and from then on another one when one ends.

        Raises:
            ConfigError: what the engine found wrong with the configuration.
            EngineError: the engine did not start.
        """
        try:
            self._newest = await self._start()
        except (ConfigError, EngineError) as error:
            if self.must_start:
                raise
            self._log_failure(error)
        self._task = asyncio.create_task(self._run(self._newest))

    async def replace(self) -> None:
        """Ends the engine as planned, and starts another.

        Raises:
            ConfigError, EngineError: it did not start; that is tried again like after a failure.
        """
        await self._stop()
        self.is_restarting, self.is_given_up = True, False
        self._restart_times.clear()
        started = None
        if self._newest is not None:
            with contextlib.suppress(EngineError, asyncio.TimeoutError):
                self._keep_counters(await asyncio.wait_for(self._newest.stats(), STATS_TIMEOUT_S))
            await self._newest.close()
        try:
            self._newest = started = await self._start()
            self.is_restarting = False
        except (ConfigError, EngineError) as error:
            self._log_failure(error)
            raise
        finally:
            self._task = asyncio.create_task(self._run(started))

    async def close(self) -> None:
        """Ends the engine, and starts none again."""
        await self._stop()
        if self._newest is not None:
            await self._newest.close()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, engine: EngineClient | None) -> None:
        pause_s = FIRST_PAUSE_S if engine is None else 0.0
        while True:
            if engine is not None:
                since = time.monotonic()
                await engine.ended()
                self.failures[engine.failure] += 1
                self._keep_counters(engine.last_stats)
                await engine.close()
                if time.monotonic() - since > LONGEST_PAUSE_S:
                    pause_s = 0.0
            if not self._may_restart():
                return
            self.is_restarting = True
            self.num_restarts += 1
            logger.warning(
                "starting %s again %s, %d of %d times within %g minutes",
                self._role,
                f"in {pause_s:g} s" if pause_s > 0 else "at once",
                len(self._restart_times),
                self._max_restarts,
                RESTART_WINDOW_S / 60,
            )
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            try:
                self._newest = engine = await self._start()
            except (ConfigError, EngineError) as error:
                engine = None
                self._log_failure(error)
            except Exception:  # whatever it is, it may be gone the next time
                engine = None
                logger.exception("%s did not start", self._role)
            else:
                self.is_restarting = False

    def _may_restart(self) -> bool:
        """Counts one more restart, unless there were too many: then the engine is given up."""
        now = time.monotonic()
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_S:
            self._restart_times.popleft()
        if len(self._restart_times) < self._max_restarts:
            self._restart_times.append(now)
            return True
        self.is_restarting = False
        if self._max_restarts > 0:
            self.is_given_up = True
            logger.error(
                "%s is given up: it was started again %d times within %g minutes",
                self._role,
                self._max_restarts,
                RESTART_WINDOW_S / 60,
            )
            self._on_given_up()
        return False

    def _log_failure(self, error: Exception) -> None:
        logger.error("%s did not start: %s", self._role, error)
