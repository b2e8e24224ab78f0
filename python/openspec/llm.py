"""LLM: generation without a server, in this process."""

from __future__ import annotations

import logging
import numbers
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

from openspec.checkpoint.strict_json import JsonValue
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import config_from_settings
from openspec.engine.core.fan_out import engine_request, fan_out
from openspec.engine.memory import available_memory
from openspec.errors import EngineError, RequestError
from openspec.grammar.compiler import GrammarLimits
from openspec.messages import (
    DrafterState,
    EngineStats,
    SamplingParams,
    SpeculativeOptions,
    mean_acceptance_length,
)
from openspec.settings.setting import Raw
from openspec.text.grammars.loaded_grammars import LoadedGrammars
from openspec.text.outputs import RequestOutput, RequestOutputProcessor, request_output
from openspec.text.parsers.reasoning import thinking_of
from openspec.text.stop_strings import StopStrings
from openspec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from openspec import _C
    from openspec.engine.core.engine_core import EngineCore

logger = logging.getLogger(__name__)

Message = Mapping[str, JsonValue]
LOOK_S = 0.01
"""How long it waits for who generates before it looks again."""


class LLM:
    """A model and an engine of its own.

    Keyword arguments are the fields of `EngineConfig`, such as `method_options`, and
    `speculative_config` (a mapping, as vLLM takes it). `drafter` replaces the method's drafter by
    one written in Python, with the configured `num_speculative_tokens`. Threads may share an LLM:
    their calls run one after the other.
    """

    def __init__(
        self, model: str | None = None, *, drafter: _C.Drafter | None = None, **settings: Raw
    ) -> None:
        from openspec.engine.load import load_engine

        if model is not None:
            settings["model"] = model
        self.config = config_from_settings(settings).with_folders()
        model_config = ModelConfig.from_folder(self.config.model_path)
        self.tokenizer = Tokenizer.from_folder(self.config.model_path)
        self.model_config = model_config.with_eos_token(self.tokenizer.eos_token_id)
        self._core: EngineCore | None = load_engine(self.config, drafter)
        room = self._core.info.memory_plan["grammar_bytes"]
        limits = GrammarLimits.within(available_memory(), room)
        self._grammars = LoadedGrammars(
            self._core.grammars, self.tokenizer, self.model_config, limits
        )
        self.around_step: Callable[..., AbstractContextManager[object]] = nullcontext
        """What each step runs within; called with what raises once Ctrl-C has come."""
        self._num_requests = 0
        self._calls: SimpleQueue[tuple[Callable[[], DrafterState], Future[DrafterState]]]
        self._calls = SimpleQueue()
        """From other threads, to be called between two steps."""
        self._lock = threading.Lock()
        self._user: int | None = None  # the thread that generates

    @property
    def engine(self) -> EngineCore:
        """The engine core; EngineError once closed."""
        if self._core is None:
            raise EngineError("this LLM is closed")
        return self._core

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        speculative: SpeculativeOptions | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts (texts or token ids), batched; results in the order of the prompts.

        `speculative` is the requests' own say in speculation, as in `chat`.

        Raises:
            RequestError: for a request that cannot be served; nothing has run then.
        """
        texts: list[str | None] = []
        token_ids: list[list[int]] = []
        for prompt in _each_prompt(prompts):
            if isinstance(prompt, str):
                texts.append(prompt)
                token_ids.append(
                    self.tokenizer.encode(prompt, parse_special=True, add_special_tokens=True)
                )
            else:
                self.tokenizer.check_token_ids(prompt)
                texts.append(None)
                token_ids.append(prompt)
        return self._generate(texts, token_ids, sampling_params, use_tqdm, speculative)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        speculative: SpeculativeOptions | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template.

        Raises:
            RequestError: for messages that the template refuses, or as `generate`.
        """
        rendered = [
            self.tokenizer.render_chat(conversation, chat_template_kwargs=chat_template_kwargs)
            for conversation in _each_conversation(messages)
        ]
        return self._generate(
            [prompt.text for prompt in rendered],
            [prompt.token_ids for prompt in rendered],
            sampling_params,
            use_tqdm,
            speculative,
            is_chat=True,
        )

    def default_sampling_params(self) -> SamplingParams:
        """What is used without parameters: the checkpoint's own advice."""
        return SamplingParams(**self.model_config.sampling.given())

    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self.engine.stats()

    def swap_drafter(
        self, path: str | Path, *, sha256: str | None = None, flush_prefix_cache: bool = False
    ) -> DrafterState:
        """Has another draft head draft, of the same shape, from a folder below `drafter_dir`.

        A relative path is taken from there. The head is loaded while another thread may generate,
        and takes its place between two steps. No text depends on it. With `sha256`, that of its
        safetensors file, another file is refused. With `flush_prefix_cache` no later prompt begins
        with draft KV of the head before.

        Raises:
            RequestError: it is no such head; nothing has changed then.
        """
        self._refuse_own_thread()
        self.engine.drafters.begin_load(str(path), sha256).result()
        return self._between_steps(
            lambda: self.engine.exchange_drafter(flush_prefix_cache=flush_prefix_cache)
        )

    def rollback_drafter(self) -> DrafterState:
        """Has the draft head before this one draft again; a second time, this one.

        Raises:
            RequestError: there was none, or another one was loaded since.
        """
        self._refuse_own_thread()
        return self._between_steps(lambda: self.engine.exchange_drafter(back=True))

    def drafter(self) -> DrafterState:
        """Which draft head drafts, and what came of its drafts."""
        return self.engine.drafter_state()

    def close(self) -> None:
        """Frees the model."""
        if self._core is not None:
            self._grammars.close()
            self._core.close()
        self._core = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self,
        texts: Sequence[str | None],
        token_ids: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        speculative: SpeculativeOptions | None,
        is_chat: bool = False,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(token_ids)
        if len(sampling_params) != len(token_ids):
            raise RequestError(
                f"{len(sampling_params)} sampling parameters for {len(token_ids)} prompts"
            )
        with self._alone():
            groups = [
                self._processors(
                    prompt,
                    sampling.typed(),
                    speculative,
                    thinking_of(text) if is_chat and text is not None else None,
                )
                for text, prompt, sampling in zip(texts, token_ids, sampling_params, strict=True)
            ]
            by_id = {one.request.request_id: one for group in groups for one in group}
            self._run(by_id, use_tqdm)
        return [
            request_output(group[0].request.request_id.partition("-")[0], text, group)
            for text, group in zip(texts, groups, strict=True)
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The engine for one caller at a time."""
        self._refuse_own_thread()
        with self._lock:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._grammars.release()
                self._user = None

    def _refuse_own_thread(self) -> None:
        if self._user == threading.get_ident():
            raise EngineError("the LLM was called while it generates, by the same thread")

    def _between_steps(self, call: Callable[[], DrafterState]) -> DrafterState:
        """What `call` returns, called where no step is being planned: by who generates, or here."""
        answer: Future[DrafterState] = Future()
        self._calls.put((call, answer))
        while not answer.done():
            # Whoever generates may end without a look at what was put there last.
            if self._lock.acquire(timeout=LOOK_S):
                try:
                    self._answer_calls()
                finally:
                    self._lock.release()
        return answer.result()

    def _answer_calls(self) -> None:
        while not self._calls.empty():
            call, answer = self._calls.get()
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)

    def _processors(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        speculative: SpeculativeOptions | None,
        thinking: bool | None,
    ) -> list[RequestOutputProcessor]:
        """The sequences of one request; `thinking` as in `MessageParser`."""
        self._num_requests += 1
        sampling.check(self.model_config.vocab_size)
        grammar = self._grammars.load(sampling, thinking)
        stop_strings = StopStrings(sampling.stop) if sampling.stop else None
        form = self._grammars.form
        has_tags = bool(grammar) or not form.tag_ids  # or else no text shows where thinking ends
        request = engine_request(
            str(self._num_requests),
            prompt,
            sampling,
            self.model_config.eos_token_ids,
            bad_word_ids=self.tokenizer.ids_of_bad_words(sampling.bad_words),
            default_seed=self.config.seed,
            speculative=speculative,
            grammar=grammar,
        )
        return [
            RequestOutputProcessor(
                sequence,
                self.tokenizer,
                index=index,
                eos_token_ids=self.model_config.eos_token_ids,
                shown_token_ids=form.spelled_ids if grammar else (),
                stop_strings=stop_strings,
                thinking=form.span(thinking if has_tags else None),
            )
            for index, sequence in enumerate(fan_out(request))
        ]

    def _run(self, by_id: dict[str, RequestOutputProcessor], use_tqdm: bool) -> None:
        core = self.engine
        with _whole_steps() as check_ctrl_c:
            try:
                for one in by_id.values():
                    core.add_request(one.request)
                with closing(_Progress(core, len(by_id), use_tqdm)) as progress:
                    while core.has_work:
                        self._answer_calls()
                        with self.around_step(check_ctrl_c):
                            outputs = core.step()
                        for output in outputs:
                            one = by_id[output.request_id]
                            was_finished = one.finished
                            delta = one.process(output)
                            if delta.abort:
                                core.abort(output.request_id)
                            if delta.error is not None:
                                logger.error("request %s: %s", output.request_id, delta.error)
                            progress.advance(one.finished and not was_finished)
                        check_ctrl_c()
            except BaseException:
                for request_id in by_id:  # leaves the engine empty after an error or Ctrl-C
                    core.abort(request_id)
                if core.has_work:
                    core.step()
                raise


class _Progress:
    """A bar that counts finished sequences and shows tok/s and acceptance length."""

    def __init__(self, core: EngineCore, num_sequences: int, use_tqdm: bool) -> None:
        self._core = core
        self._before = core.stats().num_generation_tokens
        self._started = self._shown = time.monotonic()
        self._bar = tqdm(total=num_sequences, desc="sequences", disable=not use_tqdm, leave=True)

    def advance(self, is_finished: bool) -> None:
        if is_finished:
            self._bar.update()
        now = time.monotonic()
        if not self._bar.disable and now - self._shown >= 0.2:
            self._shown = now
            self._show()

    def close(self) -> None:
        if not self._bar.disable:
            self._show()
        self._bar.close()

    def _show(self) -> None:
        stats = self._core.stats()
        num_tokens = stats.num_generation_tokens - self._before
        rate = num_tokens / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"{rate:.1f} tok/s, acceptance length {mean_acceptance_length(stats):.2f}"
        )


@contextmanager
def _whole_steps() -> Iterator[Callable[[], None]]:
    """Within it Ctrl-C waits until what it yields is called, and cuts no step in two.

    A second one does not wait. Where Ctrl-C does not raise KeyboardInterrupt, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            signal.default_int_handler(number, frame)
        has_come = True

    def check() -> None:
        if has_come:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def _each_prompt(
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
) -> Iterator[str | list[int]]:
    given = [prompts] if isinstance(prompts, str) else _listed(prompts)
    if given and all(_is_id(item) for item in given):
        given = [given]
    for prompt in given:
        if isinstance(prompt, str):
            yield prompt
            continue
        items = _listed(prompt)
        if not all(_is_id(item) for item in items):
            raise RequestError("token ids must be integers", "prompt")
        yield [int(item) for item in items]


def _listed(value: object) -> list[Any]:
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(
            f"a prompt is a text or a list of token ids, got {type(value).__name__}; several stand "
            "in a list, either all of them or none",
            "prompt",
        )
    return list(value)


def _is_id(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _each_conversation(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Iterator[list[Message]]:
    given = list(messages)
    if all(isinstance(item, Mapping) for item in given):
        if given:
            yield [item for item in given if isinstance(item, Mapping)]
        return
    for item in given:
        if not isinstance(item, (list, tuple)):
            raise RequestError("messages are one conversation, or a list of them", "messages")
        yield list(item)
