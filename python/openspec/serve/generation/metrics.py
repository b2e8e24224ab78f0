"""What /metrics shows: the engine's counters, latencies as clients see them, the server's doings.

Built on prometheus_client, with a registry of the server's own. The measures of speculation are
defined in `openspec.messages`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from openspec.engine.processes.replica import Replica
from openspec.messages import EngineInfo, EngineStats, acceptance_rate, mean_acceptance_length

PAGE_MAX_AGE_S = 0.1
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE_FAILURES = ("engine_dead", "engine_hung")
FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
_TOKENS = tuple(float(unit * 10**power) for power in range(6) for unit in (1, 2, 5))

MetricT = TypeVar("MetricT", Counter, Gauge, Info)

OWN, VLLM, BOTH = ("openspec:",), ("vllm:",), ("openspec:", "vllm:")


class Histogram:
    """Counts of observations up to fixed bounds, for each engine.

    prometheus_client's own takes one observation at a time; an output of many tokens is many.
    """

    def __init__(
        self, name: str, documentation: str, bounds: tuple[float, ...], num_engines: int = 1
    ) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = bounds
        self._ends = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        self._counts = [[0] * len(self._ends) for _ in range(num_engines)]
        self._sums = [0.0] * num_engines

    def observe(self, value: float, times: int = 1, engine: int = 0) -> None:
        """Counts `times` observations of one value."""
        self._counts[engine][bisect_left(self._bounds, value)] += times
        self._sums[engine] += value * times

    def collect(self) -> Iterator[Metric]:
        """The samples of the histogram, as the metrics of prometheus_client give theirs."""
        metric = Metric(self._name, self._documentation, "histogram")
        for engine, (counts, total) in enumerate(zip(self._counts, self._sums, strict=True)):
            label = {"engine": str(engine)}
            for end, count in zip(self._ends, accumulate(counts), strict=True):
                metric.add_sample(f"{self._name}_bucket", {**label, "le": end}, count)
            metric.add_sample(f"{self._name}_sum", label, total)
            metric.add_sample(f"{self._name}_count", label, sum(counts))
        yield metric


class ServerMetrics:
    """Every metric of one server; all of them exist, at zero, from the start.

    What belongs to an engine has a label `engine`, its number.
    """

    def __init__(self, model_name: str, info: EngineInfo, num_engines: int = 1) -> None:
        self._info = info
        self._stats = [EngineStats() for _ in range(num_engines)]
        self._failures: list[Mapping[str, int]] = [{} for _ in range(num_engines)]
        self._num_swaps = [0] * num_engines
        self._common = {"model_name": model_name}
        self._families: list[tuple[tuple[str, ...], Collector]] = []
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between outputs, divided by their tokens.", _SECONDS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean over a sequence, its first token left out.",
            _SECONDS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS
        )
        self.prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS
        )
        self.generation_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a sequence.", _TOKENS
        )
        own, both = partial(self._shows, OWN), partial(self._shows, BOTH)
        self.success = both(
            Counter, "request_success", "Finished sequences by reason.", "engine", "finished_reason"
        )
        self.rejections = both(Counter, "admission_rejections", "Requests answered 503.", "reason")
        received = self._shows(
            VLLM, Counter, "generation_tokens", "Tokens that clients got.", "engine"
        )
        self.received_tokens = [received.labels(str(engine)) for engine in range(num_engines)]
        """By engine."""
        cache = both(Info, "cache_config", "The KV cache.", "engine")
        self.http = own(
            Counter, "http_requests", "Requests by endpoint and status.", "path", "status"
        )
        self.captured_tokens = own(Counter, "capture_tokens", "Tokens kept for draft heads.")
        self.capture_dropped = own(
            Counter, "capture_dropped", "Texts beyond the rate, or without room to wait."
        )
        self.load = own(Gauge, "server_load", "Generation requests in flight.")
        self.ready = own(Gauge, "ready", "1 if new requests are welcome.")
        self._alive = own(Gauge, "engine_alive", "1 if the engine runs.", "engine")
        self._drafter_version = own(
            Gauge, "drafter_version", "Of the draft head that drafts; 1: the first.", "engine"
        )
        self._restarts = own(
            Gauge, "engine_restarts", "How often the engine was started again.", "engine"
        )
        non_finite = own(Counter, "draft_model_non_finite_tensors", "Tensors with NaN or infinity.")
        non_finite.inc(info.num_non_finite_draft_tensors)
        engine = own(Info, "engine", "The engine.", "engine")
        for name in map(str, range(num_engines)):
            cache.labels(name).info(
                {"block_size": str(info.page_size), "num_gpu_blocks": str(info.num_pages)}
            )
            engine.labels(name).info(
                {
                    "method": info.method,
                    "num_speculative_tokens": str(info.num_speculative_tokens),
                    "dtype": info.dtype,
                    "device": info.device,
                    "tensor_parallel_size": str(info.tensor_parallel_size),
                }
            )
            self._restarts.labels(name)
            self._drafter_version.labels(name).set(1)
            self._alive.labels(name)
            for reason in FINISH_REASONS:
                self.success.labels(name, reason)
        for reason in ("queue_full", "over_budget", "draining"):
            self.rejections.labels(reason)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._page, self._page_time = b"", 0.0

    def update(self, engines: Sequence[Replica]) -> None:
        """Takes over what is known of each engine."""
        self._stats = [engine.stats for engine in engines]
        self._failures = [engine.failures for engine in engines]
        for name, engine in enumerate(engines):
            self._alive.labels(name).set(engine.is_alive)
            self._restarts.labels(name).set(engine.num_restarts)
            if engine.drafter is not None:
                self._drafter_version.labels(name).set(engine.drafter.version)
                self._num_swaps[name] = engine.drafter.num_swaps

    def collect(self) -> Iterator[Metric]:
        """For the registry: every family, once under each of its prefixes."""
        for metric in ENGINE_METRICS:
            family = Metric(metric.name, metric.documentation, metric.kind)
            end = "_total" if metric.kind == "counter" else ""
            for engine, stats in enumerate(self._stats):
                family.add_sample(metric.name + end, {"engine": str(engine)}, metric.read(stats))
            yield from self._shown(metric.prefixes, family)
        yield from self._shown(
            BOTH,
            self._by_position(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position in the draft.",
                [stats.num_accepted_tokens_per_pos for stats in self._stats],
            ),
        )
        yield from self._shown(
            OWN,
            self._by_position(
                "spec_decode_num_drafts_per_pos",
                "Drafts that had a token at the position.",
                [stats.num_drafts_per_pos for stats in self._stats],
            ),
        )
        seconds = CounterMetricFamily(
            "engine_step_seconds",
            "Time of steps: drafter, target, both where not known apart, rest.",
            labels=["engine", "part"],
        )
        for engine, stats in enumerate(self._stats):
            for part, value in step_seconds(stats).items():
                seconds.add_metric([str(engine), part], value)
        yield from self._shown(OWN, seconds)
        yield from self._shown(
            OWN,
            _by_number(
                "device",
                "exchange_rounds",
                "Products whose sums GPUs of the engine exchanged.",
                [stats.exchange_rounds for stats in self._stats],
            ),
        )
        yield from self._shown(
            OWN,
            _by_number(
                "device",
                "exchange_wait_seconds",
                "That a GPU of the engine waited for the others.",
                [stats.exchange_wait_seconds for stats in self._stats],
            ),
        )
        swaps = CounterMetricFamily(
            "drafter_swaps", "How often draft heads took each other's place.", labels=["engine"]
        )
        for engine, num_swaps in enumerate(self._num_swaps):
            swaps.add_metric([str(engine)], num_swaps)
        yield from self._shown(OWN, swaps)
        failures = CounterMetricFamily(
            "engine_failures", "How often the engine died or hung.", labels=["engine", "code"]
        )
        for engine, counts in enumerate(self._failures):
            for code in ENGINE_FAILURES:
                failures.add_metric([str(engine), code], counts.get(code, 0))
        yield from self._shown(OWN, failures)
        for prefixes, collector in self._families:
            for family in collector.collect():
                yield from self._shown(prefixes, family)

    def _by_position(self, name: str, text: str, counts: Sequence[list[int]]) -> Metric:
        """Counts by engine and position, with zeros up to the depth of drafts."""
        depth = self._info.num_speculative_tokens
        whole = [of + [0] * (depth - len(of)) for of in counts]
        return _by_number("position", name, text, whole)

    def render(self) -> bytes:
        """The exposition text, a moment old: writing it takes milliseconds of the event loop."""
        now = time.monotonic()
        if now - self._page_time > PAGE_MAX_AGE_S:
            self._page, self._page_time = generate_latest(self._registry), now
        return self._page

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, bounds, len(self._stats))
        self._families.append((BOTH, histogram))
        return histogram

    def _shows(
        self, prefixes: tuple[str, ...], kind: type[MetricT], name: str, text: str, *labels: str
    ) -> MetricT:
        metric = kind(name, text, labels, registry=None)
        self._families.append((prefixes, metric))
        return metric

    def _shown(self, prefixes: tuple[str, ...], family: Metric) -> Iterator[Metric]:
        samples = [s for s in family.samples if not s.name.endswith("_created")]
        labels = [{**self._common, **sample.labels} for sample in samples]
        for prefix in prefixes:
            metric = Metric(prefix + family.name, family.documentation, family.type)
            for sample, own in zip(samples, labels, strict=True):
                metric.add_sample(prefix + sample.name, own, sample.value)
            yield metric


def _by_number(
    label: str, name: str, text: str, counts: Sequence[Sequence[float]]
) -> CounterMetricFamily:
    """Counts by engine and number within it."""
    family = CounterMetricFamily(name, text, labels=["engine", label])
    for engine, of in enumerate(counts):
        for number, count in enumerate(of):
            family.add_metric([str(engine), str(number)], count)
    return family


def kv_cache_usage(stats: EngineStats) -> float:
    """Share of the KV pages that sequences hold, between 0 and 1."""
    return 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0


def step_seconds(stats: EngineStats) -> dict[str, float]:
    """Where the time of steps went; the parts add up to the whole."""
    return {
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
        "draft_and_verify": stats.unsplit_seconds,
        "rest": stats.rest_seconds,
    }


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A figure of `EngineStats`, and the prefixes of the names that show it."""

    kind: str
    name: str
    documentation: str
    read: Callable[[EngineStats], float]
    prefixes: tuple[str, ...] = BOTH


def _counter(name: str, text: str, field: str, prefixes: tuple[str, ...] = BOTH) -> EngineMetric:
    return EngineMetric("counter", name, text, attrgetter(field), prefixes)


_gauge = partial(EngineMetric, "gauge")
ENGINE_METRICS = (
    _gauge("num_requests_running", "Sequences in the batch.", lambda s: s.num_running),
    _gauge("num_requests_waiting", "Sequences that wait for a place.", lambda s: s.num_waiting),
    _gauge("kv_cache_usage_perc", "KV pages in use; 1 is 100 percent.", kv_cache_usage),
    _gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", kv_cache_usage, VLLM),
    _counter("prefix_cache_queries", "Prompt tokens looked up.", "prefix_cache_queries"),
    _counter("prefix_cache_hits", "Prompt tokens found.", "prefix_cache_hits"),
    _counter("num_preemptions", "Sequences put back to wait.", "num_preemptions"),
    _counter("prompt_tokens", "Prompt tokens computed.", "num_prompt_tokens", OWN),
    _counter("prompt_tokens", "Prompt tokens, cached too.", "num_served_prompt_tokens", VLLM),
    _counter("generation_tokens", "Tokens generated.", "num_generation_tokens", OWN),
    _counter("spec_decode_num_drafts", "Steps with draft tokens.", "num_drafts"),
    _counter("spec_decode_num_draft_tokens", "Draft tokens proposed.", "num_draft_tokens"),
    _counter("spec_decode_num_accepted_tokens", "Draft tokens kept.", "num_accepted_tokens"),
    _counter(
        "spec_decode_num_forced_tokens",
        "Draft tokens that a grammar forced.",
        "num_forced_tokens",
        OWN,
    ),
    _counter(
        "spec_decode_num_accepted_forced_tokens",
        "Of these, kept.",
        "num_accepted_forced_tokens",
        OWN,
    ),
    _counter(
        "spec_decode_num_copied_tokens",
        "Draft tokens copied from the text so far, in place of a drafter's.",
        "num_copied_tokens",
        OWN,
    ),
    _counter(
        "spec_decode_num_accepted_copied_tokens",
        "Of these, kept.",
        "num_accepted_copied_tokens",
        OWN,
    ),
    _gauge(
        "spec_decode_acceptance_rate",
        "Accepted / drafted tokens since the start.",
        acceptance_rate,
        OWN,
    ),
    _gauge(
        "spec_decode_mean_acceptance_length",
        "1 + accepted tokens / drafts since the start.",
        mean_acceptance_length,
        OWN,
    ),
    _gauge(
        "spec_decode_mean_accepted_length",
        "The same, under the name that dashboards of vLLM read.",
        mean_acceptance_length,
        VLLM,
    ),
    _counter("engine_steps", "Engine steps.", "num_steps", OWN),
    _counter("engine_expert_layers", "Layers of experts that ran.", "num_expert_layers", OWN),
    _counter("engine_distinct_experts", "Experts with rows there.", "num_distinct_experts", OWN),
    _counter("engine_expert_rows", "Rows of all these experts.", "num_expert_rows", OWN),
    _counter("engine_step_failures", "Steps that ended in an exception.", "num_step_failures", OWN),
    _counter(
        "engine_admission_failures",
        "Sequences that the device did not take.",
        "num_admission_failures",
        OWN,
    ),
    _counter("drafter_failures", "Steps that went on without drafts.", "num_drafter_failures", OWN),
)
