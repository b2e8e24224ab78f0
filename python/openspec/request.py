"""Request: one sequence from submission to its last token, as the scheduler sees it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from openspec.messages import EngineOutput, EngineRequest, SpecDecodeStats, TokenLogprobs


class Phase(enum.Enum):
    """Where a request is in its life. A preempted one waits again."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """State of one sequence. `max_tokens` is already clamped to what the model's length leaves."""

    source: EngineRequest
    arrival: int
    max_tokens: int
    draft_limit: int
    """Drafts per step that settings and request allow."""
    request_id: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """Priority, then arrival: what comes first is served first and preempted last."""
    prompt_len: int = field(init=False)
    num_tokens: int = field(init=False)
    """Known tokens: prompt and output."""
    max_drafts: int = field(init=False)
    """Drafts worth making now: the token after the last draft must still fit the budget."""
    output_token_ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    slot: int = -1
    num_computed: int = 0
    """Tokens with KV while prefilling; in decode it is num_tokens - 1."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache on first admission; -1 before that."""
    needs_prompt_logprobs: bool = field(init=False)
    """Wanted and not delivered yet."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    spec_decode: SpecDecodeStats = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.source.request_id
        self.rank = (self.source.priority, self.arrival)
        self.prompt_len = len(self.source.prompt_token_ids)
        self.num_tokens = self.prompt_len
        self.needs_prompt_logprobs = self.source.sampling.prompt_logprobs is not None
        self.spec_decode = SpecDecodeStats(num_accepted_tokens_per_pos=[0] * self.draft_limit)
        self.max_drafts = max(0, min(self.draft_limit, self.max_tokens - 1))

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.source.prompt_token_ids + self.output_token_ids

    def append(self, token_ids: list[int]) -> None:
        """Takes the tokens of one step."""
        self.output_token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.max_drafts = min(self.draft_limit, self.max_tokens - len(self.output_token_ids) - 1)

    def last_output(self, finish_reason: str, error: str | None = None) -> EngineOutput:
        """The output that ends a request which got no token in this step."""
        return EngineOutput(
            request_id=self.request_id,
            finish_reason=finish_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            spec_decode=self.spec_decode,
            error=error,
        )
