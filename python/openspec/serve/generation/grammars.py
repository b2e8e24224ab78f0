"""Compiled grammars of a server: from a request's source to the engines that need them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openspec.checkpoint.strict_json import JsonValue
from openspec.engine.processes.replicas import Replicas
from openspec.errors import EngineError
from openspec.grammar.compiler import CompiledGrammar, GrammarCompiler, GrammarLimits
from openspec.serve.shapes.wire import overloaded
from openspec.text.grammars.worker import COMMAND
from openspec.text.pool import TextPool

Tokens = Callable[[], list[bytes]]

_OVERLOADS = {"grammars_waiting": 1, "grammars_full": 1, "grammar_process_ended": 1}
"""Seconds after which to try again, by an error's code."""


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

    async def compiled(self, demand: bytes, param: str) -> CompiledGrammar:
        """The compiled grammar of a demand; compilation ends where no request waits for it.

        Raises:
            RequestError: it is refused, naming `param` or the field beside it that is wrong.
            ApiError: 503, too many grammars wait, or the process that compiles ended.
        """
        compiler = await self._started()
        with _overloads():
            ticket = compiler.submit(demand)
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
        """Keeps a grammar for the engines, for the requests that are submitted within.

        Raises:
            ApiError: 503, the grammars in use leave no room for it.
        """
        if grammar is None or self._compiler is None:
            yield
            return
        with _overloads():
            self._compiler.hold(grammar)
        try:
            self._engines.load_grammar(grammar.key, grammar.data)
            yield
        finally:
            self._compiler.release(grammar)

    def info(self) -> dict[str, JsonValue]:
        """Limits and use, for /server_info."""
        compiler, limits = self._compiler, self._limits
        return {
            "timeout_s": limits.timeout_s,
            "memory": limits.memory,
            "cache_bytes": limits.room,
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
                    COMMAND,
                    tokens,
                    self._vocab_size,
                    self._stop_ids,
                    self._limits,
                    on_forget=lambda key: _call(loop, self._drop, key),
                )
            return self._compiler

    def _drop(self, key: str) -> None:
        """Takes a grammar from the engines, unless it has been compiled again meanwhile."""
        if self._compiler is not None and not self._compiler.keeps(key):
            self._engines.drop_grammar(key)


@contextmanager
def _overloads() -> Iterator[None]:
    """Turns what passes by itself into a 503 that says when to try again."""
    try:
        yield
    except EngineError as error:
        if error.code not in _OVERLOADS:
            raise
        retry_after_s = _OVERLOADS[error.code]
        raise overloaded(f"{error}; try again later.", retry_after_s=retry_after_s) from None


def _call(loop: asyncio.AbstractEventLoop, work: Callable[[str], None], key: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(work, key)
