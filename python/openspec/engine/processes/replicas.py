"""Replicas: the engines of one server behind what one engine's client offers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from openspec.engine.core.fan_out import sequence_ids
from openspec.engine.processes.client import EngineClient
from openspec.engine.processes.output_stream import OutputStream
from openspec.engine.processes.placement import choose, page_keys
from openspec.engine.processes.replica import Replica
from openspec.engine.processes.standby import Standby
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.messages import DrafterState, EngineInfo, EngineRequest, EngineStats, total_stats

logger = logging.getLogger(__name__)


class Replicas:
    """One or more engines of one model. All methods belong to the event loop that called `start`.

    A request goes to one engine, and its outputs come from there: nothing stands between.
    """

    def __init__(
        self,
        starts: Sequence[Callable[[], Awaitable[EngineClient]]],
        max_restarts: int = 0,
        *,
        caches_prefixes: bool = True,
        standby: Standby | None = None,
    ) -> None:
        """`starts` make an engine each, also in the place of one that ended.

        `max_restarts` is each one's, as in `Replica`. `standby` is closed with the engines.
        """
        self._standby = standby
        self._is_placing_by_prefix = caches_prefixes and len(starts) > 1
        self._infos: dict[int, EngineInfo] = {}
        self._info: EngineInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """First engines that are still starting, and a rolling restart."""
        self._is_rolling = False
        self._staged: tuple[str, str | None] | None = None
        """Path and hash of the head that was loaded last."""
        self._head: tuple[str, str | None, str | None] | None = None
        """These and the name of the head that drafts; None: that of the settings."""
        self._head_before: tuple[str, str | None, str | None] | None = None
        self._vocabulary: tuple[list[bytes], int, list[int]] | None = None
        self._grammars: dict[str, bytes] = {}
        self._all_given_up = asyncio.Event()
        self.all: list[Replica] = []
        for index, start in enumerate(starts):
            role = "the engine" if len(starts) == 1 else f"engine {index}"
            begin = partial(self._begin, index, start)
            self.all.append(Replica(index, begin, max_restarts, role, self._look_given_up))

    async def _begin(
        self, index: int, start: Callable[[], Awaitable[EngineClient]]
    ) -> EngineClient:
        engine = await start()
        await self._bring_head(engine)
        self.all[index].begin(engine.info)
        self._infos[index] = engine.info
        longest = min(info.max_model_len for info in self._infos.values())
        self._info = msgspec.structs.replace(engine.info, max_model_len=longest)
        return engine

    async def start(self, min_replicas: int | None = None) -> None:
        """Starts all, and waits for so many of them, by default for all; the others follow.

        Raises:
            ConfigError: what an engine found wrong with the configuration.
            EngineError: an engine did not start.
        """
        pending = {asyncio.create_task(one.start()) for one in self.all}
        num_missing = len(pending) if min_replicas is None else min_replicas
        try:
            while num_missing > 0:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                num_missing -= len(done)
        except BaseException:
            self._tasks = pending
            await self.close()
            raise
        for one in self.all:
            one.must_start = False
        self._tasks = pending

    @property
    def info(self) -> EngineInfo:
        """What an engine told when it was ready, with the least `max_model_len` of all.

        Raises:
            EngineError: there was none so far.
        """
        if self._info is None:
            raise EngineError("no engine is ready")
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether an engine runs."""
        return any(one.is_alive for one in self.all)

    @property
    def num_accepting(self) -> int:
        """Engines that get requests."""
        return sum(one.is_accepting for one in self.all)

    @property
    def failure(self) -> str:
        """Why no engine gets requests, as `EngineError.code` says it: the most passing reason."""
        failures = [one.failure for one in self.all]
        passing = [code for code in ("engine_late", "engine_restarting") if code in failures]
        return passing[0] if passing else failures[-1] or ""

    async def given_up(self) -> None:
        """Returns once every engine has ended too often to be started again."""
        await self._all_given_up.wait()

    def _look_given_up(self) -> None:
        if all(one.is_given_up for one in self.all):
            self._all_given_up.set()

    def capacity(self) -> tuple[int, int]:
        """Sequences that can run at a time and tokens in KV pages, of all that get requests."""
        infos = [one.engine.info for one in self.all if one.is_accepting]
        return (
            sum(info.max_num_seqs for info in infos),
            sum(info.num_pages * info.page_size for info in infos),
        )

    def submit(self, *requests: EngineRequest, engine: int | None = None) -> OutputStream:
        """Sends each request to an engine; the stream has the outputs of all their sequences.

        `engine` is the number of the one that gets them; None: each goes where it suits.

        It ends with `RequestError` where a request can never be served, and with `EngineError` when
        one of its engines dies.

        Raises:
            RequestError: a request id is in use.
            EngineError: no engine gets requests, or not the one that is named.
        """
        if len(self.all) == 1:
            for request in requests:
                self._bring_grammar(self.all[0], request.grammar)
            return self.all[0].engine.submit(*requests)
        stream = OutputStream(
            self.abort, [one for request in requests for one in sequence_ids(request)]
        )
        for request in requests:
            replica = self._place(request, self.all if engine is None else [self.all[engine]])
            self._bring_grammar(replica, request.grammar)
            replica.engine.submit(request, stream=stream)
            stream.sources.update(dict.fromkeys(sequence_ids(request), replica.index))
        return stream

    def _place(self, request: EngineRequest, among: Sequence[Replica]) -> Replica:
        candidates = [one for one in among if one.is_accepting]
        if not candidates:
            raise EngineError("no engine gets requests", self.failure)
        keys: list[int] = []
        if self._is_placing_by_prefix:
            keys = page_keys(request, self.info.page_size)
        replica = choose(candidates, keys, request.sampling.n)
        replica.num_placed += 1
        replica.prefixes.add(keys)
        return replica

    def set_vocabulary(self, tokens: list[bytes], vocab_size: int, stop_ids: list[int]) -> None:
        """The bytes of each token, once, before the first grammar."""
        self._vocabulary = (tokens, vocab_size, stop_ids)

    def load_grammar(self, key: str, data: bytes) -> None:
        """What `_grammar.compile_...` returned, for requests submitted from here on.

        An engine gets it with the first request for it, and so does one that takes its place.
        """
        self._grammars[key] = data

    def drop_grammar(self, key: str) -> None:
        """Forgets a grammar; requests that were submitted keep it."""
        self._grammars.pop(key, None)
        for one in self.all:
            if one.grammars is not None and key in one.grammars:
                one.grammars.remove(key)
                if one.is_alive:
                    one.engine.drop_grammar(key)

    def _bring_grammar(self, replica: Replica, key: str) -> None:
        """Sends the engine a grammar that it has not got; one that nobody loaded it refuses."""
        if key not in self._grammars or self._vocabulary is None or not replica.is_alive:
            return
        if replica.grammars is None:
            replica.grammars = set()
            replica.engine.set_vocabulary(*self._vocabulary)
        if key not in replica.grammars:
            replica.grammars.add(key)
            replica.engine.load_grammar(key, self._grammars[key])

    def abort(self, *request_ids: str) -> None:
        """Ends sequences within a step; each gets a last output, finish reason "abort"."""
        if request_ids:
            for one in self.all:
                if one.is_alive:
                    one.engine.abort(*request_ids)

    async def stats(self) -> EngineStats:
        """Statistics of all engines together, at most a moment old; `Replica.stats` has each one's.

        However many ask, an engine is asked once; while it does not answer, they are the last ones.
        """
        await asyncio.gather(*(one.read_stats() for one in self.all))
        return total_stats([one.stats for one in self.all])

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, once every engine has got the message.

        Raises:
            EngineError: an engine failed meanwhile.
        """
        alive = [one for one in self.all if one.is_alive]
        for one in alive:
            one.prefixes.clear()
        await asyncio.gather(*(one.engine.reset_prefix_cache() for one in alive))

    async def stage_drafter(self, path: str, sha256: str | None = None) -> None:
        """Loads another draft head beside the one that drafts, in every engine, while steps run.

        Raises:
            RequestError: an engine does not take it; all draft as before.
            EngineError: an engine failed meanwhile.
        """
        self._staged = None
        await self._each_drafter(lambda engine: engine.stage_drafter(path, sha256))
        self._staged = (path, sha256)

    async def exchange_drafter(
        self,
        *,
        back: bool = False,
        flush_prefix_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Has the head that was loaded draft in every engine, or with `back` the one before it.

        An engine that is started later gets it, too.

        Raises:
            RequestError: there is no such head.
            EngineError: an engine failed meanwhile.
        """
        if back:
            await self._check_previous()
        await self._each_drafter(
            lambda engine: engine.exchange_drafter(
                back=back, flush_prefix_cache=flush_prefix_cache, weight_version=weight_version
            )
        )
        if flush_prefix_cache:
            for one in self.all:
                one.prefixes.clear()
        loaded = None if self._staged is None else (*self._staged, weight_version)
        self._head, self._head_before = (
            (self._head_before, self._head) if back else (loaded, self._head)
        )

    async def _check_previous(self) -> None:
        """Engines that were started again know other heads than the others."""
        await self.stats()
        drafters = [one.engine.drafter for one in self.all if one.is_alive]
        previous = {one.previous.sha256 if one and one.previous else "" for one in drafters}
        if len(previous) > 1:
            raise RequestError(
                "the engines had different heads before this one; load the one that you want",
                code="no_previous_drafter",
            )

    async def _each_drafter(self, ask: Callable[[EngineClient], Awaitable[DrafterState]]) -> None:
        alive = [one.engine for one in self.all if one.is_alive]
        if not alive:
            raise EngineError("no engine runs", self.failure)
        answers = await asyncio.gather(*map(ask, alive), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _bring_head(self, engine: EngineClient) -> None:
        """An engine that starts later has the settings' head; the others have gone on."""
        if self._head is None:
            return
        path, sha256, weight_version = self._head
        try:
            await engine.stage_drafter(path, sha256)
            await engine.exchange_drafter(weight_version=weight_version)
        except (RequestError, EngineError) as error:
            logger.error("an engine drafts with the head of the start: %s", error)

    async def close(self) -> None:
        """Ends all engines; open streams fail with `EngineError`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self.all))
        if self._standby is not None:
            self._standby.close()

    def roll(self, patience_s: float) -> None:
        """Replaces every engine, one after the other, each once its sequences have ended.

        What has not ended after `patience_s` seconds is aborted.
        """
        if self._is_rolling:
            logger.warning("a rolling restart is under way; this request for one is ignored")
            return
        self._is_rolling = True
        task = asyncio.create_task(self._roll(patience_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll(self, patience_s: float) -> None:
        try:
            for one in self.all:
                logger.info(
                    "rolling restart: engine %d of %d, %d sequences to end first",
                    one.index,
                    len(self.all),
                    one.num_sequences if one.is_alive else 0,
                )
                one.is_leaving = True
                try:
                    await one.empty(patience_s)
                    await one.replace()
                finally:
                    one.is_leaving = False
            logger.info("rolling restart: done")
        except (ConfigError, EngineError):
            logger.error("rolling restart: stopped, because an engine did not start again")
        finally:
            self._is_rolling = False
