"""A bar with the speed and acceptance of the run under way."""

from __future__ import annotations

import sys
from time import perf_counter

from tqdm import tqdm  # type: ignore[import-untyped]

from openspec.bench.client import Completion


class Progress:
    """Counts requests of the whole benchmark; silent where nobody watches."""

    def __init__(self, num_requests: int) -> None:
        self._bar = tqdm(
            total=num_requests, unit="req", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        self._start_s = 0.0
        self._tokens = self._drafted = self._accepted = 0

    def begin(self, name: str) -> None:
        """A run starts."""
        self._bar.set_description(name)
        self._start_s = perf_counter()
        self._tokens = self._drafted = self._accepted = 0

    def advance(self, completion: Completion) -> None:
        """A request is through."""
        self._tokens += len(completion.token_ids)
        if completion.speculation is not None:
            self._drafted += completion.speculation.num_draft_tokens
            self._accepted += completion.speculation.num_accepted_tokens
        shown = f"{self._tokens / (perf_counter() - self._start_s):.0f} tok/s"
        if self._drafted:
            shown += f", {self._accepted / self._drafted:.0%} accepted"
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """The benchmark is over."""
        self._bar.close()
