"""Log-probabilities in the forms of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from openspec.serve.shapes.wire import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)
from openspec.text.outputs import Logprob, PositionLogprobs, top_logprobs
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
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    num_top: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """Log-probabilities in the form of /v1/completions, with the `num_top` best of each position.

    The token is in its own candidates, with the very same float.
    """
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        names.append(token_name(token_id, tokenizer.token_bytes(token_id), as_ids))
        if position is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(finite(position[token_id].logprob))
        candidates = {names[-1]: finite(position[token_id].logprob)}
        for other, entry in top_logprobs(position, num_top):
            name = token_name(other, entry.token_bytes, as_ids)
            if other != token_id and name in candidates:
                name = f"token_id:{other}"
            candidates[name] = finite(entry.logprob)
        tops.append(candidates)
    return CompletionLogprobs(
        text_offset=list(offsets), token_logprobs=values, tokens=names, top_logprobs=tops
    )


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int, as_ids: bool
) -> ChatLogprobs:
    """Log-probabilities in the form of /v1/chat/completions, with the `num_top` best of each."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        token = _token_logprob(token_id, position[token_id], as_ids)
        tops = top_logprobs(position, num_top)
        token.top_logprobs = [_token_logprob(other, entry, as_ids) for other, entry in tops]
        content.append(token)
    return ChatLogprobs(content)


def _token_logprob(token_id: int, entry: Logprob, as_id: bool) -> TokenLogprob:
    shown = f"token_id:{token_id}" if as_id else entry.decoded_token
    return TokenLogprob(shown, finite(entry.logprob), list(entry.token_bytes))


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None, num_top: int
) -> PromptLogprobs | None:
    """VLLM's `prompt_logprobs`: for each prompt token its candidates by id; None for the first."""
    if positions is None:
        return None
    result: PromptLogprobs = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        token_id = next(iter(position))
        chosen = {token_id: position[token_id]} | dict(top_logprobs(position, num_top))
        result.append(
            {
                str(other): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
                for other, entry in chosen.items()
            }
        )
    return result
