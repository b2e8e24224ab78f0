"""Draft heads of an engine that take each other's place between two steps."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from openspec.engine.core.executor import Runner
from openspec.errors import RequestError
from openspec.messages import (
    DrafterHead,
    DrafterState,
    EngineStats,
    SpecCounters,
    add_counters,
    counters_since,
)

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""After which a step's thread gets Python back from the one that loads."""


class CheckedHead(NamedTuple):
    """A head that was found to fit."""

    folder: str
    sha256: str
    load: Callable[[], None]
    """Loads it beside the one that drafts, over what was there."""


class HeadReader(Protocol):
    """Where other heads come from."""

    def __call__(self, path: str, sha256: str | None, /) -> CheckedHead:
        """Checks a head without a change to the engine; raises RequestError."""


class _Spare(NamedTuple):
    head: DrafterHead
    is_new: bool
    """Whether it has not drafted yet; else it is the one that drafted before."""


class Drafters:
    """The head that drafts, and the one beside it.

    A head is loaded by a thread of its own while steps run. `exchange` then costs one exchange of
    memory between two steps: nothing waits, steps in flight end with the head that they began with,
    and the other one stays beside it. Pages keep what either wrote: the text does not depend on it.
    """

    def __init__(
        self, runner: Runner, method: str, folder: str = "", reader: HeadReader | None = None
    ) -> None:
        """`folder` has the head of the start. Without `reader` there is no room for another."""
        self._runner, self._reader = runner, reader
        self._state = DrafterState(version=1, folder=folder, method=method, since=time.time())
        self._spare: _Spare | None = None
        self._num_versions = 1
        self._lock = threading.Lock()
        self._load: Future[None] | None = None
        self._counted = self._state.version
        self._mark = SpecCounters()
        self._counters = {self._counted: SpecCounters()}

    @property
    def version(self) -> int:
        """Of the head that drafts."""
        return self._state.version

    @property
    def is_loading(self) -> bool:
        """Whether a head is being loaded, or `take_load` was not told of the end."""
        return self._load is not None

    def begin_load(self, path: str, sha256: str | None = None) -> Future[None]:
        """Loads a head beside the one that drafts; may be called by any thread.

        What is returned raises RequestError where there is no such head: then nothing has changed.

        Raises:
            RequestError: there is no room for heads, or one is being loaded.
        """
        reader = self._reader
        if reader is None:
            raise RequestError(
                "this engine has no room for another draft head: start it with --drafter-dir DIR",
                code="drafter_swap_off",
            )
        with self._lock:
            if self._load is not None and not self._load.done():
                raise RequestError(
                    "another head is being loaded; try again later", code="drafter_busy"
                )
            self._load = load = Future[None]()
        arguments = (load, reader, path, sha256)
        threading.Thread(target=self._run_load, args=arguments).start()
        return load

    def close(self) -> None:
        """Waits for the end of a load: its memory goes with the engine."""
        if self._load is not None:
            self._load.exception()

    def take_load(self) -> Future[None] | None:
        """A load that has ended, once."""
        load = self._load
        if load is None or not load.done():
            return None
        self._load = None
        return load

    def _run_load(
        self, load: Future[None], reader: HeadReader, path: str, sha256: str | None
    ) -> None:
        started = time.monotonic()
        try:
            with _quick_switches():
                found = _checked(reader, path, sha256)
                self._spare = None  # what was there is overwritten from here on
                found.load()
            head = DrafterHead(version=0, folder=found.folder, sha256=found.sha256)
            self._spare = _Spare(head, is_new=True)
            self._state.stage_ms = 1000 * (time.monotonic() - started)
        except BaseException as error:
            load.set_exception(error)
        else:
            load.set_result(None)

    def exchange(self, *, back: bool = False, weight_version: str | None = None) -> None:
        """Between two steps: the head that was loaded drafts, or with `back` the one before.

        Raises:
            RequestError: there is none, or it is being loaded.
        """
        if self._load is not None and not self._load.done():
            raise RequestError("another head is being loaded; try again later", code="drafter_busy")
        spare = self._spare
        if spare is None or spare.is_new == back:
            raise RequestError(
                "no head drafted before this one, or another was loaded over it"
                if back
                else "no head was loaded",
                code="no_previous_drafter",
            )
        started = time.perf_counter()
        self._runner.exchange_drafter()
        gap_us = 1e6 * (time.perf_counter() - started)
        now, head = self._state, spare.head
        before = DrafterHead(
            version=now.version,
            folder=now.folder,
            sha256=now.sha256,
            weight_version=now.weight_version,
        )
        if spare.is_new:
            self._num_versions += 1
            head.version, head.weight_version = self._num_versions, weight_version
        self._spare = _Spare(before, is_new=False)
        self._state = DrafterState(
            version=head.version,
            folder=head.folder,
            sha256=head.sha256,
            weight_version=head.weight_version,
            method=now.method,
            since=time.time(),
            num_swaps=now.num_swaps + 1,
            stage_ms=now.stage_ms,
            gap_us=gap_us,
        )

    def count_step(self, version: int, stats: EngineStats) -> None:
        """The step whose results come next was launched with this version; `stats` are before it.

        So what is counted from one call to the next is the version's of the former.
        """
        if version == self._counted:
            return
        self._close_count(stats)
        self._counted = version
        kept = {version, self.version, self._spare.head.version if self._spare else version}
        self._counters = {
            one: counters for one, counters in self._counters.items() if one in kept
        } | {version: self._counters.get(version, SpecCounters())}

    def _close_count(self, stats: EngineStats) -> None:
        add_counters(self._counters[self._counted], [counters_since(self._mark, stats)])
        self._mark = _counters_of(stats)

    def state(self, stats: EngineStats) -> DrafterState:
        """Who drafts, with counters up to `stats`."""
        self._close_count(stats)
        state, spare = copy.copy(self._state), self._spare
        state.counters = self._counters_of(state.version)
        if spare is not None and not spare.is_new:
            state.previous = copy.copy(spare.head)
            state.previous.counters = self._counters_of(spare.head.version)
        return state

    def _counters_of(self, version: int) -> SpecCounters:
        return copy.deepcopy(self._counters.get(version, SpecCounters()))


def _checked(reader: HeadReader, path: str, sha256: str | None) -> CheckedHead:
    try:
        return reader(path, sha256)
    except RequestError:
        raise
    except Exception as error:  # nothing has changed, so whatever it is, the engine goes on
        logger.exception("a draft head could not be read")
        raise RequestError(
            f"{path!r} could not be read: {type(error).__name__}; the log of the engine has more",
            "path",
            "drafter_unreadable",
        ) from error


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _counters_of(stats: EngineStats) -> SpecCounters:
    counters = SpecCounters()
    add_counters(counters, [stats])
    return counters
