"""From a request's sampling parameters to what the core keeps for its sequence."""

from __future__ import annotations

from openspec import _C
from openspec.engine.request import Request


def sequence_params(request: Request) -> _C.SequenceParams:
    """The core's parameters of a request that is about to take a slot."""
    sampling = request.source.sampling
    return _C.SequenceParams(
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed or 0,
        min_tokens=sampling.min_tokens,
        # Without output wanted, one token is chosen all the same, and dropped by the scheduler.
        max_tokens=max(request.max_tokens, 1),
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=list(sampling.logit_bias.items()),
        allowed_token_ids=sampling.allowed_token_ids or (),
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        raw_logprobs=sampling.logprobs_mode == "raw",
        num_prompt_logprobs=(sampling.prompt_logprobs or 0)
        if request.needs_prompt_logprobs
        else -1,
    )
