"""Parts that answers of both kinds share: usage, metrics, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from openspec.messages import acceptance_rate, mean_acceptance_length
from openspec.serve.context import ServerContext
from openspec.serve.generation import Job
from openspec.serve.wire import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    RequestMetrics,
    SpeculationMetrics,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from openspec.text.outputs import Logprob, PositionLogprobs, top_logprobs
from openspec.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def usage_of(job: Job) -> Usage:
    """Token counts so far. A prompt counts once, however many completions it has."""
    num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
    num_output = sum(processor.num_output_tokens for processor in job.processors)
    num_cached = sum(p.num_cached_tokens for p in job.processors[:: job.sampling.n])
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))


def metrics_of(context: ServerContext, job: Job) -> RequestMetrics:
    """Times and speculation of a request whose sequences have ended."""
    first_s = job.first_token_s()
    return RequestMetrics(
        time_to_first_token_ms=None if first_s is None else round(first_s * 1000, 3),
        speculative_decoding=_speculation(context, job),
    )


def _speculation(context: ServerContext, job: Job) -> SpeculationMetrics | None:
    stats = job.speculation() if context.config.speculative_stats else None
    if stats is None:
        return None
    info = context.engine.info
    depth = max(info.num_speculative_tokens, len(stats.num_accepted_tokens_per_pos))
    per_pos = list(stats.num_accepted_tokens_per_pos)
    per_pos += [0] * (depth - len(per_pos))
    at_least = [stats.num_drafts, *per_pos, 0]
    return SpeculationMetrics(
        method=info.method,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=per_pos,
        acceptance_rate=acceptance_rate(stats),
        mean_acceptance_length=mean_acceptance_length(stats),
        acceptance_histogram=[at_least[k] - at_least[k + 1] for k in range(depth + 1)],
        num_spec_steps=stats.num_drafts,
        num_steps=stats.num_steps,
        num_accepted_tokens_per_step=stats.num_accepted_tokens_per_step or UNSET,
    )


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
    """In the form of /v1/completions; `num_top` candidates beside the token itself.

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
    """In the form of /v1/chat/completions."""
    return ChatLogprobs(
        [
            TokenLogprob(
                _shown(token_id, position[token_id], as_ids),
                finite(position[token_id].logprob),
                list(position[token_id].token_bytes),
                [
                    TopLogprob(
                        _shown(other, entry, as_ids),
                        finite(entry.logprob),
                        list(entry.token_bytes),
                    )
                    for other, entry in top_logprobs(position, num_top)
                ],
            )
            for token_id, position in zip(token_ids, positions, strict=True)
        ]
    )


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


def _shown(token_id: int, entry: Logprob, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else entry.decoded_token
