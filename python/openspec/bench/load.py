"""The load generator: a fixed number of requests under way until a list of prompts is through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import msgspec

from openspec.bench.client import Completion, Connection, read_completion
from openspec.bench.workloads import Prompt, Workload


@dataclass(frozen=True)
class RequestSettings:
    """What every request of a run has in common."""

    model: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    timeout_s: float = 600.0


@dataclass
class LoadResult:
    """The answers of one run, in the order of the prompts."""

    completions: list[Completion]
    wall_s: float

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall time, prompts included in the time."""
        return self.output_tokens / self.wall_s if self.wall_s > 0 else 0.0


def request_body(
    prompt: Prompt, index: int, settings: RequestSettings, *, speculative: bool, cache_salt: str
) -> bytes:
    """The JSON body of one request; with and without speculation it differs in that field alone."""
    body: dict[str, object] = {
        "model": settings.model,
        **prompt.fields(),
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": cache_salt,
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if not speculative:
        body["speculative"] = {"enabled": False}
    return msgspec.json.encode(body)


async def run_load(
    address: tuple[str, int],
    workload: Workload,
    concurrency: int,
    settings: RequestSettings,
    *,
    speculative: bool,
    cache_salt: str,
    on_completion: Callable[[Completion], None] = lambda _: None,
) -> LoadResult:
    """Send all prompts, `concurrency` at a time, each as soon as one before it has ended.

    Raises:
        ClientError: any request failed; the others are aborted.
    """
    bodies = [
        request_body(prompt, index, settings, speculative=speculative, cache_salt=cache_salt)
        for index, prompt in enumerate(workload.prompts)
    ]
    queue = iter(range(len(bodies)))
    answers: list[Completion | None] = [None] * len(bodies)

    async def worker() -> None:
        connection = Connection(*address)
        try:
            for index in queue:
                endpoint = workload.prompts[index].endpoint()
                sent_s = perf_counter()
                response = await connection.post(endpoint, bodies[index], settings.timeout_s)
                answers[index] = completion = read_completion(sent_s, response)
                on_completion(completion)
        finally:
            connection.close()

    start = perf_counter()
    tasks = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, len(bodies)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    wall_s = perf_counter() - start
    return LoadResult([answer for answer in answers if answer is not None], wall_s)
