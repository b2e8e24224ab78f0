"""An EngineClient without an engine: scripted tokens, some steps of several tokens, real aborts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from openspec.engine.core.fan_out import fan_out
from openspec.engine.processes.output_stream import OutputStream
from openspec.errors import EngineError, RequestError
from openspec.messages import (
    DrafterHead,
    DrafterState,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    SpecDecodeStats,
    StepCounts,
    TokenLogprobs,
    record_answer_step,
    record_step,
)
from openspec.step_detail import StepDetail
from tests.serve.fake_model import MAX_POSITIONS, vocab_size

NUM_DRAFTS = 4


class _Sequence:
    def __init__(self, stream: OutputStream, request: EngineRequest, script: list[int]) -> None:
        self.stream, self.request, self.script = stream, request, script
        self.num_done = 0
        self.spec = SpecDecodeStats(
            num_accepted_tokens_per_pos=[0] * NUM_DRAFTS, num_drafts_per_pos=[0] * NUM_DRAFTS
        )
        self.rng = random.Random(0)  # request ids differ from run to run


class FakeEngineClient:
    """`script` says what a request is answered; it is cut at stop ids and at max_tokens."""

    def __init__(
        self,
        model: Path,
        *,
        max_num_seqs: int = 16,
        max_model_len: int = MAX_POSITIONS,
        step_s: float = 0.0,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.info = EngineInfo(
            model=str(model),
            vocab_size=vocab_size(self.tokenizer),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            page_size=16,
            num_pages=max(1024, max_model_len // 16),
            method="ngram",
            num_speculative_tokens=NUM_DRAFTS,
            max_draft_tokens=NUM_DRAFTS,
            tensor_parallel_size=tensor_parallel_size,
            dtype="float32",
            device="cpu",
            memory_plan={"weight_bytes": 1 << 20, "grammar_bytes": 1 << 28},
            startup_seconds=0.1,
        )
        self.step_s = step_s
        self.is_alive = True
        self.is_late = False
        self.last_stats: EngineStats | None = None
        self.pid = None
        self.vocabulary: tuple[list[bytes], int, list[int]] | None = None
        self.grammars: dict[str, bytes] = {}
        self.failure = "engine_dead"
        self.forget()
        self._stats = EngineStats(num_pages=1024, num_free_pages=1024)
        self.staged: str | None = None
        self.drafter = DrafterState(version=1, folder="/models/first", method="fake", since=0.0)
        self._stats.num_accepted_tokens_per_pos = [0] * NUM_DRAFTS
        self._stats.num_drafts_per_pos = [0] * NUM_DRAFTS
        self._running: dict[str, _Sequence] = {}
        self._waiting: dict[str, _Sequence] = {}
        self._work = asyncio.Event()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def set_vocabulary(self, tokens: list[bytes], vocab_size: int, stop_ids: list[int]) -> None:
        assert self.vocabulary is None
        self.vocabulary = (tokens, vocab_size, stop_ids)

    def load_grammar(self, key: str, data: bytes) -> None:
        assert self.vocabulary is not None and key not in self.grammars
        self.grammars[key] = data

    def drop_grammar(self, key: str) -> None:
        del self.grammars[key]

    def forget(self) -> None:
        """Default script, nothing seen yet."""
        self.script: Callable[[EngineRequest], list[int] | str] = lambda _: CYCLE
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.num_stats_calls = 0
        self.wait_seconds: list[float] = []
        """Of each step, by GPU."""
        self.num_resets = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def sequence_ids(self) -> list[str]:
        return [*self._running, *self._waiting]

    def submit(self, *requests: EngineRequest, stream: OutputStream | None = None) -> OutputStream:
        if not self.is_alive:
            raise EngineError("the engine is gone")
        sequences = [sequence for request in requests for sequence in fan_out(request)]
        if stream is None:
            stream = OutputStream(self.abort, [sequence.request_id for sequence in sequences])
        for request in sequences:
            self.requests.append(request)
            script = self.script(request)
            if isinstance(script, str):
                script = self.tokenizer.encode(script).ids
            self._waiting[request.request_id] = _Sequence(stream, request, script)
        self._work.set()
        return stream

    def abort(self, *request_ids: str) -> None:
        for request_id in request_ids:
            for group in (self._waiting, self._running):
                sequence = group.pop(request_id, None)
                if sequence is not None:
                    self.aborted.append(request_id)
                    sequence.stream.push(
                        EngineOutput(
                            request_id=request_id, finish_reason="abort", spec_decode=sequence.spec
                        )
                    )

    async def stats(self) -> EngineStats:
        self.num_stats_calls += 1
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = len(self._waiting)
        return self._stats

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def stage_drafter(self, path: str, sha256: str | None = None) -> DrafterState:
        """Any path is a head, but those that say how they are refused."""
        if path.startswith("drafter_"):
            raise RequestError(f"{path!r} is refused", "path", path)
        self.staged = path
        return self.drafter

    async def exchange_drafter(
        self,
        *,
        back: bool = False,
        flush_prefix_cache: bool = False,
        weight_version: str | None = None,
    ) -> DrafterState:
        now = self.drafter
        if (now.previous if back else self.staged) is None:
            raise RequestError("there is no such head", code="no_previous_drafter")
        self.num_resets += flush_prefix_cache
        new = now.previous if back else DrafterHead(version=now.num_swaps + 2, folder=self.staged)
        self.drafter = DrafterState(
            version=new.version,
            folder=new.folder,
            weight_version=weight_version,
            method=now.method,
            since=now.since + 1,
            num_swaps=now.num_swaps + 1,
            previous=DrafterHead(version=now.version, folder=now.folder, sha256=now.sha256),
        )
        self.staged = None
        return self.drafter

    def die(self) -> None:
        """As if the child had been killed."""
        self.is_alive = False
        for sequence in [*self._running.values(), *self._waiting.values()]:
            sequence.stream.end(EngineError("the engine died at 0x7fffdeadbeef"))
        self._running.clear()
        self._waiting.clear()
        self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    async def close(self) -> None:
        self.is_alive = False
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
            while self._waiting and len(self._running) < self.info.max_num_seqs:
                request_id, sequence = next(iter(self._waiting.items()))
                del self._waiting[request_id]
                self._running[request_id] = sequence
            self._stats.num_steps += 1
            for sequence in list(self._running.values()):
                self._step(sequence)
            await asyncio.sleep(self.step_s)

    def _step(self, sequence: _Sequence) -> None:
        request = sequence.request
        sampling = request.sampling
        first = sequence.num_done == 0
        budget = max(0, min(sampling.max_tokens, self._room(request)) - sequence.num_done)
        drafts = NUM_DRAFTS
        if request.speculative.num_speculative_tokens is not None:
            drafts = min(drafts, request.speculative.num_speculative_tokens)
        accepted = sequence.rng.randint(0, drafts) if request.speculative.enabled else 0
        count = min(1 if first else accepted + 1, budget)
        tokens: list[int] = []
        reason = None
        for position in range(sequence.num_done, sequence.num_done + count):
            token = sequence.script[position % len(sequence.script)]
            tokens.append(token)
            if token in sampling.stop_token_ids and position + 1 > sampling.min_tokens:
                reason = "stop"
                break
        sequence.num_done += len(tokens)
        has_draft = not first and request.speculative.enabled
        counts = StepCounts(
            num_tokens=len(tokens),
            num_draft_tokens=drafts if has_draft else 0,
            num_accepted_tokens=min(accepted, len(tokens)) if has_draft else 0,
            depth=NUM_DRAFTS,
        )
        record_answer_step(sequence.spec, counts, request.speculative.detailed)
        record_step(self._stats, counts)
        detail = None
        if request.speculative.detailed:
            detail = [self._detail(request, tokens, 0 if first else accepted, drafts)]
        if reason is None and len(tokens) == budget:
            reason = "length"
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt_logprobs = [
                self.entry(token, sampling.prompt_logprobs)
                for token in request.prompt_token_ids[1:]
            ]
        if first:
            self._stats.num_prompt_tokens += len(request.prompt_token_ids)
            self._stats.num_served_prompt_tokens += len(request.prompt_token_ids)
        self._stats.num_generation_tokens += len(tokens)
        if reason is not None:
            del self._running[request.request_id]
        sequence.stream.push(
            EngineOutput(
                request_id=request.request_id,
                token_ids=tokens,
                logprobs=None
                if sampling.logprobs is None
                else [self.entry(token, sampling.logprobs) for token in tokens],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                num_cached_tokens=len(request.prompt_token_ids) // 16 * 16 if first else 0,
                spec_decode=sequence.spec if reason is not None else None,
                step_counts=[counts] if sampling.stop else None,
                steps=detail,
            )
        )

    def _detail(
        self, request: EngineRequest, tokens: list[int], accepted: int, drafts: int
    ) -> StepDetail:
        """A chain of drafts that are right as often as was drawn; later ones are one too high."""
        accepted = min(accepted, len(tokens))
        count = drafts if accepted and request.speculative.enabled else 0
        wrong = [(token + 1) % 300 for token in range(accepted, count)]
        return StepDetail(
            token_ids=tokens,
            draft_token_ids=tokens[:accepted] + wrong,
            draft_parents=list(range(-1, count - 1)),
            draft_scores=None,
            accepted=list(range(accepted)),
            num_forced_tokens=0,
            num_copied_tokens=0,
            num_rows=1 + count,
            num_seqs=1,
            seconds=0.002,
            device_seconds=0.001,
            draft_seconds=0.0005,
            wait_seconds=self.wait_seconds,
        )

    def _room(self, request: EngineRequest) -> int:
        return self.info.max_model_len - len(request.prompt_token_ids)

    def entry(self, token: int, num_top: int) -> TokenLogprobs:
        """Even tokens are the most likely ones, odd ones come third."""
        rank = 1 if token % 2 == 0 else 3
        others = [other for other in range(token + 1, token + 21) if other != token]
        best = [*others[: rank - 1], token, *others[rank - 1 :]]
        value = [math.log(0.5 / (place + 1)) for place in range(len(best))]
        return TokenLogprobs(
            token_ids=(token, *(other % 300 for other in best[:num_top])),
            logprobs=(value[rank - 1], *value[:num_top]),
            rank=rank,
        )


CYCLE = "one two three four five six seven eight. the quick brown fox jumps over the lazy dog."
