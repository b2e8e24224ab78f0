"""Prompts with a common beginning: one sequence computes it, the others wait for its pages.

A sequence takes cached pages when it gets its slot. So it gets none while another one is about to
compute a page that both begin with: it *follows* that one, its leader, and is let go when the pages
are there, or when the leader leaves its slot, for whatever reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from openspec.engine.core.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Lead:
    """What `leader` still computes of another sequence's first `num_shared` tokens."""

    leader: Request
    stay: int
    num_shared: int

    @property
    def is_on(self) -> bool:
        """Whether the pages are not there yet and the leader is at it."""
        return self.leader.stay == self.stay and self.leader.num_computed < self.num_shared

    @property
    def is_in_flight(self) -> bool:
        """Whether the steps in flight bring all of it."""
        return self.leader.num_scheduled >= self.num_shared


class SharedPrompts:
    """Who waits for whom."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._following: list[tuple[Request, Lead]] = []

    def lead(self, request: Request, running: Iterable[Request]) -> Lead | None:
        """The running sequence that computes what `request` needs next; None: nobody does."""
        if request.needs_prompt_logprobs:
            return None  # computes every row itself
        tokens, salt = request.token_ids, request.source.cache_salt
        for other in running:
            is_on_its_way = (
                other.phase is Phase.PREFILLING or other.num_computed < other.num_scheduled
            )
            if is_on_its_way and other.source.cache_salt == salt:
                num_shared = self._num_shared(tokens, other.token_ids)
                if other.num_computed < num_shared:
                    return Lead(other, other.stay, num_shared)
        return None

    def follow(self, request: Request, lead: Lead) -> None:
        """From here on the request waits, until `take_free` returns it."""
        self._following.append((request, lead))

    def take_free(self) -> list[Request]:
        """Those whose pages are there, or whose leaders have left."""
        if not self._following:
            return []
        free = [request for request, lead in self._following if not lead.is_on]
        if free:
            self._following = [pair for pair in self._following if pair[1].is_on]
        return free

    def _num_shared(self, tokens: list[int], others: list[int]) -> int:
        """Tokens in the full pages that both begin with; one is left to run, for its logits."""
        size = self._page_size
        low, high = 0, min((len(tokens) - 1) // size, len(others) // size)
        if tokens[:size] != others[:size]:
            return 0
        while low < high:  # the first `low` pages are equal
            middle = (low + high + 1) // 2
            part = slice(low * size, middle * size)
            if tokens[part] == others[part]:
                low = middle
            else:
                high = middle - 1
        return low * size
