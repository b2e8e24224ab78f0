"""What every handler needs: engine, tokenizer, settings, metrics, threads, requests in hand."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EngineConfig
from openspec.engine.memory import available_memory
from openspec.engine.processes.replicas import Replicas
from openspec.errors import RequestError
from openspec.grammar.compiler import GrammarLimits
from openspec.messages import MAX_ALLOWED_IDS_OF_ALL, EngineStats
from openspec.records.recorder import Limits, Recorder
from openspec.records.shards import target_identity
from openspec.serve.config import ServeConfig
from openspec.serve.generation.grammars import GrammarStore
from openspec.serve.generation.kept_responses import KeptResponses
from openspec.serve.generation.metrics import ServerMetrics
from openspec.serve.shapes.wire import FAILURES, ApiError, overloaded
from openspec.text.parsers.message import AnswerForm
from openspec.text.pool import TextPool
from openspec.text.tokenizer import Tokenizer
from openspec.text.turns import Lanes

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""Of bodies, whose values may take forty times as much."""
MAX_NOTES = 64
MAX_LOGPROBS_HELD = 4 << 20
"""Of prompts and answers, that all requests together may ask for."""
MAX_SMALL_BODIES, MAX_LARGE_BODIES = 16, 2
"""Read at a time: Python's collector holds everything up while it looks at their values."""
BODIES_SHARE = 128
"""The part of the free memory that bodies of requests may take at a time."""
TRIM_AFTER_S = 1.0
"""Later than the last use of what is given back."""


@dataclass(slots=True)
class Budget:
    """What all requests together may take of something."""

    what: str
    most: int
    on_refusal: Callable[[], None]
    on_empty: Callable[[int], None] | None = None
    """Called when all of it is back, with the most that was taken."""
    taken: int = 0
    _peak: int = 0

    @contextlib.contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yields what takes more for one request; leaving gives all of that back.

        Taking raises:
            RequestError: the request alone exceeds the limit.
            ApiError: 503, others have taken too much.
        """
        own = 0

        def take(num: int) -> None:
            nonlocal own
            if own + num > self.most:
                raise RequestError(
                    f"The request has {own + num} {self.what}; this server takes up to {self.most} "
                    "at a time."
                )
            if self.taken + num > self.most:
                self.on_refusal()
                raise overloaded(
                    f"Other requests have taken {self.taken - own} of {self.most} {self.what}, and "
                    f"this one needs {own + num}; try again later.",
                    retry_after_s=1,
                )
            own += num
            self.taken += num
            self._peak = max(self._peak, self.taken)

        try:
            yield take
        finally:
            self.taken -= own
            if self.taken == 0 and self.on_empty is not None:
                peak, self._peak = self._peak, 0
                self.on_empty(peak)


class Abortable(Protocol):
    """A request that can be told to end within a step."""

    request_id: str
    external_id: str
    owner: bytes | None

    def abort(self) -> None:
        """Ends it."""


class Lifecycle:
    """Draining state and the register of running requests."""

    def __init__(self) -> None:
        self.is_draining = False
        """From the first signal on: not ready any more."""
        self.is_refusing = False
        """From the end of the grace period on: new requests get 503."""
        self.is_ending = False
        """From the end of the drain's patience on: not even what came in before may start."""
        self._jobs: dict[str, Abortable] = {}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_jobs(self) -> int:
        """Generation requests in flight."""
        return len(self._jobs)

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Holds up the end of the server, from a request's head until its answer is sent."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def enter(self, job: Abortable) -> None:
        """Registers a request that generates, within its `open_request`."""
        self._jobs[job.request_id] = job

    def leave(self, job: Abortable) -> None:
        """Takes it out."""
        self._jobs.pop(job.request_id, None)

    def abort(self, request_id: str, owner: bytes | None) -> int:
        """Aborts the owner's requests of this id, ours or the client's; returns how many."""
        found = [
            job
            for job in self._jobs.values()
            if job.owner == owner and request_id in (job.request_id, job.external_id)
        ]
        for job in found:
            job.abort()
        return len(found)

    def abort_all(self) -> int:
        """Aborts everything; returns how many requests that were."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.abort()
        return len(jobs)

    def end_all(self) -> int:
        """Aborts everything for good; returns how many requests are open."""
        self.is_ending = True
        self.abort_all()
        return self._num_open

    async def drain(self, grace_s: float, timeout_s: float) -> None:
        """Waits for the open requests, then ends them."""
        self.is_draining = True
        if grace_s > 0:
            await asyncio.sleep(grace_s)
        self.is_refusing = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("ending %d requests that are still open", self.end_all())
            await self.wait_idle(5.0)

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no request is open, but not for ever."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.error("%d requests did not end", self._num_open)


@dataclass(slots=True)
class ServerContext:
    """One server. Belongs to one event loop."""

    config: ServeConfig
    engine_config: EngineConfig
    engine: Replicas
    model: ModelConfig
    tokenizer: Tokenizer
    model_names: list[str]
    """What requests may call the model; answers carry the first."""
    text_pool: TextPool
    metrics: ServerMetrics = field(init=False)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    answer_form: AnswerForm = field(init=False)
    body_bytes: Budget = field(init=False)
    echo_bytes: Budget = field(init=False)
    logprobs: Budget = field(init=False)
    allowed_ids: Budget = field(init=False)
    grammars: GrammarStore = field(init=False)
    responses: KeptResponses = field(default_factory=KeptResponses)
    is_draft_update: bool = False
    """Whether a draft head may come by vLLM's paths."""
    recorder: Recorder | None = field(init=False, default=None)
    """Keeps texts for draft heads to learn from; None: nothing is kept."""
    created: int = field(default_factory=lambda: int(time.time()))
    _notes: set[str] = field(default_factory=set)
    num_sequences: int = 0
    """In flight, running or waiting."""
    num_prompt_tokens: int = 0
    """Of their prompts, each counted once."""
    num_preparing: int = 0
    """Requests whose bodies are there and whose prompts are not ready."""
    bodies: Lanes = field(default_factory=lambda: Lanes(MAX_SMALL_BODIES, MAX_LARGE_BODIES))
    """Those whose values are in memory; further ones wait as bytes, the smallest first."""

    def __post_init__(self) -> None:
        self.model = self.model.with_eos_token(self.tokenizer.eos_token_id)
        self.answer_form = AnswerForm.of(
            self.tokenizer, self.config.tool_call_parser, self.config.reasoning_parser
        )
        self.metrics = ServerMetrics(self.model_name, self.engine.info, len(self.engine.all))
        available = available_memory()
        self.grammars = GrammarStore(
            self.engine,
            self.text_pool,
            lambda: self.tokenizer.grammar_tokens(self.answer_form.spelled_ids),
            self.model.vocab_size,
            list(self.model.eos_token_ids),
            GrammarLimits.within(
                available,
                self.engine.info.memory_plan["grammar_bytes"],
                self.config.grammar_timeout_s,
            ),
        )
        config = self.config
        if config.capture_dir is not None:
            self.recorder = Recorder(
                Path(config.capture_dir),
                target_identity(self.model.folder),
                Limits(
                    share=config.capture_share,
                    max_rate=config.capture_rate,
                    max_bytes=config.capture_max_bytes,
                    ttl_s=config.capture_ttl_s,
                ),
            )
            logger.info("texts are kept as token ids in %s", config.capture_dir)
        refused = self.metrics.rejections.labels("over_budget").inc
        most = max(available // BODIES_SHARE, self.config.max_body_bytes)
        self.body_bytes = Budget("bytes of bodies", most, refused, _Trimming())
        self.echo_bytes = Budget("bytes that answers repeat", most, refused)
        self.logprobs = Budget("log-probabilities", MAX_LOGPROBS_HELD, refused)
        self.allowed_ids = Budget(
            "allowed_token_ids times sequences", MAX_ALLOWED_IDS_OF_ALL, refused
        )

    def close(self) -> None:
        """Ends the threads and processes that prepare requests."""
        self.text_pool.close()
        self.grammars.close()
        if self.recorder is not None:
            self.recorder.close()

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    @property
    def is_ready(self) -> bool:
        """Whether new requests are welcome."""
        least = self.config.min_replicas or 1
        return self.engine.num_accepting >= least and not self.lifecycle.is_draining

    def check_engine(self, number: int | None = None) -> None:
        """Refuses anything while no engine gets requests, or not the one of that number.

        Raises:
            ApiError: 503, with a code that tells why.
        """
        code = self.engine.failure if self.engine.num_accepting == 0 else None
        if number is not None:
            code = self.engine.all[number].failure
        if code is not None:
            retry_after_s = 1 if code == "engine_late" else 10
            raise overloaded(FAILURES[code], retry_after_s=retry_after_s, code=code)

    def check_alive(self) -> None:
        """Refuses anything while no engine runs; one that is late may be back in a moment.

        Raises:
            ApiError: 503, with a code that tells why.
        """
        if not self.engine.is_alive:
            self.check_engine()

    def check_admin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Demands the admin key where one is set.

        Raises:
            ApiError: 401.
        """
        key = self.config.admin_api_key
        if key is not None and key_of(headers, [key.encode()]) is None:
            raise ApiError(
                401,
                "Incorrect API key provided; this endpoint needs the admin API key.",
                code="invalid_api_key",
            )

    def check_model(self, name: str | None) -> None:
        """Refuses a model that is not served here.

        Raises:
            ApiError: 404.
        """
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    @contextlib.contextmanager
    def preparation(self) -> Iterator[None]:
        """Counts a request as one sequence from its body to its prompt.

        Raises:
            ApiError: 503, there is no room in the queue.
        """
        self._check_room(1, 1, self.num_preparing)
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def check_capacity(self, num_sequences: int = 1, num_prompt_tokens: int = 1) -> None:
        """Refuses a request while the queue has no room, the engine is gone or the server ending.

        Raises:
            ApiError: 503.
            RequestError: not even an empty queue has room for it.
        """
        if self.lifecycle.is_ending:
            raise overloaded("The server is shutting down.", retry_after_s=5, close=True)
        self.check_engine()
        self._check_room(num_sequences, num_prompt_tokens)

    def _check_room(self, num_sequences: int, num_prompt_tokens: int, num_ahead: int = 0) -> None:
        sizes = (
            ("sequences", num_sequences, self.num_sequences + num_ahead),
            ("prompt tokens", num_prompt_tokens, self.num_prompt_tokens),
        )
        queues = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        for (what, wanted, taken), num_running, num_queued in zip(
            sizes, self.engine.capacity(), queues, strict=True
        ):
            if num_queued is None or taken + wanted <= num_running + num_queued:
                continue
            most = num_running + num_queued
            if wanted > most:
                raise RequestError(
                    f"The request has {wanted} {what}; this server takes up to {most} at a time."
                )
            self.metrics.rejections.labels("queue_full").inc()
            raise overloaded(
                f"Too many requests are waiting: {taken} of {most} {what} are taken, and this one "
                f"needs {wanted}; try again later.",
                retry_after_s=1,
            )

    def note_once(self, note: str) -> None:
        """Logs what the server leaves out of requests, the first time that it does."""
        if note not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.add(note)
            logger.info("%s", note)

    async def stats(self) -> EngineStats:
        """Statistics of all engines together, at most a moment old."""
        stats = await self.engine.stats()
        self.metrics.update(self.engine.all)
        return stats


class _Trimming:
    """Has the C library return what large bodies took, which it would keep in pieces."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self, num_bytes: int) -> None:
        """After bodies that took so many bytes, and those that come soon after them."""
        if num_bytes >= LARGE_BYTES:
            if self._timer is not None:
                self._timer.cancel()
            trim = threading.Thread(target=_trim, daemon=True)
            self._timer = asyncio.get_running_loop().call_later(TRIM_AFTER_S, trim.start)


def _trim() -> None:
    gc.collect()  # connections and what they received refer to one another
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def key_of(headers: Sequence[tuple[bytes, bytes]], keys: Sequence[bytes]) -> bytes | None:
    """The key that the request carries, found in a time that does not depend on the keys."""
    given = [value for name, value in headers if name == b"authorization"]
    tokens = [value for name, value in headers if name == b"x-api-key"]
    if len(given) > 1 or len(tokens) > 1:
        return None
    for value in given:
        scheme, _, token = value.partition(b" ")
        if scheme.lower() == b"bearer":
            tokens.append(token)
    tokens = [token.strip() for token in tokens]
    matches = [
        key if hmac.compare_digest(token, key) else None
        for token in tokens
        for key in keys
        if token
    ]
    return next((key for key in matches if key is not None), None)
