"""What travels between the front (text, HTTP) and the engine core (token ids): plain values.

Encoded with msgpack between processes, passed as they are within one.
"""

from __future__ import annotations

import msgspec

from openspec.sampling_params import SamplingParams


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's own say in speculation. None means the server's setting."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    detailed: bool = False
    """Record acceptance step by step."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate. `n > 1` is fanned out before it gets here.

    `sampling.seed` is always set here; `stop_token_ids` already holds the model's EOS ids unless
    the request ignores them. Stop strings are the front's business.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    cache_salt: str = ""
    speculative: SpeculativeOptions = SpeculativeOptions()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Entry 0 is the token itself, then the best in falling order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class SpecDecodeStats(msgspec.Struct, kw_only=True):
    """A request's speculation so far. Terms as vLLM's; see metrics.py for the definitions."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    num_steps: int = 0
    """Steps that produced at least one output token, drafted or not."""
    num_accepted_tokens_per_step: list[int] = msgspec.field(default_factory=list)
    """If asked for: of these steps, in order. A step's output is its accepted drafts and then one
    token more, unless the answer ended with a draft."""


class EngineOutput(msgspec.Struct, kw_only=True):
    """News about one request after a step."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt tokens 1..; comes once, before the first token."""
    finish_reason: str | None = None
    """None, "stop" (a stop id, the last of token_ids), "length", "abort" or "error"."""
    num_cached_tokens: int = 0
    spec_decode: SpecDecodeStats | None = None
    """So far. Set on the last output, and on every one if there are stop strings: the front may end
    the request at any of those."""
    error: str | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges and counters of the engine core; counters never fall."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    num_drafter_failures: int = 0
    num_step_failures: int = 0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine core tells the front once it is ready."""

    model: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    method: str
    num_speculative_tokens: int
    dtype: str
    device: str
    memory_plan: dict[str, int]
    startup_seconds: float
