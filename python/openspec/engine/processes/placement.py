"""Which engine gets a request: the one that holds most of its prompt, within a bound on load."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from openspec.messages import EngineRequest

LOAD_FACTOR = 2
"""How many times the least load an engine may have and still get a request for its prefix."""
OWN_LOAD = 4
"""Sequences that it may have beyond that, where the prefix is the request's own."""
MAX_KEYS = 1 << 17


class SentPrefixes:
    """Prefixes of the prompts that an engine was sent, by page; the longest unused are forgotten.

    It bets on what the engine's prefix cache holds. Being wrong costs a prompt's computation.
    """

    def __init__(self, num_pages: int) -> None:
        """Remembers as many pages as the engine has."""
        self._most = min(num_pages, MAX_KEYS)
        self._keys: OrderedDict[int, bool] = OrderedDict()
        """Whether a page followed in a prompt."""

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[int]) -> int:
        """How many of a prompt's pages are known, from the first one on."""
        for place, key in enumerate(keys):
            if key not in self._keys:
                return place
        return len(keys)

    def is_own(self, keys: Sequence[int]) -> bool:
        """Whether the prompt continues one that was sent, and not only begins like others."""
        num_known = self.num_known(keys)
        return num_known > 0 and not self._keys[keys[num_known - 1]]

    def add(self, keys: Sequence[int]) -> None:
        """Remembers the pages of a prompt that was sent."""
        # The first page last: it is forgotten after those that are of no use without it.
        has_next = False
        for key in reversed(keys[: self._most]):
            self._keys[key] = has_next or self._keys.get(key, False)
            self._keys.move_to_end(key)
            has_next = True
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        self._keys.clear()


def page_keys(request: EngineRequest, page_size: int) -> list[int]:
    """A key for each full page of the prompt, which stands for all tokens up to its end.

    Python's hash of bytes is keyed by a secret of this process: clients cannot make two meet.
    """
    tokens = array("I", request.prompt_token_ids)
    data, num_bytes = tokens.tobytes(), page_size * tokens.itemsize
    key = hash(request.cache_salt)
    keys = []
    # The last token is computed in any case.
    for end in range(num_bytes, len(data) - tokens.itemsize + 1, num_bytes):
        key = hash((key, data[end - num_bytes : end]))
        keys.append(key)
    return keys


class Candidate(Protocol):
    """An engine that takes requests."""

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine has not ended yet."""

    num_placed: int
    """Requests that it got."""
    prefixes: SentPrefixes
    """What it was sent."""


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose(candidates: Sequence[CandidateT], keys: Sequence[int], num_sequences: int) -> CandidateT:
    """The candidate for a request of so many sequences, by the keys of its prompt.

    Of those within the bound on load it has the longest known prefix; of equals the least load, and
    then the fewest requests so far. The bound is tight for what many prompts begin with, such as a
    system prompt, so that it soon is everywhere, and loose for the turns of a conversation.
    """
    least = min(candidate.num_sequences for candidate in candidates)
    most = LOAD_FACTOR * (least + num_sequences) - num_sequences

    def is_within(one: CandidateT) -> bool:
        num_beyond = one.num_sequences - most
        return num_beyond <= 0 or (num_beyond <= OWN_LOAD and one.prefixes.is_own(keys))

    return min(
        filter(is_within, candidates),
        key=lambda one: (-one.prefixes.num_known(keys), one.num_sequences, one.num_placed),
    )
