"""The load generator: a fixed number of requests under way until a list of prompts is through."""

from __future__ import annotations

import contextlib
import math
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import msgspec

from openspec.bench.client import Address, ClientError, Completion, Connection, read_completion
from openspec.bench.workloads import Prompt, Workload
from openspec.messages import SpecDecodeStats

EXTENSIONS = frozenset({"cache_salt", "return_token_ids", "chat_template_kwargs", "speculative"})
"""Fields beside OpenAI's own that a request may have."""


@dataclass(frozen=True)
class RequestSettings:
    """What every request of a run has in common."""

    model: str
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    detailed: bool = False
    """Ask for acceptance step by step."""
    extensions: frozenset[str] = EXTENSIONS
    """Those of `EXTENSIONS` that the server takes."""
    timeout_s: float = 600.0


@dataclass
class LoadResult:
    """The answers of one run, in the order of the prompts."""

    completions: list[Completion]
    wall_s: float
    speculation: SpecDecodeStats | None = None
    """Of all answers together, if the server counts it but does not tell it with each."""

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(completion.num_tokens for completion in self.completions)

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
    elif settings.detailed:
        body["speculative"] = {"detailed": True}
    unwanted = EXTENSIONS - settings.extensions
    return msgspec.json.encode({name: body[name] for name in body if name not in unwanted})


def run_load(
    address: Address,
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
    prompts = workload.prompts
    bodies = [
        request_body(prompt, index, settings, speculative=speculative, cache_salt=cache_salt)
        for index, prompt in enumerate(prompts)
    ]
    answers: dict[int, Completion] = {}
    lanes = [_Lane(Connection(address)) for _ in range(min(concurrency, len(bodies)))]
    waiting = iter(range(len(bodies)))
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for lane in lanes:
            stack.callback(lane.connection.close)
            selector.register(lane.connection, selectors.EVENT_READ, lane)
        start_s = perf_counter()
        for lane, index in zip(lanes, waiting, strict=False):
            lane.send(index, prompts[index].endpoint(), bodies[index])
        while len(answers) < len(bodies):
            ready = selector.select(timeout=1.0)
            if not ready:
                _check_timeouts(lanes, settings.timeout_s)
            for key, _ in ready:
                lane = key.data
                response = lane.connection.receive()
                if response is None:
                    continue
                done, sent_s = lane.index, lane.sent_s
                following = next(waiting, None)
                if following is not None and lane.connection.is_spent:
                    selector.unregister(lane.connection)
                    lane.connection.renew()
                    selector.register(lane.connection, selectors.EVENT_READ, lane)
                if following is not None:  # First keep the server busy, then look at the answer.
                    lane.send(following, prompts[following].endpoint(), bodies[following])
                else:
                    lane.sent_s = math.inf
                    selector.unregister(lane.connection)  # what else it may say is of no interest
                answers[done] = read_completion(sent_s, response)
                on_completion(answers[done])
        wall_s = perf_counter() - start_s
    return LoadResult([answers[index] for index in range(len(bodies))], wall_s)


@dataclass
class _Lane:
    """A connection and the request on it."""

    connection: Connection
    index: int = -1
    sent_s: float = 0.0

    def send(self, index: int, endpoint: str, body: bytes) -> None:
        self.index, self.sent_s = index, perf_counter()
        self.connection.send(endpoint, body)


def _check_timeouts(lanes: Sequence[_Lane], timeout_s: float) -> None:
    now_s = perf_counter()
    for lane in lanes:
        if now_s - lane.sent_s > timeout_s:
            raise ClientError(f"request {lane.index} was not complete within {timeout_s:g} s")
