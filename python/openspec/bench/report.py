"""From answers to figures; every definition of a figure is here.

*Time to first token*: from sending the request to the first chunk with a token. *Time per token*:
from the first chunk to the last, divided by the tokens that came after the first chunk. *Gap*: time
between two chunks, which under speculation carry several tokens. Acceptance is defined in
`openspec.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median, quantiles

from openspec.bench.client import Completion
from openspec.bench.load import LoadResult
from openspec.messages import SpecDecodeStats, total_speculation

PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)


@dataclass(frozen=True)
class Latency:
    """Median and 99th percentile in milliseconds; 0 for no values."""

    p50: float
    p99: float
    percentiles: dict[str, float] = field(default_factory=dict, compare=False)
    """By "0", "5" ... "100", the least and the largest value included."""

    @staticmethod
    def of(seconds: Sequence[float]) -> Latency:
        """Percentiles of values in seconds."""
        if not seconds:
            return Latency(0.0, 0.0)
        values = [1000 * value for value in seconds]
        cuts = quantiles(
            [*values, *values] if len(values) == 1 else values, n=100, method="inclusive"
        )
        levels = [min(values), *cuts, max(values)]
        found = {str(level): levels[level] for level in PERCENTILES}
        return Latency(median(values), levels[99], found)


@dataclass(frozen=True)
class Figures:
    """One method on one workload at one concurrency, over all repeats."""

    tokens_per_s: float
    """Median of the repeats."""
    repeats_tokens_per_s: list[float]
    ttft: Latency
    tpot: Latency
    gap: Latency
    speculation: SpecDecodeStats
    num_requests: int
    """Of one repeat."""
    output_tokens: int
    """Of one repeat."""


def figures_of(results: Sequence[LoadResult]) -> Figures:
    """Latencies over the requests of all repeats, throughput as the median of the repeats."""
    completions = [completion for result in results for completion in result.completions]
    speeds = [result.tokens_per_s for result in results]
    return Figures(
        tokens_per_s=median(speeds),
        repeats_tokens_per_s=speeds,
        ttft=Latency.of([c.chunk_s[0] - c.sent_s for c in completions if c.chunk_s]),
        tpot=Latency.of([t for c in completions if (t := _time_per_token(c)) is not None]),
        gap=Latency.of(
            [b - a for c in completions for a, b in zip(c.chunk_s, c.chunk_s[1:], strict=False)]
        ),
        speculation=_speculation_of_runs(results, completions),
        num_requests=len(results[0].completions),
        output_tokens=results[0].output_tokens,
    )


def speculation_of(completions: Sequence[Completion]) -> SpecDecodeStats:
    """The sum over some answers."""
    parts = [completion.speculation for completion in completions]
    return total_speculation([part for part in parts if part is not None])


def _speculation_of_runs(
    results: Sequence[LoadResult], completions: Sequence[Completion]
) -> SpecDecodeStats:
    counted = [result.speculation for result in results if result.speculation is not None]
    return total_speculation(counted) if counted else speculation_of(completions)


def _time_per_token(completion: Completion) -> float | None:
    """Seconds per token from the first chunk to the last; None: there are no later tokens.

    Where the server sends no ids, the first chunk counts as one token.
    """
    later = sum(completion.chunk_tokens[1:])
    if not completion.token_ids and len(completion.chunk_s) > 1:
        later = completion.num_tokens - 1
    return (completion.chunk_s[-1] - completion.chunk_s[0]) / later if later else None


@dataclass(frozen=True)
class Speedup:
    """Method over plain, from pairs of runs that followed each other."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(plain: Sequence[float], method: Sequence[float]) -> Speedup:
        """Median and range of the ratios, repeat by repeat."""
        ratios = [m / p for p, m in zip(plain, method, strict=True) if p > 0]
        return Speedup(median(ratios), min(ratios), max(ratios)) if ratios else Speedup(0, 0, 0)


@dataclass(frozen=True)
class Divergence:
    """Where an answer leaves the plain one."""

    request: int
    position: int
    expected: int | str | None
    found: int | str | None
    unit: str = "token"
    """What `position` counts: "character" where a server sends no token ids."""


@dataclass(frozen=True)
class Identity:
    """Whether answers equal the plain ones: ids (or text) and the reason to finish."""

    num_requests: int
    num_identical: int
    first_divergence: Divergence | None = None

    @property
    def holds(self) -> bool:
        """All answers are identical."""
        return self.num_identical == self.num_requests


def compare(plain: Sequence[LoadResult], other: Sequence[LoadResult]) -> Identity:
    """Compare every repeat with the first plain one, request by request."""
    reference = plain[0].completions
    differing: dict[int, Divergence] = {}
    for result in other:
        for index, (expected, found) in enumerate(zip(reference, result.completions, strict=True)):
            divergence = _divergence(index, expected, found)
            if divergence is not None:
                differing.setdefault(index, divergence)
    first = differing[min(differing)] if differing else None
    return Identity(len(reference), len(reference) - len(differing), first)


def _divergence(index: int, expected: Completion, found: Completion) -> Divergence | None:
    if expected.token_ids or found.token_ids:
        for position, (a, b) in enumerate(zip_longest(expected.token_ids, found.token_ids)):
            if a != b:
                return Divergence(index, position, a, b)
    elif expected.text != found.text:
        for position, (c, d) in enumerate(zip_longest(expected.text, found.text)):
            if c != d:
                return Divergence(index, position, c, d, "character")
    if expected.finish_reason == found.finish_reason:
        return None
    end = found.num_tokens
    return Divergence(index, end, expected.finish_reason, found.finish_reason)
