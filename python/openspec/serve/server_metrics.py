"""What /metrics shows: the engine's counters, latencies as clients see them, the server's doings.

The measures of speculation are defined in `openspec.messages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from openspec.messages import EngineInfo, EngineStats, acceptance_rate, mean_acceptance_length
from openspec.serve.prometheus import Family, Histogram, label_text

FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
_TOKENS = tuple(float(unit * 10**power) for power in range(6) for unit in (1, 2, 5))

OWN, VLLM, BOTH = ("openspec:",), ("vllm:",), ("openspec:", "vllm:")


class ServerMetrics:
    """Every metric of one server; all of them exist, at zero, from the start."""

    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self._info = info
        self._common = label_text({"model_name": model_name, "engine": "0"})
        self._families: list[tuple[tuple[str, ...], Family | Histogram]] = []
        self._engine = [
            (self._family(metric.name, metric.kind, metric.documentation, metric.prefixes), metric)
            for metric in _ENGINE_METRICS
        ]
        self.accepted_per_pos = self._family(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Accepted draft tokens by position in the draft.",
            BOTH,
        )
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
        self.success = self._family(
            "request_success_total", "counter", "Finished sequences by reason.", BOTH
        )
        self.rejections = self._family(
            "admission_rejections_total", "counter", "Requests answered 503.", BOTH
        )
        self.http = self._family(
            "http_requests_total", "counter", "Requests by endpoint and status.", OWN
        )
        self.load = self._family("server_load", "gauge", "Generation requests in flight.", OWN)
        self.ready = self._family("ready", "gauge", "1 if new requests are welcome.", OWN)
        cache = self._family("cache_config_info", "gauge", "The KV cache.", BOTH)
        cache.set(1, block_size=str(info.page_size), num_gpu_blocks=str(info.num_pages))
        engine = self._family("engine_info", "gauge", "The engine.", OWN)
        engine.set(
            1,
            method=info.method,
            num_speculative_tokens=str(info.num_speculative_tokens),
            dtype=info.dtype,
            device=info.device,
        )
        for reason in FINISH_REASONS:
            self.success.set(0, finished_reason=reason)
        for reason in ("queue_full", "draining"):
            self.rejections.set(0, reason=reason)
        self.update(EngineStats())

    def update(self, stats: EngineStats) -> None:
        """Takes over the engine's counters."""
        for family, metric in self._engine:
            family.set(metric.read(stats))
        accepted = stats.num_accepted_tokens_per_pos
        for position in range(max(self._info.num_speculative_tokens, len(accepted))):
            count = accepted[position] if position < len(accepted) else 0
            self.accepted_per_pos.set(count, position=str(position))

    def render(self) -> bytes:
        """The exposition text."""
        lines: list[str] = []
        for prefixes, family in self._families:
            for prefix in prefixes:
                lines.extend(family.lines(prefix, self._common))
        return ("\n".join(lines) + "\n").encode()

    def _family(self, name: str, kind: str, text: str, prefixes: tuple[str, ...]) -> Family:
        family = Family(name, kind, text)
        self._families.append((prefixes, family))
        return family

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, bounds)
        self._families.append((BOTH, histogram))
        return histogram


def kv_cache_usage(stats: EngineStats) -> float:
    """Share of the KV pages that sequences hold, between 0 and 1."""
    return 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0


@dataclass(frozen=True, slots=True)
class _EngineMetric:
    name: str
    kind: str
    prefixes: tuple[str, ...]
    documentation: str
    read: Callable[[EngineStats], float]


def _counter(name: str, documentation: str, read: Callable[[EngineStats], float]) -> _EngineMetric:
    return _EngineMetric(f"{name}_total", "counter", BOTH, documentation, read)


def _gauge(
    name: str,
    documentation: str,
    read: Callable[[EngineStats], float],
    prefixes: tuple[str, ...] = BOTH,
) -> _EngineMetric:
    return _EngineMetric(name, "gauge", prefixes, documentation, read)


_ENGINE_METRICS = (
    _gauge("num_requests_running", "Sequences in the batch.", lambda s: s.num_running),
    _gauge("num_requests_waiting", "Sequences that wait for a place.", lambda s: s.num_waiting),
    _gauge("kv_cache_usage_perc", "KV pages in use; 1 is 100 percent.", kv_cache_usage),
    _gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", kv_cache_usage, VLLM),
    _counter("prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prefix_cache_queries),
    _counter("prefix_cache_hits", "Prompt tokens found.", lambda s: s.prefix_cache_hits),
    _counter("num_preemptions", "Sequences put back to wait.", lambda s: s.num_preemptions),
    _counter("prompt_tokens", "Prompt tokens processed.", lambda s: s.num_prompt_tokens),
    _counter("generation_tokens", "Tokens generated.", lambda s: s.num_generation_tokens),
    _counter("spec_decode_num_drafts", "Steps with draft tokens.", lambda s: s.num_drafts),
    _counter(
        "spec_decode_num_draft_tokens", "Draft tokens proposed.", lambda s: s.num_draft_tokens
    ),
    _counter(
        "spec_decode_num_accepted_tokens", "Draft tokens kept.", lambda s: s.num_accepted_tokens
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
    _EngineMetric("engine_steps_total", "counter", OWN, "Engine steps.", lambda s: s.num_steps),
    _EngineMetric(
        "engine_step_failures_total",
        "counter",
        OWN,
        "Steps that ended in an exception.",
        lambda s: s.num_step_failures,
    ),
    _EngineMetric(
        "drafter_failures_total",
        "counter",
        OWN,
        "Steps that went on without drafts.",
        lambda s: s.num_drafter_failures,
    ),
)
