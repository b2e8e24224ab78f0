"""Which engine gets a request: the one that holds most of its prompt, within a bound on load."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from openspec.engine.processes.replica import Replica
from openspec.messages import EngineRequest

LOAD_FACTOR = 2
"""How many times the least load an engine may have and still get a request for its prefix."""
OWN_LOAD = 4
"""Sequences that it may have beyond that, where the prefix is the request's own."""


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


def choose(candidates: Sequence[Replica], keys: Sequence[int], num_sequences: int) -> Replica:
    """The candidate for a request of so many sequences, by the keys of its prompt.

    Of those within the bound on load it has the longest known prefix; of equals the least load, and
    then the fewest requests so far. The bound is tight for what many prompts begin with, such as a
    system prompt, so that it soon is everywhere, and loose for the turns of a conversation.
    """
    least = min(candidate.num_sequences for candidate in candidates)
    most = LOAD_FACTOR * (least + num_sequences) - num_sequences

    def is_within(one: Replica) -> bool:
        num_beyond = one.num_sequences - most
        return num_beyond <= 0 or (num_beyond <= OWN_LOAD and one.prefixes.is_own(keys))

    return min(
        filter(is_within, candidates),
        key=lambda one: (-one.prefixes.num_known(keys), one.num_sequences, one.num_placed),
    )
