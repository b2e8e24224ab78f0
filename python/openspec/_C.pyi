"""The C++ core: target, drafter, page pool, sequence table and the step, as Python sees them."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from openspec.messages import SamplingParams
from openspec.specs.runner import RunnerConfig

def has_cuda() -> bool:
    """Whether a runner can use CUDA, in this build and on this machine."""

def why_no_cuda() -> str:
    """The reason if it cannot, else nothing."""

def fail_check(count: int, /) -> int:
    """For tests: makes the count-th call of the CUDA runtime from here on fail; 0: none.

    Returns how many calls there were since the last call of this function.
    """

def cuda_memory(device: int) -> tuple[int, int]:
    """(free, total) bytes of a visible CUDA device."""

def cuda_device_name() -> str: ...
def cuda_device_names() -> list[str]:
    """Those of all visible devices."""

def cuda_peer(device: int, other: int) -> tuple[bool, int]:
    """Whether the one reads the other's memory directly, and the link's rank: 0 is fastest."""

def time_exchange(num_ranks: int) -> tuple[float, float]:
    """Seconds in which the first CUDA devices multiply one row, exchange its sums and norm it; and
    those of the same work by one of them alone. The process must load kernels eagerly."""

@final
class MemoryPlan:
    """Bytes that a runner of this configuration takes, or each of its ranks; pages come on top at
    `page_bytes` each."""

    weight_bytes: int
    scratch_bytes: int
    exchange_bytes: int
    table_bytes: int
    draft_fixed_bytes: int
    state_bytes: int
    page_bytes: int
    draft_page_bytes: int
    num_base_pages: int

def memory_plan(config: RunnerConfig) -> MemoryPlan: ...
def quantized(
    data: Buffer, dtype: str, num_rows: int, width: int, form: str, num_threads: int
) -> tuple[bytes, bytes]:
    """The e4m3 codes and the float32 scales of a matrix [num_rows, width].

    `data` are its numbers as safetensors has them, `dtype` BF16 or F32, `form` of the scales
    "tensor", "channel" or "block". The same for any number of threads.

    Raises:
        ValueError: NaN or infinity among the numbers, or not as many as there should be.
    """

def drafter_names() -> list[str]:
    """Names of the drafters compiled in, "none" among them."""

@final
class Vocabulary:
    """As `_grammar.Vocabulary`, for the engine."""

    def __init__(
        self, tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
    ) -> None: ...

@final
class Grammar:
    """What `_grammar.compile_...` returned for the same vocabulary; else raises ValueError."""

    def __init__(self, vocabulary: Vocabulary, data: bytes) -> None: ...
    @property
    def num_bytes(self) -> int: ...

@final
class GrammarTally:
    """What the sequences of a request have taken for their masks, beyond what is ordinary."""

    def __init__(self) -> None: ...

@final
class SequenceParams:
    """What a sequence needs on the device: sampling, stops, budget.

    `max_tokens` counts output tokens. `num_prompt_logprobs`: -1 none, n the n best beside the token
    itself. `grammar`: what the output must be; sequences with the same `grammar_tally` share what
    their masks may take. All else is read from `sampling`.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        *,
        max_tokens: int,
        num_prompt_logprobs: int = -1,
        reports_steps: bool = False,
        grammar: Grammar | None = None,
        grammar_tally: GrammarTally | None = None,
        owner: bytes = b"",
    ) -> None: ...

TokenLogprobs = tuple[list[int], list[float], int]
"""(token ids, log-probabilities, rank) at one token, which is entry 0; then the best, falling."""
SpanDetail = tuple[
    list[int],
    list[int],
    list[float] | None,
    list[int],
    int,
    int,
    int,
    int,
    float,
    float,
    float | None,
    list[float],
]
"""(draft token ids; by draft the number of the draft that it follows, -1: the last known token; by
draft its score, None: the drafter gave none; numbers of the drafts among the chosen tokens, in
order; drafts that a grammar forces, the last ones; rows and sequences of the step; its seconds;
those on the device; of these those for drafting, None: not known; those in which each device of
several waited for others)."""

@final
class SpanResult:
    """What one sequence got from a step.

    Nothing, if the step before had ended the sequence already, or if it was removed while the step
    was in flight.
    """

    slot: int
    token_ids: list[int]
    """Chosen tokens, in order, cut after the first stop id or at the budget; empty in prefill, and
    where the mask that a grammar makes was not there in time."""
    finish_reason: str
    """"" while running, "stop" after a stop id (the last of token_ids), "length" at the budget."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Accepted drafts among token_ids."""
    drafts_by_source: list[tuple[int, int]]
    """Of these two the share of each source: what a grammar left no choice of, then the drafter."""
    logprobs: list[TokenLogprobs]
    """One for each of token_ids if asked for, else empty."""
    prompt_logprobs: list[TokenLogprobs]
    """For the prompt tokens after this chunk's rows if asked for, else empty."""
    detail: SpanDetail | None
    """Of a step that chose tokens, for a sequence with `reports_steps`."""
    is_held: bool
    """The next mask is made beside the steps; `Runner.is_held` says how long."""
    failure: tuple[str, bool] | None
    """Why the sequence cannot go on, and whether the request itself is to blame; None: it can."""

@final
class StepLease:
    """Pages reserved for one step. Dropping it uncommitted gives them back."""

    def launch(self) -> None: ...
    def collect(self) -> list[SpanResult]: ...
    def commit(self) -> None: ...
    def close(self) -> None:
        """Gives the step up, the newest open one first. If it was launched, all others that are
        open must be closed too; every sequence is then where the last commit left it."""

@final
class PageEvent:
    """One change of what the prefix cache holds. Hashes are 64 of a page's 128 bits."""

    kind: str
    """"stored", "removed" or "cleared"."""
    hashes: list[int]
    """Stored: pages of one sequence, one after another."""
    parent: int | None
    """Stored: the page in front of the first; None: the first begins its sequence."""
    token_ids: list[int]
    """Stored: of all pages."""
    cache_salt: bytes
    """Stored without parent: the salt of the request."""

@final
class RunnerStats:
    """Counters since the start."""

    num_steps: int
    num_rows: int
    num_drafter_failures: int
    last_drafter_failure: str
    draft_seconds: float
    verify_seconds: float
    unsplit_seconds: float
    rest_seconds: float
    experts: tuple[int, int, int]
    """Of a mixture: layers of experts that ran, experts that had rows in them, and these rows."""
    experts_of_drafts: float
    """Unrelated rows that a draft's row counts as, by the experts that it brings."""
    experts_of_sequences: float
    """The same of the row of a further sequence."""
    exchange: list[tuple[int, float]]
    """Of each device of several: rounds of exchanges, and seconds in which it waited for others."""

class Drafter:
    """Base for drafters written in Python (research and tests); C++ drafters register themselves."""  # noqa: E501

    def __init__(self) -> None: ...
    def propose(
        self, slot: int, token_ids: list[int], num_wanted: int
    ) -> list[int] | list[tuple[int, int]]:
        """Up to `num_wanted` guesses of the tokens that follow `token_ids`: one after another, or as
        pairs (token, number of the guess that it follows; -1: the last of `token_ids`), parents
        before children. On CUDA a tree ends where it stops being a chain."""  # noqa: E501

class Runner:
    """One engine's state on one device. Not thread-safe; calls release the GIL while computing."""

    def __init__(
        self, config: RunnerConfig, num_pages: int, drafter: Drafter | None = None
    ) -> None: ...

    # Weights: every expected tensor of target and drafter is given once, then finish_loading.
    def expected_tensors(self) -> list[tuple[str, list[int]]]: ...
    def load_tensor(self, name: str, data: Buffer, dtype: str) -> None:
        """Packs one tensor: "BF16", for vectors also "F32". `data` may be unmapped afterwards."""
    def expected_draft_tensors(self) -> list[tuple[str, list[int]]]:
        """What the drafter needs; nothing for one without weights."""
    def load_draft_tensor(self, name: str, data: Buffer, dtype: str) -> None:
        """Takes one of these: "BF16", for vectors also "F32"; "I64" or "I32" for token ids."""
    def finish_loading(self) -> None:
        """Closes the loading of target and drafter."""

    # With RunnerConfig.has_spare_head: another head, loaded by a thread of its own beside steps.
    def begin_spare_loading(self) -> None:
        """The room for it holds no head from here on. Each tensor follows, then the finish."""
    def check_spare_tensor(self, name: str, data: Buffer, dtype: str) -> bool:
        """False: it holds NaN or infinity. Raises what loading it would; changes nothing."""
    def load_spare_tensor(self, name: str, data: Buffer, dtype: str) -> None:
        """As `load_draft_tensor`."""
    def finish_spare_loading(self) -> None:
        """Returns once all of it is on the device."""
    def exchange_drafter(self) -> None:
        """Between launches: the drafter's weights and those beside them take each other's place.
        Steps in flight keep the old ones; pages keep what these wrote."""
    def non_finite_tensors(self) -> tuple[list[str], list[str]]:
        """Tensors of target and drafter that hold NaN or infinity, in one read of the weights."""
    def measure_step_times(self, budget_s: float) -> list[tuple[int, int, bool, float, float]]:
        """Fills the cost table that adaptive drafting uses; stops after about so many seconds.

        Returns (sequences, rows, whether the drafter runs, seconds, experts of a layer) of each
        kind of step."""
    def set_step_times(self, measured: Sequence[tuple[int, int, bool, float, float]]) -> None:
        """Takes what `measure_step_times` of a runner like this one returned, instead."""

    # Sequences.
    def add_sequence(
        self,
        token_ids: Sequence[int],
        prompt_len: int,
        params: SequenceParams,
        cache_salt: bytes = b"",
    ) -> int:
        """Takes a slot and attaches the cached prefix. `token_ids` holds prompt and, when a preempted
        sequence resumes, the output so far."""  # noqa: E501
    def is_held(self, slot: int) -> bool:
        """Whether the sequence's next mask is being made beside the steps: until it is, a step
        brings it nothing."""
    def await_masks(self, seconds: float) -> None:
        """Returns when such a mask was made since the last call, or after so many seconds."""
    def num_cached_tokens(self, token_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """With how much KV such a sequence would begin."""
    def remove_sequence(self, slot: int) -> None:
        """Gives slot and pages back, to be taken again at once, also while steps are in flight."""
    # As of the last commit:
    def kv_len(self, slot: int) -> int: ...
    def token_ids(self, slot: int) -> list[int]: ...

    # Pages.
    @property
    def num_rows_ahead(self) -> int:
        """Entries after the last known token that a step with drafts may write, at most."""
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free_pages(self) -> int:
        """Free or evictable."""
    @property
    def num_base_pages(self) -> int:
        """Pages that a sequence's running state takes besides those of its tokens."""
    @property
    def num_free_slots(self) -> int: ...
    def wanted_end(self, slot: int) -> int:
        """Where a chunk of the sequence's prompt should end, so that others can begin there; 0:
        nowhere."""
    def num_pages_needed(self, slot: int, num_rows: int) -> int:
        """Pages that `num_rows` more rows of the sequence would take from the pool, if all rows in
        flight are kept."""
    def reset_prefix_cache(self) -> None: ...
    def forget_answers(self) -> None:
        """Drafts are copied from no answer that ended before."""
    def record_page_events(self) -> None:
        """Records what becomes of reusable pages; call before the first sequence."""
    def take_page_events(self) -> list[PageEvent]:
        """Events of pages since the last call, in order."""
    def published_hashes(self) -> list[int]:
        """Hashes of all reusable pages, in no order."""
    def check_integrity(self) -> None:
        """Raises EngineError if a page is leaked, held twice or a length is off."""

    # The step. Up to `num_steps_ahead` steps may be in flight (launched and not committed) when one
    # is reserved; they are collected and committed in the order in which they were launched.
    @property
    def num_steps_ahead(self) -> int:
        """0: `launch` computes. 1: `launch` only enqueues, and `collect` waits."""
    def reserve(self, spans: Sequence[tuple[int, int, int]]) -> StepLease:
        """Pages for a step of spans (slot, num_new_tokens, max_drafts), all or nothing: OutOfPages.

        num_new_tokens counts known tokens without KV that this step computes (1 in decode); drafts
        are only made for spans that reach the last known token. After a step in flight that reaches
        it, a span is (slot, 1, max_drafts), whatever that step will choose; drafts beyond the
        sequence's budget are not made.
        """
    def set_stage_hook(self, hook: Callable[[str], None] | None) -> None:
        """Called at the start of each stage (reserve, propose, score, choose, accept, commit).

        An exception it raises takes the path of a failure in that stage.
        """
    def set_capture(self, layer_ids: Sequence[int]) -> None: ...
    def set_grammar_times(
        self, *, mask: float, token: float, step: float, first_try: float, request: float
    ) -> None:
        """Seconds of processor time: what is ordinary for a mask and for a token read; what a step
        may take on each thread, a mask beside the steps at its first try, and a request beyond what
        is ordinary. 0.005, 0.0001, 0.05, 0.02 and 2 unless set."""
    def captured(self) -> npt.NDArray[np.float32]:
        """Features [rows, layers * hidden_size] of the last step's rows: the outputs of the captured
        layers side by side."""  # noqa: E501
    def captured_address(self) -> int:
        """Where these rows lie on a device, in bfloat16, until the next step; 0 on the CPU."""
    def last_logits(self) -> npt.NDArray[np.float32]: ...
    def last_drafts(self) -> list[list[int]]:
        """What was proposed for each span of the last step, before the row budget."""
    def last_draft_parents(self) -> list[list[int]]:
        """By draft, the number of the draft that it follows; -1: the last known token."""
    def last_draft_scores(self) -> list[list[float]]:
        """By draft, its score; nothing for drafters without scores."""
    def last_draft_logits(self) -> list[float]:
        """Logits of the last drafts of the last proposal, one after another."""
    @property
    def stats(self) -> RunnerStats: ...
