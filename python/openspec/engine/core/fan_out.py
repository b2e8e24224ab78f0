"""From a prompt and its sampling parameters to the sequences that the engine runs."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

import msgspec

from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions


def engine_request(
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    *,
    bad_word_ids: Sequence[list[int]],
    default_seed: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    owner: str = "",
    speculative: SpeculativeOptions | None = None,
    grammar: str = "",
) -> EngineRequest:
    """A prompt and its sampling parameters as the engine takes them.

    The seed is the request's, else `default_seed` (the engine's setting), else random. EOS ids join
    the stop ids unless the request ignores them; `bad_word_ids` are its `bad_words` in tokens.
    """
    seed = sampling.seed if sampling.seed is not None else default_seed
    if seed is None:
        seed = secrets.randbits(64)
    stop_token_ids = list(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids += [token for token in eos_token_ids if token not in stop_token_ids]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=msgspec.structs.replace(
            sampling,
            seed=_signed_64(seed),
            stop_token_ids=stop_token_ids,
            bad_word_ids=[*sampling.bad_word_ids, *bad_word_ids],
            structured_outputs=None,
        ),
        priority=priority,
        cache_salt=cache_salt,
        owner=owner,
        speculative=speculative or SpeculativeOptions(),
        grammar=grammar,
    )


def sequence_ids(request: EngineRequest) -> list[str]:
    """What the outputs of a request's sequences are called: `request_id-0` ... where n > 1."""
    num, request_id = request.sampling.n, request.request_id
    return [request_id] if num == 1 else [f"{request_id}-{index}" for index in range(num)]


def fan_out(request: EngineRequest) -> list[EngineRequest]:
    """The `n` sequences of a request, which share its prompt; number i has seed + i."""
    sampling = request.sampling
    if sampling.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=request_id,
            sampling=msgspec.structs.replace(
                sampling,
                n=1,
                seed=_signed_64((sampling.seed or 0) + index),
                # One sequence's prompt log-probabilities serve all n.
                prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
            ),
        )
        for index, request_id in enumerate(sequence_ids(request))
    ]


def _signed_64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
