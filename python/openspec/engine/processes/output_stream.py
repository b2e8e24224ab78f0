"""OutputStream: what the engine says of some sequences, for one reader in asyncio."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence

from openspec.messages import EngineOutput


class OutputStream(AsyncIterator[EngineOutput]):
    """Outputs of some sequences, each one's in order; ends after the last finish reason.

    Outputs of a sequence that arrived while nobody read are joined into one. Close it early
    (`aclose`, or leave `async with`) to abort within a step what still runs.
    """

    def __init__(self, abort: Callable[..., None], request_ids: Iterable[str]) -> None:
        """`abort` ends the sequences of the ids that it is given."""
        self._abort = abort
        self._open = set(request_ids)
        self._arrived: OrderedDict[str, list[EngineOutput]] = OrderedDict()
        self._error: Exception | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None
        self.sources: dict[str, int] = {}
        """Which of several engines runs a sequence; the first one, where nothing is said."""

    @property
    def open_ids(self) -> Collection[str]:
        """Sequences with outputs to come."""
        return () if self._is_over else self._open

    async def __anext__(self) -> EngineOutput:
        while not self._arrived:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self.open_ids:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        _, outputs = self._arrived.popitem(last=False)
        return outputs[0] if len(outputs) == 1 else join_outputs(outputs)

    async def aclose(self) -> None:
        """Aborts what is not finished."""
        self._is_over = True
        self._abort(*self._open)
        self._open.clear()
        self._wake()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def push(self, output: EngineOutput) -> None:
        """Called by the client for every output; nothing, once the stream is closed."""
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        if not self._is_over:
            self._arrived.setdefault(output.request_id, []).append(output)
            self._wake()

    def end(self, error: Exception) -> None:
        """There will be no more outputs: who reads gets this error after what has arrived."""
        self._error = error
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join_outputs(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """One output that says what several in a row said."""
    first, last = outputs[0], outputs[-1]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    has_logprobs = any(output.logprobs is not None for output in outputs)
    steps = [step for output in outputs for step in output.steps or ()]
    step_counts = [counts for output in outputs for counts in output.step_counts or ()]
    return EngineOutput(
        request_id=last.request_id,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        num_cached_tokens=last.num_cached_tokens,
        spec_decode=last.spec_decode,
        step_counts=step_counts or None,
        steps=steps or None,
        error=last.error,
        is_refused=last.is_refused,
    )
