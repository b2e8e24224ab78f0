"""A generation request in flight: its sequences in the engine, their outputs as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from openspec.errors import EngineError
from openspec.messages import (
    EngineOutput,
    SamplingParams,
    SpecDecodeStats,
    SpeculativeOptions,
    fan_out,
)
from openspec.serve.context import OutputStream, ServerContext
from openspec.text.outputs import OutputDelta, RequestOutputProcessor, total_speculation
from openspec.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is completed."""

    token_ids: list[int]
    text: str | None
    """None where the client sent ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What holds for all sequences of a request."""

    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)


class Job:
    """The sequences of one request, from submission to their ends.

    Use as an async context manager: leaving it ends in the engine whatever still runs there.
    """

    def __init__(
        self,
        context: ServerContext,
        request_id: str,
        external_id: str,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.external_id = external_id
        self.prompts = prompts
        self.sampling = options.sampling
        self.arrival_time = arrival_time
        self.processors: list[RequestOutputProcessor] = []
        """By choice index: the completions of the first prompt, then of the second, ..."""
        self._context = context
        self._streams: list[OutputStream] = []
        self._is_aborted = False
        stops = StopStrings(options.sampling.stop) if options.sampling.stop else None
        for number, prompt in enumerate(prompts):
            for request in fan_out(
                f"{request_id}-{number}",
                prompt.token_ids,
                options.sampling,
                context.model.eos_token_ids,
                default_seed=context.engine_config.seed,
                priority=options.priority,
                cache_salt=options.cache_salt,
                speculative=options.speculative,
            ):
                self.processors.append(
                    RequestOutputProcessor(
                        request,
                        context.tokenizer,
                        index=len(self.processors),
                        eos_token_ids=context.model.eos_token_ids,
                        stop_strings=stops,
                        arrival_time=arrival_time,
                    )
                )
        self._last_times = [arrival_time] * len(self.processors)

    async def __aenter__(self) -> Job:
        self._context.check_capacity()
        self._context.num_sequences += len(self.processors)
        self._context.lifecycle.enter(self)
        self._context.metrics.load.add(1)
        try:
            for processor in self.processors:
                self._streams.append(self._context.engine.submit(processor.request))
        except BaseException:
            await self.__aexit__()
            raise
        if self._is_aborted:
            self.abort()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.num_sequences -= len(self.processors)
        self._context.lifecycle.leave(self)
        self._context.metrics.load.add(-1)
        for stream in self._streams:
            await stream.aclose()
        for processor in self.processors[: len(self._streams)]:
            if not processor.finished:
                self._context.metrics.success.add(finished_reason="abort")

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that a choice completes."""
        return self.prompts[index // self.sampling.n]

    def abort(self) -> None:
        """Ends every sequence within a step; their last outputs say "abort"."""
        self._is_aborted = True
        for processor in self.processors[: len(self._streams)]:
            if not processor.finished:
                self._context.engine.abort(processor.request.request_id)

    async def outputs(self) -> AsyncIterator[tuple[RequestOutputProcessor, OutputDelta]]:
        """What the sequences add, in order of arrival, until all have ended.

        Raises:
            RequestError: the engine cannot serve the request.
            EngineError: the engine failed on it, or is gone.
        """
        # A stop string ends a sequence before the engine knows. Its last delta waits for the
        # engine's last word, within a step, because that brings the statistics.
        held: dict[int, OutputDelta] = {}
        async for index, output in _merge(self._streams):
            delta = self._take(index, output)
            if delta.abort:
                held[index] = delta
                self._context.engine.abort(self.processors[index].request.request_id)
            elif output.finish_reason is not None and index in held:
                yield self.processors[index], held.pop(index)
            elif index not in held:
                yield self.processors[index], delta

    async def run(self) -> None:
        """Waits until all sequences have ended."""
        async for _ in self.outputs():
            pass

    def speculation(self) -> SpecDecodeStats | None:
        """Of all sequences that have ended."""
        parts = [processor.metrics().spec_decode for processor in self.processors]
        known = [part for part in parts if part is not None]
        return total_speculation(known) if known else None

    def first_token_s(self) -> float | None:
        """From arrival to the first token of any sequence."""
        times = [processor.metrics().first_token_time for processor in self.processors]
        return min((t - self.arrival_time for t in times if t is not None), default=None)

    def _take(self, index: int, output: EngineOutput) -> OutputDelta:
        processor = self.processors[index]
        delta = processor.process(output)
        if delta.finish_reason == "error":
            raise EngineError(delta.error or "unknown")
        self._observe(index, processor, delta)
        return delta

    def _observe(self, index: int, processor: RequestOutputProcessor, delta: OutputDelta) -> None:
        metrics, now, last = self._context.metrics, time.monotonic(), self._last_times[index]
        num_new, num_out = len(delta.token_ids), processor.num_output_tokens
        if num_new:
            self._last_times[index] = now
            if num_new == num_out:
                metrics.time_to_first_token.observe(now - self.arrival_time)
            else:
                metrics.inter_token_latency.observe((now - last) / num_new, num_new)
        if delta.finish_reason is not None:
            metrics.success.add(finished_reason=delta.finish_reason)
            metrics.e2e_latency.observe(now - self.arrival_time)
            metrics.prompt_tokens.observe(len(processor.request.prompt_token_ids))
            metrics.generation_tokens.observe(num_out)
            first = processor.metrics().first_token_time
            if first is not None and num_out > 1:
                metrics.time_per_output_token.observe((now - first) / (num_out - 1))


async def _merge(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, EngineOutput]]:
    """Outputs of several streams as they come.

    The queue is short, so that while nobody reads, the engine's client joins outputs.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, EngineOutput | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except Exception as exc:
            await queue.put((index, exc))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
