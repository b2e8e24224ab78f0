"""A replica's figures as metrics of Ray, which its dashboard and its Prometheus endpoint show.

Ray puts `ray_` before the names, and tags of its own for deployment and replica beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ray.serve import metrics

from openspec.messages import EngineStats, acceptance_rate, mean_acceptance_length
from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.metrics import kv_cache_usage

PERIOD_S = 2.0
_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences in the batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences that wait for a place.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": ("KV pages in use; 1 is 100 percent.", kv_cache_usage),
    "spec_decode_acceptance_rate": ("Accepted / drafted tokens.", acceptance_rate),
    "spec_decode_mean_acceptance_length": ("1 + accepted / drafts.", mean_acceptance_length),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], int]]] = {
    "prompt_tokens": ("Prompt tokens processed.", lambda s: s.num_prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.num_generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up.", lambda s: s.prefix_cache_queries),
    "prefix_cache_hits": ("Prompt tokens found.", lambda s: s.prefix_cache_hits),
    "num_preemptions": ("Sequences put back to wait.", lambda s: s.num_preemptions),
    "spec_decode_num_drafts": ("Steps with draft tokens.", lambda s: s.num_drafts),
    "spec_decode_num_draft_tokens": ("Draft tokens proposed.", lambda s: s.num_draft_tokens),
    "spec_decode_num_accepted_tokens": ("Draft tokens kept.", lambda s: s.num_accepted_tokens),
    "engine_step_failures": ("Steps that ended in an exception.", lambda s: s.num_step_failures),
}


async def export(context: ServerContext) -> None:
    """Goes on until it is cancelled."""
    tags = {"model_name": context.model_name}
    gauges = {
        name: metrics.Gauge(f"openspec_{name}", text, ("model_name",))
        for name, (text, _) in _GAUGES.items()
    }
    counters = {
        name: metrics.Counter(f"openspec_{name}", text, ("model_name",))
        for name, (text, _) in _COUNTERS.items()
    }
    last = dict.fromkeys(counters, 0)
    while True:
        stats = await context.stats()
        for name, gauge in gauges.items():
            gauge.set(_GAUGES[name][1](stats), tags)
        for name, counter in counters.items():
            total = _COUNTERS[name][1](stats)
            if total > last[name]:  # Ray takes no increment of 0
                counter.inc(total - last[name], tags)
                last[name] = total
        await asyncio.sleep(PERIOD_S)
