"""From one request with `n` completions to the sequences that the engine runs."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

import msgspec

from openspec.messages import EngineRequest, SpeculativeOptions
from openspec.sampling_params import SamplingParams


def fan_out(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    *,
    default_seed: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    speculative: SpeculativeOptions | None = None,
) -> list[EngineRequest]:
    """The `n` engine requests of one request, ids `request_id-0` ...; completion i has seed + i.

    The seed is the request's, else `default_seed` (the engine's setting), else random. EOS ids join
    the stop ids unless the request ignores them.
    """
    seed = sampling.seed if sampling.seed is not None else default_seed
    if seed is None:
        seed = secrets.randbits(64)
    stop_token_ids = list(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids += [token for token in eos_token_ids if token not in stop_token_ids]
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt_token_ids=list(prompt_token_ids),
            sampling=msgspec.structs.replace(
                sampling,
                n=1,
                seed=_signed_64(seed + index),
                stop_token_ids=stop_token_ids,
                # One sequence's prompt log-probabilities serve all n.
                prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
            ),
            priority=priority,
            cache_salt=cache_salt,
            speculative=speculative or SpeculativeOptions(),
        )
        for index in range(sampling.n)
    ]


def _signed_64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
