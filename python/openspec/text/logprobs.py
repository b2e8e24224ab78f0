"""Log-probabilities as callers see them, described only where they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from openspec.messages import TokenLogprobs
from openspec.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position."""

    logprob: float
    rank: int
    """1 is the most likely token of the vocabulary."""
    decoded_token: str
    """The token alone as text; U+FFFD where it is no whole character."""
    token_bytes: bytes


PositionLogprobs = Mapping[int, Logprob]
"""By token id: first the token itself, then the best others in falling order."""


def top_logprobs(position: PositionLogprobs, num: int) -> list[tuple[int, Logprob]]:
    """The `num` best tokens of a position, best first."""
    return sorted(position.items(), key=lambda item: item[1].rank)[:num]


RowT = TypeVar("RowT", bound=PositionLogprobs | None, covariant=True)


class LogprobRows(Sequence[RowT], Generic[RowT]):
    """Positions in a row. Each is described when it is asked for, and not kept.

    A long answer has millions of descriptions, which the collector of garbage would look at while
    it holds up everything else.
    """

    def __init__(self, tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]) -> None:
        """An entry that is None is a position without any."""
        self._tokenizer, self._entries = tokenizer, entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> RowT: ...
    @overload
    def __getitem__(self, place: slice) -> LogprobRows[RowT]: ...

    def __getitem__(self, place: int | slice) -> RowT | LogprobRows[RowT]:
        if isinstance(place, slice):
            return LogprobRows(self._tokenizer, self._entries[place])
        entry = self._entries[place]
        return None if entry is None else self._described(entry)  # type: ignore[return-value]

    def _described(self, entry: TokenLogprobs) -> PositionLogprobs:
        described: dict[int, Logprob] = {}
        for place, (token_id, logprob) in enumerate(
            zip(entry.token_ids, entry.logprobs, strict=True)
        ):
            if token_id not in described:
                described[token_id] = Logprob(
                    logprob,
                    place or entry.rank,
                    self._tokenizer.token_text(token_id),
                    self._tokenizer.token_bytes(token_id),
                )
        return described
