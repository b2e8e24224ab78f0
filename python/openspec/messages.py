"""What travels between the front (text, HTTP) and the engine core (token ids): plain values.

Encoded with msgpack between processes, passed as they are within one. The measures of speculation
are defined here and nowhere else:

* A *draft* is one step of one sequence with at least one draft token.
* *Acceptance rate*: accepted draft tokens / draft tokens. Of a tree at most one draft token per
  depth can be accepted.
* *Mean acceptance length*: 1 + accepted draft tokens / drafts. The one is the token that the target
  adds itself, so plain decoding has length 1.
* *Acceptance at position i*: drafts whose token i (of a tree: at depth i) was accepted / drafts
  that reached position i: those with a token there. So a short draft is not a wrong one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from openspec.errors import RequestError, wrong_type
from openspec.step_detail import StepDetail

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_BAD_WORDS = 1024
MAX_N = 128
MAX_ALLOWED_IDS_OF_ALL = 1 << 21  # `allowed_token_ids` times `n`

NumberT = TypeVar("NumberT", int, float)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an answer must be: exactly one of the first six fields. As vLLM has it."""

    json: dict[str, object] | str | None = None
    """JSON of this schema."""
    regex: str | None = None
    """A text that matches this pattern as a whole."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in EBNF (`root ::= ...`) or in Lark (`start: ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: dict[str, object] | str | None = None
    """xgrammar's structural tag: free text and grammars by turns."""
    disable_any_whitespace: bool = False
    """JSON on one line."""
    disable_fallback: bool = False
    """Accepted; there is no fallback."""
    disable_additional_properties: bool = False
    """Accepted: there are none unless a schema asks for them."""
    whitespace_pattern: str | None = None
    """Not supported."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen and when it ends.

    Every field acts exactly the same with speculation as without.
    """

    n: int = 1
    """Independent completions; number i is seeded with seed + i."""
    temperature: float = 1.0
    """0 chooses the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = msgspec.field(default_factory=list)
    """Texts that the output does not spell, at the start of a word or inside one."""
    bad_word_ids: list[list[int]] = msgspec.field(default_factory=list)
    """The texts of `bad_words` as token ids: the last of a list does not follow the others."""
    seed: int | None = None
    """64-bit; None draws one at random."""
    max_tokens: int = 16
    min_tokens: int = 0
    """Stop ids are masked, and stop strings ignored, before this many tokens are out."""
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: none; n: of the chosen token and of the n most likely."""
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    """Of the model's own distribution, or of the one the token was drawn from."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must be. Does not cross to the engine, which gets a compiled grammar."""

    def typed(self) -> SamplingParams:
        """These parameters, every field of its type; `stop` may be one string, as vLLM takes it.

        Raises:
            RequestError: with the field and what it should be.
        """
        fields = msgspec.structs.asdict(self)
        if isinstance(self.stop, str):
            fields["stop"] = [self.stop]
        try:
            return msgspec.convert(fields, SamplingParams)
        except msgspec.ValidationError as error:
            raise RequestError(f"sampling parameters: {wrong_type(error)}") from None

    def check(self, vocab_size: int, *, has_eos: bool = False) -> None:
        """Checks every range; `has_eos`: the model's EOS ids, any number, are among the stop ids.

        Raises:
            RequestError: with the parameter, its value and the allowed range.
        """
        _check_range("n", self.n, 1, MAX_N)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_low_open=True)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_count("stop", len(self.stop), MAX_STOP_STRINGS, "stop strings")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}",
                    "stop",
                )
        remedy = "; allowed_token_ids lists what may be said instead"
        _check_count("bad_words", len(self.bad_words), MAX_BAD_WORDS, remedy=remedy)
        for text in self.bad_words:
            if not 0 < len(text.strip()) <= len(text) <= MAX_STOP_STRING_CHARS:
                raise RequestError(
                    f"each of bad_words has 1 to {MAX_STOP_STRING_CHARS} characters and more than "
                    f"spaces, got {text[:40]!r}",
                    "bad_words",
                )
        _check_count("bad_word_ids", len(self.bad_word_ids), 2 * MAX_BAD_WORDS, remedy=remedy)
        if not all(self.bad_word_ids):
            raise RequestError("bad_word_ids: each entry needs a token id", "bad_word_ids")
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "logit_bias entries")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        num_allowed = self.n * len(self.allowed_token_ids or ())
        what = f"allowed_token_ids in all {self.n} completions"
        _check_count("allowed_token_ids", num_allowed, MAX_ALLOWED_IDS_OF_ALL, what)
        if not has_eos:
            _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_word_ids", itertools.chain(*self.bad_word_ids)),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})",
                        name,
                    )


def _check_range(
    name: str, value: float | None, low: float, high: float, *, is_low_open: bool = False
) -> None:
    # NaN fails all comparisons, hence the form.
    if value is not None and not (low <= value <= high and (low < value or not is_low_open)):
        allowed = f"({low:g}, {high:g}]" if is_low_open else f"[{low}, {high}]"
        raise RequestError(f"{name} must be in {allowed}, got {value}", name)


def _check_count(name: str, count: int, most: int, what: str = "", remedy: str = "") -> None:
    if count > most:
        raise RequestError(f"at most {most} {what or name}, got {count}{remedy}", name)


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request's own say in speculation. None means the server's setting."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    detailed: bool = False
    """Report every step: `StepDetail`."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, to be completed `sampling.n` times; `fan_out` gives its sequences.

    `sampling.seed` is always set here; `stop_token_ids` already holds the model's EOS ids unless
    the request ignores them. Stop strings are the front's business.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""
    cache_salt: str = ""
    owner: str = ""
    """Whose it is. Drafts are copied from answers to requests of the same owner and salt alone."""
    speculative: SpeculativeOptions = SpeculativeOptions()
    grammar: str = ""
    """What the output must be: the key of a grammar that was loaded; empty: anything. The answer
    ends with the grammar, whatever `ignore_eos` and `min_tokens` say."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entry 0 is the token itself, then the best in falling order.

    Tuples, which the collector of garbage forgets once it has seen that they hold only numbers.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class SpecCounters(msgspec.Struct, kw_only=True):
    """Speculation of a request or of the engine. Terms as vLLM's."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    """Of the draft tokens those that a grammar left no choice of; a drafter's come after them."""
    num_accepted_forced_tokens: int = 0
    num_copied_tokens: int = 0
    """Of the draft tokens those that were copied from the text so far, in place of a drafter's."""
    num_accepted_copied_tokens: int = 0
    num_final_drafts: int = 0
    """Drafts of which an accepted token ended the answer: no token of the target's own follows."""
    num_accepted_tokens_per_pos: list[int] = msgspec.field(default_factory=list)
    num_drafts_per_pos: list[int] = msgspec.field(default_factory=list)
    """Drafts that reached each position. A tree whose step is not reported in detail counts as deep
    as the number of its tokens and the method allow."""


class SpecDecodeStats(SpecCounters, kw_only=True):
    """A request's speculation so far."""

    num_steps: int = 0
    """Steps that produced at least one output token, drafted or not."""
    num_accepted_tokens_per_step: list[int] = msgspec.field(default_factory=list)
    """If asked for: of these steps, in order; see `StepDetail`."""


class StepCounts(msgspec.Struct, array_like=True, gc=False):
    """The speculation of one step that produced output of one sequence."""

    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    depth: int
    """Drafts that follow each other, at most."""
    num_forced_tokens: int = 0
    num_accepted_forced_tokens: int = 0
    num_copied_tokens: int = 0
    num_accepted_copied_tokens: int = 0

    def first(self, num_tokens: int) -> StepCounts:
        """The step as if its answer ended after so many of its tokens: accepted ones come first."""
        num_forced = min(self.num_accepted_forced_tokens, num_tokens)
        return msgspec.structs.replace(
            self,
            num_tokens=min(self.num_tokens, num_tokens),
            num_accepted_tokens=min(self.num_accepted_tokens, num_tokens),
            num_accepted_forced_tokens=num_forced,
            num_accepted_copied_tokens=min(
                self.num_accepted_copied_tokens, num_tokens - num_forced
            ),
        )


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
    """Of the whole answer, on the last output."""
    step_counts: list[StepCounts] | None = None
    """With stop strings: of the steps that brought `token_ids`. Who finds where the text ends
    counts what is left of the last one."""
    steps: list[StepDetail] | None = None
    """What brought `token_ids`, if asked for."""
    error: str | None = None
    """Why it ended with "error"."""
    is_refused: bool = False
    """The request asks for what cannot be: the error is its own, not the engine's."""


class DrafterHead(msgspec.Struct, kw_only=True):
    """A draft head that an engine has, and what came of its drafts."""

    version: int
    """1: the head that the engine started with; every other one that was loaded has the next."""
    folder: str
    sha256: str | None = None
    """Of its safetensors file; of several, of their bytes one after another, by name. None: it is
    the first one."""
    weight_version: str | None = None
    """What whoever loaded it calls it."""
    counters: SpecCounters = msgspec.field(default_factory=SpecCounters)
    """Of all steps that were launched with it."""


class DrafterState(DrafterHead, kw_only=True):
    """The head that drafts, and the one that can take its place at once."""

    method: str
    since: float
    """Unix time at which it took its place."""
    num_swaps: int = 0
    """How often heads took each other's place."""
    previous: DrafterHead | None = None
    """What a rollback goes back to; None: nothing is there."""
    stage_ms: float = 0.0
    """What the last load took, beside the steps."""
    gap_us: float = 0.0
    """What the last exchange took between two steps, of the host's time."""


class EngineStats(SpecCounters, kw_only=True):
    """Gauges and counters of the engine core; counters never fall."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Computed: not those found in the prefix cache, and again those of a preempted sequence."""
    num_served_prompt_tokens: int = 0
    """Of all sequences that got a token: each prompt once, cached or not."""
    num_generation_tokens: int = 0
    """Made: also those after a stop string, until the engine hears of it."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, once for each sequence: when it gets its first slot."""
    prefix_cache_hits: int = 0
    """Of these, found."""
    num_drafter_failures: int = 0
    num_step_failures: int = 0
    num_admission_failures: int = 0
    """Sequences that were given no slot, though one was free."""
    draft_seconds: float = 0.0
    """Of all steps: their parts as in `StepDetail`; this one, of proposing."""
    verify_seconds: float = 0.0
    """Of the device without proposing, in the steps whose proposing was timed apart."""
    unsplit_seconds: float = 0.0
    """Of the device in the steps whose proposing was not timed apart."""
    rest_seconds: float = 0.0
    """What steps took beside the device's work."""
    num_expert_layers: int = 0
    """Of a mixture: layers of experts that ran, in all steps."""
    num_distinct_experts: int = 0
    """Experts that had rows there, whose weights were read."""
    num_expert_rows: int = 0
    """Rows of all these experts."""
    experts_of_drafts: float = 1.0
    """As how many unrelated rows a draft's row counts, by the experts that it brings."""
    experts_of_sequences: float = 1.0
    """And the row of a further sequence."""
    exchange_rounds: list[int] = msgspec.field(default_factory=list)
    """By GPU where several share the model: products whose sums they exchanged, in all steps."""
    exchange_wait_seconds: list[float] = msgspec.field(default_factory=list)
    """And how long it waited for the others."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of step took when the engine timed it at its start."""

    num_seqs: int
    num_rows: int
    """Token positions of all sequences together: one each, and drafts."""
    proposes: bool
    """Whether a drafter that costs time ran as well."""
    milliseconds: float
    num_experts: float = 0.0
    """To how many experts of a layer the rows went; 0 without experts."""


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
    """Drafts that follow each other in a step, at most: a tree's depth."""
    dtype: str
    device: str
    memory_plan: dict[str, int]
    startup_seconds: float
    weights: str = "bfloat16"
    """How the model's matrices are stored: bfloat16, or what of FP8."""
    tensor_parallel_size: int = 1
    """Ranks that share the model; the memory plan is one's."""
    max_draft_tokens: int = 0
    """The drafter's drafts of a sequence in a step, at most: a tree's size."""
    max_copied_drafts: int = 0
    """Drafts of a sequence in a step, at most, that are copied from its text in their place."""
    num_non_finite_draft_tensors: int = 0
    """Tensors of the draft model with NaN or infinity, which cost drafts."""
    step_times: list[StepTime] = msgspec.field(default_factory=list)
    """What adaptive drafting reckons with; empty where it is off."""
    kv_events: dict[str, str | int | bool | None] | None = None
    """Where KV events are, under vLLM's names; None if there are none."""


def acceptance_rate(counters: SpecCounters) -> float:
    """Accepted / drafted; 0 where nothing was drafted."""
    if counters.num_draft_tokens == 0:
        return 0.0
    return counters.num_accepted_tokens / counters.num_draft_tokens


def mean_acceptance_length(counters: SpecCounters) -> float:
    """Tokens per drafted step; 1 where nothing was drafted.

    A step has its accepted tokens, and one of the target's own unless the answer ended before it.
    """
    if counters.num_drafts == 0:
        return 1.0
    num_more = counters.num_accepted_tokens - counters.num_final_drafts
    return 1.0 + num_more / counters.num_drafts


def acceptance_per_position(counters: SpecCounters) -> list[float]:
    """For each position the share accepted of the drafts that reached it; 0 where none did."""
    pairs = zip(counters.num_accepted_tokens_per_pos, counters.num_drafts_per_pos, strict=False)
    return [accepted / max(num_drafts, 1) for accepted, num_drafts in pairs]


def record_step(counters: SpecCounters, step: StepCounts) -> None:
    """Counts the draft of a step, if it had one."""
    if step.num_draft_tokens == 0:
        return
    counters.num_drafts += 1
    counters.num_draft_tokens += step.num_draft_tokens
    counters.num_accepted_tokens += step.num_accepted_tokens
    counters.num_forced_tokens += step.num_forced_tokens
    counters.num_accepted_forced_tokens += step.num_accepted_forced_tokens
    counters.num_copied_tokens += step.num_copied_tokens
    counters.num_accepted_copied_tokens += step.num_accepted_copied_tokens
    counters.num_final_drafts += step.num_accepted_tokens == step.num_tokens
    num_positions = min(step.num_draft_tokens, step.depth)
    # A drafter in the place of a method's that makes trees may draft a chain as long as the tree.
    num_positions = max(num_positions, step.num_accepted_tokens)
    num_wrong = num_positions - step.num_accepted_tokens
    _add(counters.num_accepted_tokens_per_pos, [1] * step.num_accepted_tokens + [0] * num_wrong)
    _add(counters.num_drafts_per_pos, [1] * num_positions)


def _add(sums: list[NumberT], more: Sequence[NumberT]) -> None:
    """Adds position by position; the longer one's positions remain."""
    sums.extend([0] * (len(more) - len(sums)))
    for position, count in enumerate(more):
        sums[position] += count


def record_answer_step(stats: SpecDecodeStats, step: StepCounts, is_detailed: bool) -> None:
    """Counts a step of one answer; `is_detailed`: by itself, too."""
    stats.num_steps += 1
    if is_detailed:
        stats.num_accepted_tokens_per_step.append(step.num_accepted_tokens)
    record_step(stats, step)


def add_counters(total: SpecCounters, parts: Sequence[SpecCounters]) -> None:
    """Adds the counters of several requests to a total."""
    for part in parts:
        total.num_drafts += part.num_drafts
        total.num_draft_tokens += part.num_draft_tokens
        total.num_accepted_tokens += part.num_accepted_tokens
        total.num_forced_tokens += part.num_forced_tokens
        total.num_accepted_forced_tokens += part.num_accepted_forced_tokens
        total.num_copied_tokens += part.num_copied_tokens
        total.num_accepted_copied_tokens += part.num_accepted_copied_tokens
        total.num_final_drafts += part.num_final_drafts
        _add(total.num_accepted_tokens_per_pos, part.num_accepted_tokens_per_pos)
        _add(total.num_drafts_per_pos, part.num_drafts_per_pos)


def total_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Statistics of several engines together."""
    if len(parts) == 1:
        return parts[0]
    total = EngineStats()
    add_counters(total, parts)
    for name in set(EngineStats.__struct_fields__) - set(SpecCounters.__struct_fields__):
        if isinstance(getattr(total, name), list):
            for part in parts:
                _add(getattr(total, name), getattr(part, name))
        else:
            setattr(total, name, sum(getattr(part, name) for part in parts))
    for name in ("experts_of_drafts", "experts_of_sequences"):  # the last engine's
        setattr(total, name, getattr((total, *parts)[-1], name))
    return total


def counters_since(before: SpecCounters, after: SpecCounters) -> SpecDecodeStats:
    """What was counted in between."""
    between = SpecDecodeStats()
    for name in SpecCounters.__struct_fields__:
        now, then = getattr(after, name), getattr(before, name)
        setattr(between, name, _difference(now, then) if isinstance(now, list) else now - then)
    return between


def _difference(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [a - b for a, b in itertools.zip_longest(now, then, fillvalue=0)]


def total_speculation(parts: Sequence[SpecDecodeStats]) -> SpecDecodeStats:
    """The speculation of several sequences together; step by step only where it is one."""
    total = SpecDecodeStats(num_steps=sum(part.num_steps for part in parts))
    add_counters(total, parts)
    if len(parts) == 1:
        total.num_accepted_tokens_per_step += parts[0].num_accepted_tokens_per_step
    return total
