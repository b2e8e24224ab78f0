"""Compiled grammars of a server: from a request's source to the engines that need them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openspec.checkpoint.strict_json import JsonValue
from openspec.engine.processes.replicas import Replicas
from openspec.errors import EngineError
from openspec.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarLimits
from openspec.serve.shapes.wire import overloaded
from openspec.text.pool import TextPool

Tokens = Callable[[], list[bytes]]


class GrammarStore:
    """Belongs to one event loop. Nothing is made before the first grammar."""

    def __init__(
        self,
        engines: Replicas,
        pool: TextPool,
        tokens: Tokens,
        vocab_size: int,
        stop_ids: list[int],
        limits: GrammarLimits,
    ) -> None:
        """`tokens` gives what `Tokenizer.grammar_tokens` does; it is called in a thread."""
        self._engines, self._pool, self._make_tokens = engines, pool, tokens
        self._vocab_size, self._stop_ids, self._limits = vocab_size, stop_ids, limits
        self._compiler: GrammarCompiler | None = None
        self._starting: asyncio.Lock = asyncio.Lock()
        self._num_users: Counter[str] = Counter()

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
    def loaded(self, grammar: CompiledGrammar | None) -> Iterator[None]:
        """Keeps a grammar for the engines, for the requests that are submitted within."""
        if grammar is None:
            yield
            return
        self._engines.load_grammar(grammar.key, grammar.data)
        self._num_users[grammar.key] += 1
        try:
            yield
        finally:
            self._num_users[grammar.key] -= 1
            self._drop_unused(grammar.key)

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
                tokens = await self._pool.run(self._vocab_size, self._make_tokens)
                self._engines.set_vocabulary(tokens, self._vocab_size, self._stop_ids)
                self._compiler = GrammarCompiler(
                    tokens,
                    self._vocab_size,
                    self._stop_ids,
                    self._limits,
                    on_forget=lambda key: _call(loop, self._drop_unused, key),
                )
            return self._compiler

    def _drop_unused(self, key: str) -> None:
        """Takes a grammar from the engines once no request uses it and the cache has lost it."""
        if self._num_users[key] > 0 or (self._compiler is not None and self._compiler.keeps(key)):
            return
        del self._num_users[key]
        self._engines.drop_grammar(key)


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[str], None], key: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work, key)
