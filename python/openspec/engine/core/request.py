"""Request: one sequence from submission to its last token; StepPlan: what one step computes."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from openspec.messages import EngineOutput, EngineRequest, SpecDecodeStats, TokenLogprobs

Span = tuple[int, int, int]
"""(slot, num_new_tokens, max_drafts)."""


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
    draft_depth: int
    """How many of these follow each other, at most."""
    grammar: Future[Any] | None = None
    """What the output must be, once it is loaded; None: anything."""
    grammar_tally: Any = None
    """What the sequences of the same request take for their masks; None without a grammar."""
    request_id: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """Priority, then arrival: what comes first is served first and preempted last."""
    allowed_ids: frozenset[int] | None = field(init=False)
    """None: all of the vocabulary."""
    prompt_len: int = field(init=False)
    num_tokens: int = field(init=False)
    """Known tokens: prompt and output."""
    output_token_ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    slot: int = -1
    stay: int = 0
    """Which of its stays in a slot this is; what a step of an earlier one brings is void."""
    num_scheduled: int = 0
    """Tokens of this stay's prompt (when resumed, output so far included) that are computed, or
    will be by the steps in flight."""
    num_computed: int = 0
    """Those that are computed."""
    num_yielded: int = 0
    """Prompt rows that steps gave to later sequences before this one, whose prompt was not done."""
    num_cached_seen: int = -1
    """Tokens found in the prefix cache when it was looked at in the queue; -1 before that."""
    num_steps_in_flight: int = 0
    """Steps in flight that choose a token of this request, at least one each."""
    is_held: bool = False
    """Its next mask is made beside the steps, which have nothing to do for it until then."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache on first admission; -1 before that."""
    needs_prompt_logprobs: bool = field(init=False)
    """Wanted and not delivered yet."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    spec_decode: SpecDecodeStats = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.source.request_id
        self.rank = (self.source.priority, self.arrival)
        allowed = self.source.sampling.allowed_token_ids
        self.allowed_ids = None if allowed is None else frozenset(allowed)
        self.prompt_len = len(self.source.prompt_token_ids)
        self.num_tokens = self.prompt_len
        self.needs_prompt_logprobs = self.source.sampling.prompt_logprobs is not None
        self.spec_decode = SpecDecodeStats(
            num_accepted_tokens_per_pos=[0] * self.draft_depth,
            num_drafts_per_pos=[0] * self.draft_depth,
        )

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far; not to be changed."""
        prompt = self.source.prompt_token_ids
        return prompt + self.output_token_ids if self.output_token_ids else prompt

    @property
    def num_wanted(self) -> int:
        """Output tokens that are still to be planned for if each step in flight brings only one."""
        if self.is_held:
            return 0
        # Without output wanted one token is chosen all the same.
        wanted = max(self.max_tokens, 1)
        return wanted - len(self.output_token_ids) - self.num_steps_in_flight

    @property
    def max_drafts(self) -> int:
        """Drafts worth making now: the token after the last draft must still fit the budget."""
        return max(0, min(self.draft_limit, self.num_wanted - 1))

    def num_permitted(self, token_ids: list[int]) -> int:
        """With `allowed_ids`, how many of the next tokens come before one that may not be there.

        The core chooses such a token where the request's limits leave none.
        """
        allowed = self.allowed_ids or ()
        sampling, known = self.source.sampling, list(self.token_ids)
        num_output = len(self.output_token_ids)
        for index, token_id in enumerate(token_ids):
            known.append(token_id)
            is_early = num_output + index < sampling.min_tokens
            if (
                token_id not in allowed
                or (is_early and token_id in sampling.stop_token_ids)
                or any(known[-len(word) :] == word for word in sampling.bad_word_ids)
            ):
                return index
        return len(token_ids)

    def append(self, token_ids: list[int]) -> None:
        """Takes the tokens of one step."""
        self.output_token_ids += token_ids
        self.num_tokens += len(token_ids)

    def last_output(
        self, finish_reason: str, error: str | None = None, is_refused: bool = False
    ) -> EngineOutput:
        """The output that ends a request which got no token in this step."""
        return EngineOutput(
            request_id=self.request_id,
            finish_reason=finish_reason,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            spec_decode=self.spec_decode,
            error=error,
            is_refused=is_refused,
        )


@dataclass(slots=True)
class StepPlan:
    """Spans of one step and, in the same order, the requests that they belong to."""

    spans: list[Span] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    stays: list[int] = field(init=False)
    """The requests' stays when the step was planned."""

    def __post_init__(self) -> None:
        self.stays = [request.stay for request in self.requests]

    @property
    def num_rows(self) -> int:
        """Rows of the step, if every draft finds a place."""
        return sum(num_new_tokens + max_drafts for _, num_new_tokens, max_drafts in self.spans)

    def plain(self) -> StepPlan:
        """This step without drafts, for the requests that have not left since."""
        left = [
            (request, (slot, num_new, 0))
            for request, stay, (slot, num_new, _) in zip(
                self.requests, self.stays, self.spans, strict=True
            )
            if request.stay == stay
        ]
        return StepPlan([span for _, span in left], [request for request, _ in left])
