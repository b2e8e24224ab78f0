"""StatsLog: one line of statistics per interval while there is work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from openspec.messages import EngineStats, acceptance_rate, mean_acceptance_length

logger = logging.getLogger(__name__)

_LONGEST_STEP_S = 1.0  # a longer gap between ticks is idleness


class StatsLog:
    """Writes what happened since the last line."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._busy_s = 0.0
        self._last_tick = time.monotonic()
        self._last = EngineStats()

    def tick(self, read_stats: Callable[[], EngineStats]) -> None:
        """Called after every step; cheap unless a line is due."""
        now = time.monotonic()
        self._busy_s += min(now - self._last_tick, _LONGEST_STEP_S)
        self._last_tick = now
        if self._interval_s <= 0 or self._busy_s < self._interval_s:
            return
        stats = read_stats()
        logger.info("%s", self._line(stats, self._busy_s))
        self._busy_s = 0.0
        self._last = stats

    def _line(self, stats: EngineStats, busy_s: float) -> str:
        last = self._last
        new = EngineStats(
            num_prompt_tokens=stats.num_prompt_tokens - last.num_prompt_tokens,
            num_generation_tokens=stats.num_generation_tokens - last.num_generation_tokens,
            prefix_cache_queries=stats.prefix_cache_queries - last.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits - last.prefix_cache_hits,
            num_drafts=stats.num_drafts - last.num_drafts,
            num_draft_tokens=stats.num_draft_tokens - last.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens - last.num_accepted_tokens,
        )
        num_used = stats.num_pages - stats.num_free_pages
        return (
            f"prompt {new.num_prompt_tokens / busy_s:.1f} tok/s, "
            f"generation {new.num_generation_tokens / busy_s:.1f} tok/s, "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"KV pages {100 * num_used / max(stats.num_pages, 1):.1f}%, "
            f"prefix hits {100 * new.prefix_cache_hits / max(new.prefix_cache_queries, 1):.1f}%, "
            f"acceptance length {mean_acceptance_length(new):.2f}, "
            f"acceptance rate {100 * acceptance_rate(new):.1f}%"
        )
