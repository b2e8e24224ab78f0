"""Compiled grammars of a server: from a request's source to the engines that need them."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openspec.checkpoint.strict_json import JsonValue
from openspec.engine.client import EngineClient
from openspec.engine.replicas import Replicas
from openspec.errors import EngineError
from openspec.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarLimits
from openspec.serve.wire import overloaded
from openspec.text.pool import TextPool

Tokens = Callable[[], list[bytes]]


class GrammarStore:
    """Belongs to one event loop. Nothing is made before the first grammar."""

    def __init__(
        self,
        pool: TextPool,
        tokens: Tokens,
        vocab_size: int,
        stop_ids: list[int],
        limits: GrammarLimits,
    ) -> None:
        """`tokens` gives what `Tokenizer.grammar_tokens` does; it is called in a thread."""
        self._pool, self._make_tokens = pool, tokens
        self._vocab_size, self._stop_ids, self._limits = vocab_size, stop_ids, limits
        self._tokens: list[bytes] = []
        self._compiler: GrammarCompiler | None = None
        self._starting: asyncio.Lock = asyncio.Lock()
        self._loaded: weakref.WeakKeyDictionary[EngineClient, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._num_users: Counter[str] = Counter()
        self._forgotten: set[str] = set()

    async def compiled(self, source: str, param: str) -> CompiledGrammar:
        """The compiled grammar of a source; compilation ends where no request waits for it.

        Raises:
            RequestError: it is refused, naming `param`.
            ApiError: 503, too many grammars wait.
        """
        compiler = await self._started()
        try:
            ticket = compiler.submit(source)
        except EngineError as error:
            if error.code != "grammars_waiting":
                raise
            raise overloaded(f"{error}; try again later.", retry_after_s=1) from None
        try:
            compiled = asyncio.shield(asyncio.wrap_future(ticket.future))
            # The ticket tells of a refusal; what nobody retrieves would be logged.
            compiled.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({compiled})
            return ticket.result(param)
        finally:
            ticket.leave()

    @contextmanager
    def loaded(self, engines: Replicas, grammar: CompiledGrammar | None) -> Iterator[None]:
        """Keeps a grammar in the engines, for the requests that are submitted within."""
        if grammar is None:
            yield
            return
        for replica in engines.all:
            if replica.is_alive:
                self._load(replica.engine, grammar)
        self._num_users[grammar.key] += 1
        try:
            yield
        finally:
            self._num_users[grammar.key] -= 1
            if not self._num_users[grammar.key]:
                del self._num_users[grammar.key]
                if grammar.key in self._forgotten:
                    self._drop(grammar.key)

    def info(self) -> dict[str, JsonValue]:
        """Limits and use, for /server_info."""
        compiler, limits = self._compiler, self._limits
        return {
            "timeout_s": limits.timeout_s,
            "memory": limits.memory,
            "cache_bytes": limits.cache_bytes,
            "num_cached": compiler.num_kept if compiler else 0,
            "num_cached_bytes": compiler.num_bytes if compiler else 0,
        }

    def close(self) -> None:
        """Ends the processes that compile."""
        if self._compiler is not None:
            self._compiler.close()

    async def _started(self) -> GrammarCompiler:
        async with self._starting:
            if self._compiler is None:
                loop = asyncio.get_running_loop()
                self._tokens = await self._pool.run(self._vocab_size, self._make_tokens)
                self._compiler = GrammarCompiler(
                    self._tokens,
                    self._vocab_size,
                    self._stop_ids,
                    self._limits,
                    on_forget=lambda key: _call(loop, self._forget, key),
                )
            return self._compiler

    def _load(self, engine: EngineClient, grammar: CompiledGrammar) -> None:
        keys = self._loaded.get(engine)
        if keys is None:
            keys = self._loaded[engine] = set()
            engine.set_vocabulary(self._tokens, self._vocab_size, self._stop_ids)
        if grammar.key not in keys:
            keys.add(grammar.key)
            engine.load_grammar(grammar.key, grammar.data)
        self._forgotten.discard(grammar.key)

    def _forget(self, key: str) -> None:
        if self._num_users[key]:
            self._forgotten.add(key)
        else:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._forgotten.discard(key)
        for engine, keys in self._loaded.items():
            if key in keys and engine.is_alive:
                engine.drop_grammar(key)
            keys.discard(key)


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[str], None], key: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work, key)
