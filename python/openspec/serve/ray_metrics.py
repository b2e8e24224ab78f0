"""A replica's figures as metrics of Ray, which its dashboard and its Prometheus endpoint show.

Ray puts `ray_` before the names, and tags of its own for deployment and replica beside them.
"""

from __future__ import annotations

import asyncio

from ray.serve import metrics

from openspec.serve.generation.context import ServerContext
from openspec.serve.generation.metrics import ENGINE_METRICS

PERIOD_S = 2.0


async def export(context: ServerContext) -> None:
    """Goes on until it is cancelled."""
    tags = {"model_name": context.model_name}
    shown = [one for one in ENGINE_METRICS if "openspec:" in one.prefixes]
    gauges = {
        one: metrics.Gauge(f"openspec_{one.name}", one.documentation, ("model_name",))
        for one in shown
        if one.kind == "gauge"
    }
    counters = {
        one: metrics.Counter(f"openspec_{one.name}", one.documentation, ("model_name",))
        for one in shown
        if one.kind == "counter"
    }
    last = dict.fromkeys(counters, 0.0)
    while True:
        stats = await context.stats()
        for one, gauge in gauges.items():
            gauge.set(one.read(stats), tags)
        for one, counter in counters.items():
            total = one.read(stats)
            if total > last[one]:  # Ray takes no increment of 0
                counter.inc(total - last[one], tags)
                last[one] = total
        await asyncio.sleep(PERIOD_S)
