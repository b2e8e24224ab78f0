"""Grammars: the compiled grammars of an engine, by key."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from openspec.engine.core.executor import Runner
from openspec.errors import RequestError


class Grammars:
    """Read by a thread of its own, in order, while steps go on.

    Who has got a grammar keeps it; `drop_grammar` only takes it from those who come later.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread: ThreadPoolExecutor | None = None
        self._vocabulary: Future[Any] | None = None
        self._by_key: dict[str, Future[Any]] = {}

    def set_vocabulary(
        self, tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
    ) -> None:
        """The tokens that all later grammars are for."""
        self._vocabulary = self._submit(
            self._runner.load_vocabulary, tokens, vocab_size, list(stop_ids)
        )

    def load_grammar(self, key: str, data: bytes) -> None:
        """Begins to load a grammar; one of the same key gives way to it."""
        self._by_key[key] = self._submit(self._load, self._vocabulary, data)

    def drop_grammar(self, key: str) -> None:
        """Forgets a grammar; an unknown key is ignored."""
        self._by_key.pop(key, None)

    def get(self, key: str) -> Future[Any]:
        """The grammar, once it is loaded.

        Raises:
            RequestError: if there is none of this key.
        """
        try:
            return self._by_key[key]
        except KeyError:
            raise RequestError(f"grammar {key!r} is not loaded", "grammar") from None

    def close(self) -> None:
        """Lets go of the engine, whose memory may be a GPU's; nothing may follow."""
        if self._thread is not None:
            self._thread.shutdown()
        self._by_key.clear()
        self._vocabulary = None
        del self._runner

    def _load(self, vocabulary: Future[Any] | None, data: bytes) -> Any:
        if vocabulary is None:
            raise ValueError("a grammar came before the vocabulary")
        loaded = self._runner.load_grammar(vocabulary.result(), data)
        # Reading it takes ten times what stays, which the C library would keep in pieces.
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        return loaded

    def _submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammars")
        return self._thread.submit(call, *arguments)
