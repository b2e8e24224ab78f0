"""Log-probabilities in the forms of the OpenAI API and of vLLM.

Lists are written position by position: millions of candidates as objects, or in one call of the
encoder, would hold up everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from openspec.serve.shapes.wire import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    encoded_list,
)
from openspec.text.logprobs import Logprob, PositionLogprobs, top_logprobs
from openspec.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)


def token_name(token_id: int, data: bytes, as_id: bool) -> str:
    """A token as text that no other token has: bytes that are no text are spelt out."""
    if as_id or not data:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Callable[[], Iterable[PositionLogprobs | None]],
    offsets: Sequence[int],
    num_top: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """Log-probabilities in the form of /v1/completions, with the `num_top` best of each position.

    `positions` gives those of the tokens, from the first one whenever it is called.

    The token is in its own candidates, with the very same float.
    """

    def name(token_id: int, data: bytes) -> str:
        return token_name(token_id, data, as_ids)

    def top(token_id: int, position: PositionLogprobs | None) -> Mapping[str, float] | None:
        if position is None:
            return None
        own = position[token_id]
        candidates = {name(token_id, tokenizer.token_bytes(token_id)): finite(own.logprob)}
        for other, entry in top_logprobs(position, num_top):
            known = name(other, entry.token_bytes)
            if other != token_id and known in candidates:
                known = f"token_id:{other}"
            candidates[known] = finite(entry.logprob)
        return candidates

    def own(token_id: int, position: PositionLogprobs | None) -> float | None:
        return None if position is None else finite(position[token_id].logprob)

    return CompletionLogprobs(
        text_offset=encoded_list(offsets),
        token_logprobs=encoded_list(map(own, token_ids, positions())),
        tokens=encoded_list(name(one, tokenizer.token_bytes(one)) for one in token_ids),
        top_logprobs=encoded_list(map(top, token_ids, positions())),
    )


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int, as_ids: bool
) -> ChatLogprobs:
    """Log-probabilities in the form of /v1/chat/completions, with the `num_top` best of each."""

    def tokens() -> Iterator[TokenLogprob]:
        for token_id, position in zip(token_ids, positions, strict=True):
            token = _token_logprob(token_id, position[token_id], as_ids)
            tops = top_logprobs(position, num_top)
            token.top_logprobs = [_token_logprob(other, entry, as_ids) for other, entry in tops]
            yield token

    return ChatLogprobs(encoded_list(tokens()))


def _token_logprob(token_id: int, entry: Logprob, as_id: bool) -> TokenLogprob:
    shown = f"token_id:{token_id}" if as_id else entry.decoded_token
    return TokenLogprob(shown, finite(entry.logprob), list(entry.token_bytes))


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, num_top: int
) -> msgspec.Raw | None:
    """VLLM's `prompt_logprobs`: for each prompt token its candidates by id; None for the first."""
    if positions is None:
        return None
    return encoded_list(_candidates(position, num_top) for position in positions)


def _candidates(
    position: PositionLogprobs | None, num_top: int
) -> Mapping[str, PromptLogprob] | None:
    if position is None:
        return None
    token_id = next(iter(position))
    chosen = {token_id: position[token_id]} | dict(top_logprobs(position, num_top))
    return {
        str(other): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
        for other, entry in chosen.items()
    }
