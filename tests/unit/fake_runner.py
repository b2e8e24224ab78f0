"""A runner without a model: real slots, pages, prefix cache and leases, a toy rule for tokens.

The token at position t of a sequence depends on the whole prefix and the seed, so any mistake in
what is computed, kept or resumed shows in the text. Drafts are right about half of the time.

With `num_steps_ahead=1` it behaves like a device that computes on its own: `launch` only enqueues,
`collect` computes in the order of launches, on lengths that the host has not seen yet. A sequence
that has ended, or was removed, yields nothing; pages of rejected drafts stay with the sequence,
since the next step may write them; a step that is given up takes all others with it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openspec.engine.core.request import Request, Span
from openspec.errors import EngineError, OutOfPages

if TYPE_CHECKING:
    from openspec._C import PageEvent, SpanDetail, TokenLogprobs

VOCAB = 50


@dataclass(kw_only=True)
class FakeParams:
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    max_draft_tokens: int = 0
    reports_steps: bool = False
    has_grammar: bool = False


def fake_params(request: Request) -> FakeParams:
    sampling = request.source.sampling
    return FakeParams(
        seed=sampling.seed or 0,
        max_tokens=max(request.max_tokens, 1),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        num_prompt_logprobs=(sampling.prompt_logprobs or 0)
        if request.needs_prompt_logprobs
        else -1,
        max_draft_tokens=request.draft_limit,
        reports_steps=request.source.speculative.detailed,
        has_grammar=request.grammar is not None,
    )


def next_token(tokens: Sequence[int], params: FakeParams, num_output: int) -> int:
    """What the toy model says after `tokens`."""
    token = zlib.crc32(repr((params.seed, list(tokens))).encode()) % VOCAB
    while num_output < params.min_tokens and token in params.stop_token_ids:
        token = (token + 1) % VOCAB
    return token


def plain_text(prompt: list[int], params: FakeParams, max_model_len: int) -> tuple[list[int], str]:
    """The whole output, one token at a time: what every schedule must give."""
    output: list[int] = []
    while True:
        token = next_token(prompt + output, params, len(output))
        output.append(token)
        if token in params.stop_token_ids and len(output) > params.min_tokens:
            return output, "stop"
        if len(output) >= params.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output, "length"


def logprobs_of(tokens: Sequence[int], token: int, count: int) -> TokenLogprobs:
    value = -(zlib.crc32(repr((list(tokens), token)).encode()) % 1000) / 100
    return [token, *range(count)], [value] * (1 + count), 1


@dataclass
class FakeSpanResult:
    slot: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafts_by_source: Sequence[tuple[int, int]] = ((0, 0),) * 3
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    detail: SpanDetail | None = None
    is_held: bool = False
    failure: tuple[str, bool] | None = None
    num_computed: int = 0


@dataclass
class FakeStats:
    num_steps: int = 0
    num_rows: int = 0
    num_drafter_failures: int = 0
    last_drafter_failure: str = ""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    unsplit_seconds: float = 0.0
    rest_seconds: float = 0.0
    experts: tuple[int, int, int] = (0, 0, 0)
    experts_of_drafts: float = 1.0
    experts_of_sequences: float = 1.0
    exchange: list[tuple[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class _Sequence:
    tokens: list[int]
    prompt_len: int
    params: FakeParams
    salt: bytes
    kv_len: int = 0
    pages: list[int] = field(default_factory=list)
    is_removed: bool = False
    # What the device knows, ahead of the host by the steps collected and not committed.
    device_tokens: list[int] = field(default_factory=list)
    device_kv_len: int = 0
    is_finished: bool = False
    num_looks_away: int = 0
    """How often it is still to be asked whether the mask is there."""

    def restore(self) -> None:
        """The device forgets what is not committed."""
        self.device_tokens, self.device_kv_len = list(self.tokens), self.kv_len
        self.is_finished = False


class FakeLease:
    def __init__(self, runner: FakeRunner, spans: list[Span]) -> None:
        self.runner, self.spans = runner, spans
        self.sequences: list[_Sequence] = []
        self.pages: list[list[int]] = []  # by span
        self.results: list[FakeSpanResult] = []
        self.state = "reserved"

    def launch(self) -> None:
        self.runner.launch(self)

    def collect(self) -> list[FakeSpanResult]:
        return self.runner.collect(self)

    def commit(self) -> None:
        self.runner.commit(self)

    def close(self) -> None:
        if self.state in ("committed", "closed"):
            return
        assert self is self.runner.open_leases[-1], "the newest lease is closed first"
        self.runner.open_leases.pop()
        self.runner.is_giving_up = bool(self.runner.open_leases)
        self.state = "closed"
        self.release_pages()
        for sequence in self.sequences:
            sequence.restore()

    def release_pages(self) -> None:
        for pages in self.pages:
            while pages:
                self.runner.release(pages.pop())


class FakeRunner:
    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        max_num_batched_tokens: int = 32,
        max_draft_tokens: int = 3,
        enable_prefix_caching: bool = True,
        num_steps_ahead: int = 0,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_draft_tokens = self.num_rows_ahead = max_draft_tokens
        self.num_base_pages = 0
        self.enable_prefix_caching = enable_prefix_caching
        self.num_steps_ahead = num_steps_ahead
        self.stats = FakeStats()
        self.hook: Callable[[str], None] = lambda stage: None
        self.on_load_grammar: Callable[[], None] = lambda: None
        self.looks_away: Callable[[], int] = lambda: 0
        """Of each choice under a grammar: 0, or how often its mask is looked for in vain."""
        self.num_waits = 0
        self.most_rows = 0
        self.num_dry_steps = 0
        self._slots: dict[int, _Sequence] = {}
        self._free_slots = list(range(max_num_seqs))
        self._free = list(range(num_pages))
        self._references = [0] * num_pages
        self._cached: dict[tuple[bytes, tuple[int, ...]], int] = {}  # prefix to page
        self._contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._evictable: dict[int, None] = {}  # in order of last use
        self.open_leases: list[FakeLease] = []
        self.is_giving_up = False

    # Grammars, which it does not follow

    def load_vocabulary(
        self, tokens: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
    ) -> object:
        return list(tokens)

    def load_grammar(self, vocabulary: object, data: bytes) -> object:
        self.on_load_grammar()
        return data

    def new_grammar_tally(self) -> object:
        return object()

    def is_held(self, slot: int) -> bool:
        sequence = self._slots[slot]
        sequence.num_looks_away = max(0, sequence.num_looks_away - 1)
        return sequence.num_looks_away > 0

    def await_masks(self, seconds: float) -> None:
        self.num_waits += 1

    # Sequences

    def add(self, request: Request) -> int:
        return self.add_sequence(
            request.token_ids,
            request.prompt_len,
            fake_params(request),
            request.source.cache_salt.encode(),
        )

    def num_cached(self, request: Request) -> int:
        if not self.enable_prefix_caching or request.needs_prompt_logprobs:
            return 0
        tokens, salt = request.token_ids, request.source.cache_salt.encode()
        end = 0
        while end + self.page_size < len(tokens):
            if (salt, tuple(tokens[: end + self.page_size])) not in self._cached:
                break
            end += self.page_size
        return end

    def add_sequence(
        self, token_ids: Sequence[int], prompt_len: int, params: FakeParams, cache_salt: bytes = b""
    ) -> int:
        assert 1 <= prompt_len <= len(token_ids) < self.max_model_len
        assert all(0 <= token < VOCAB for token in token_ids)
        slot = self._free_slots.pop()
        sequence = _Sequence(list(token_ids), prompt_len, params, cache_salt)
        self._slots[slot] = sequence
        if self.enable_prefix_caching and params.num_prompt_logprobs < 0:
            self._attach(sequence)
        sequence.restore()
        return slot

    def remove_sequence(self, slot: int) -> None:
        sequence = self._slots.pop(slot)
        self._free_slots.append(slot)
        sequence.is_removed = True
        for page in reversed(sequence.pages):
            self.release(page)

    def kv_len(self, slot: int) -> int:
        return self._slots[slot].kv_len

    def token_ids(self, slot: int) -> list[int]:
        return list(self._slots[slot].tokens)

    # Pages

    @property
    def num_free_pages(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def wanted_end(self, slot: int) -> int:
        return 0

    def num_pages_needed(self, slot: int, num_rows: int) -> int:
        sequence = self._slots[slot]
        most_tokens, num_pages = sequence.kv_len + num_rows, len(sequence.pages)
        for (_, num_new, max_drafts), pages in self._in_flight(sequence):
            most_tokens += num_new + max_drafts
            num_pages += len(pages)
        return max(0, self._pages_for(most_tokens) - num_pages)

    def forget_answers(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        for page in self._evictable:
            self._free.append(page)
        self._evictable.clear()
        self._cached.clear()
        self._contents.clear()

    def take_page_events(self) -> list[PageEvent]:
        return []

    def check_integrity(self) -> None:
        held = [0] * self.num_pages
        for slot, sequence in self._slots.items():
            num_spare = len(sequence.pages) - self._pages_for(sequence.kv_len)
            if num_spare < 0 or (num_spare > 0 and self.num_steps_ahead == 0):
                raise EngineError(f"slot {slot} holds {len(sequence.pages)} pages")
            if not sequence.kv_len < len(sequence.tokens):
                raise EngineError(f"slot {slot} has KV for all of its tokens")
            for page in sequence.pages:
                held[page] += 1
        for page in (page for lease in self.open_leases for pages in lease.pages for page in pages):
            held[page] += 1
        free = Counter(self._free)
        for page in range(self.num_pages):
            places = free[page] + (page in self._evictable) + (held[page] > 0)
            if places != 1 or held[page] != self._references[page]:
                raise EngineError(f"page {page} is in {places} places")

    def release(self, page: int) -> None:
        self._references[page] -= 1
        assert self._references[page] >= 0
        if self._references[page] == 0:
            if page in self._contents:
                self._evictable[page] = None
            else:
                self._free.append(page)

    # The step

    def reserve(self, spans: Sequence[Span]) -> FakeLease:
        self.hook("reserve")
        assert spans and len(self.open_leases) <= self.num_steps_ahead and not self.is_giving_up
        num_rows = sum(num_new + max_drafts for _, num_new, max_drafts in spans)
        assert num_rows <= self.max_num_batched_tokens, num_rows
        self.most_rows = max(self.most_rows, num_rows)
        assert len({slot for slot, _, _ in spans}) == len(spans)
        lease = FakeLease(self, list(spans))
        needed = [self._check_span(span) for span in spans]  # before the lease counts as in flight
        self.open_leases.append(lease)
        for (slot, _, _), num_pages in zip(spans, needed, strict=True):
            lease.sequences.append(self._slots[slot])
            lease.pages.append([])
            for _ in range(num_pages):
                if self.num_free_pages == 0:
                    lease.close()
                    self.is_giving_up = False  # not launched: the others are as they were
                    self.num_dry_steps += 1
                    raise OutOfPages(f"slot {slot}")
                lease.pages[-1].append(self._allocate())
        return lease

    def launch(self, lease: FakeLease) -> None:
        assert lease.state == "reserved" and lease is self.open_leases[-1]
        for stage in ("propose", "layout"):
            self.hook(stage)
        if self.num_steps_ahead == 0:
            self._compute(lease)
        lease.state = "launched"

    def collect(self, lease: FakeLease) -> list[FakeSpanResult]:
        assert lease.state == "launched" and lease is self.open_leases[0] and not self.is_giving_up
        if self.num_steps_ahead > 0:
            self._compute(lease)
        lease.state = "collected"
        return lease.results

    def commit(self, lease: FakeLease) -> None:
        assert lease.state == "collected" and lease is self.open_leases[0] and not self.is_giving_up
        self.hook("commit")
        for sequence, pages, result in zip(
            lease.sequences, lease.pages, lease.results, strict=True
        ):
            if sequence.is_removed:
                continue
            sequence.kv_len += result.num_computed
            sequence.tokens += result.token_ids
            num_needed = self._pages_for(sequence.kv_len) - len(sequence.pages)
            num_kept = num_needed if self.num_steps_ahead == 0 else len(pages)
            sequence.pages += pages[:num_kept]
            del pages[:num_kept]
            self._publish(sequence)
        self.stats.num_steps += 1
        self.open_leases.pop(0)
        lease.release_pages()
        lease.state = "committed"

    # Parts

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _allocate(self) -> int:
        if not self._free:
            page = next(iter(self._evictable))
            del self._evictable[page]
            del self._cached[self._contents.pop(page)]
            self._free.append(page)
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _attach(self, sequence: _Sequence) -> None:
        while True:
            end = sequence.kv_len + self.page_size
            page = self._cached.get((sequence.salt, tuple(sequence.tokens[:end])))
            if page is None or end >= len(sequence.tokens):
                break
            self._evictable.pop(page, None)
            self._references[page] += 1
            sequence.pages.append(page)
            sequence.kv_len = end

    def _publish(self, sequence: _Sequence) -> None:
        if not self.enable_prefix_caching:
            return
        for index in range(sequence.kv_len // self.page_size):
            content = (sequence.salt, tuple(sequence.tokens[: (index + 1) * self.page_size]))
            page = sequence.pages[index]
            if content not in self._cached and page not in self._contents:
                self._cached[content] = page
                self._contents[page] = content

    def _in_flight(self, sequence: _Sequence) -> list[tuple[Span, list[int]]]:
        """Spans of the sequence in open leases, with their pages."""
        return [
            (span, pages)
            for lease in self.open_leases
            for other, span, pages in zip(lease.sequences, lease.spans, lease.pages, strict=True)
            if other is sequence
        ]

    def _check_span(self, span: Span) -> int:
        """Checks a span against what the host may know; returns the pages it needs."""
        slot, num_new, max_drafts = span
        sequence = self._slots[slot]
        params = sequence.params
        end, num_output = sequence.kv_len, len(sequence.tokens) - sequence.prompt_len
        for (_, in_flight, _), _ in self._in_flight(sequence):
            end += in_flight
            num_output += end >= len(sequence.tokens)
        assert num_output < max(params.max_tokens, 1), "a step that can bring nothing"
        if end >= len(sequence.tokens):
            assert num_new == 1
        else:
            end += num_new
            assert num_new >= 1 and end <= len(sequence.tokens)
            assert max_drafts == 0 or end == len(sequence.tokens)
        assert max_drafts <= params.max_draft_tokens
        assert max_drafts < max(params.max_tokens - num_output, 1)
        return self.num_pages_needed(slot, num_new + max_drafts)

    def _compute(self, lease: FakeLease) -> None:
        for stage in ("score", "choose", "accept"):
            self.hook(stage)
        for sequence, span in zip(lease.sequences, lease.spans, strict=True):
            lease.results.append(self._resolve(sequence, span))

    def _resolve(self, sequence: _Sequence, span: Span) -> FakeSpanResult:
        slot, num_new, max_drafts = span
        result = FakeSpanResult(slot)
        if sequence.is_removed or sequence.is_finished:
            return result
        params, known = sequence.params, list(sequence.device_tokens)
        end = sequence.device_kv_len + num_new
        num_pages = len(sequence.pages) + sum(
            len(pages) for _, pages in self._in_flight(sequence)[:1]
        )
        assert self._pages_for(end + max_drafts) <= num_pages
        if params.num_prompt_logprobs >= 0:
            for position in range(sequence.device_kv_len + 1, min(end + 1, sequence.prompt_len)):
                result.prompt_logprobs.append(
                    logprobs_of(known[:position], known[position], params.num_prompt_logprobs)
                )
        result.num_computed = num_new
        sequence.device_kv_len = end
        if end < len(known):
            return result
        if params.has_grammar and sequence.num_looks_away == 0:
            sequence.num_looks_away = self.looks_away()
        if sequence.num_looks_away > 0:
            result.is_held = True
            result.num_computed -= 1
            sequence.device_kv_len -= 1
            return result
        num_output = len(known) - sequence.prompt_len
        max_drafts = max(0, min(max_drafts, params.max_tokens - num_output - 1))
        drafts = self._draft(known, params, num_output, max_drafts)
        result.num_draft_tokens = len(drafts)
        for index in range(len(drafts) + 1):
            num_output = len(known) - sequence.prompt_len
            token = next_token(known, params, num_output)
            result.token_ids.append(token)
            if params.num_logprobs >= 0:
                result.logprobs.append(logprobs_of(known, token, params.num_logprobs))
            known.append(token)
            num_output += 1
            is_accepted = index < len(drafts) and drafts[index] == token
            result.num_accepted_tokens += is_accepted
            if token in params.stop_token_ids and num_output > params.min_tokens:
                result.finish_reason = "stop"
            elif num_output >= params.max_tokens or len(known) >= self.max_model_len:
                result.finish_reason = "length"
            if result.finish_reason or not is_accepted:
                break
        if params.reports_steps:
            parents = list(range(-1, len(drafts) - 1))
            accepted = list(range(result.num_accepted_tokens))
            result.detail = (drafts, parents, None, accepted, 0, 1, 1, 0.0, 0.0, None)
        sequence.device_tokens = known
        sequence.device_kv_len = len(known) - 1
        result.num_computed += len(result.token_ids) - 1
        sequence.is_finished = bool(result.finish_reason)
        return result

    def _draft(
        self, known: list[int], params: FakeParams, num_output: int, max_drafts: int
    ) -> list[int]:
        guesses: list[int] = []
        while len(guesses) < max_drafts:
            token = next_token(known + guesses, params, num_output + len(guesses))
            if zlib.crc32(repr(known + guesses).encode()) % 2:
                token = (token + 1) % VOCAB
            guesses.append(token)
            if zlib.crc32(repr(guesses).encode()) % 5 == 0:
                break
        return guesses
