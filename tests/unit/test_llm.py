"""The real engine on the embedded model, through LLM and through the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import signal
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from openspec import _C
from openspec.config import EngineConfig
from openspec.drafters import available_drafters, get_drafter, plain_method
from openspec.engine.core.fan_out import engine_request
from openspec.engine.core.request import Request
from openspec.engine.devices import Share
from openspec.engine.load import load_engine
from openspec.engine.processes.client import EngineClient
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.llm import LLM
from openspec.messages import SamplingParams, StepTime, StructuredOutputs
from openspec.text.outputs import RequestOutput
from tests.heads.untrained import draft_model

METHODS = [name for name in available_drafters() if name != plain_method()]
PROMPTS = [
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "one two three one two three one two",
    "The moon",
    "a",
]


def mixed_requests() -> tuple[list[str], list[SamplingParams]]:
    """Prompts with every sampling parameter in use somewhere."""
    variants: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 20},
        {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9, "n": 2},
        {"temperature": 0.6, "min_p": 0.1, "logit_bias": {300: 2.0, 301: -5.0}},
        {"temperature": 0.7, "stop": ["return", " the"], "ignore_eos": True},
        {"temperature": 0.7, "stop_token_ids": list(range(260, 300))},
        {"temperature": 1.0, "allowed_token_ids": list(range(280, 320)), "ignore_eos": True},
    ]
    prompts, params = [], []
    for index, variant in enumerate(variants):
        for number, prompt in enumerate(PROMPTS):
            prompts.append(prompt)
            budget = 8 + (index * 7 + number * 5) % 40
            params.append(
                SamplingParams(**{"seed": index, "max_tokens": budget, **variant})  # type: ignore
            )
    params = [
        param if param.min_tokens <= param.max_tokens else SamplingParams(seed=1)
        for param in params
    ]
    return prompts, params


def essence(outputs: list[RequestOutput]) -> list[object]:
    """What must not depend on speculation or scheduling."""
    return [
        (
            output.prompt_logprobs,
            [
                (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
                for one in output.outputs
            ],
        )
        for output in outputs
    ]


def generate(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(*mixed_requests(), use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.stats().num_free_pages == llm.stats().num_pages
    return outputs


@pytest.fixture(scope="module")
def plain() -> Iterator[list[object]]:
    with LLM(method=plain_method(), enable_prefix_caching=False) as llm:
        outputs = generate(llm)
    assert {one.finish_reason for output in outputs for one in output.outputs} == {"stop", "length"}
    yield essence(outputs)


SETTINGS: list[dict[str, int]] = [
    {},
    {"adaptive_speculation": False},
    {"max_num_seqs": 1},
    {"max_num_seqs": 5, "max_num_batched_tokens": 21, "adaptive_speculation": False},
    {"page_size": 3, "max_num_seqs": 7},
    {"max_model_len": 128, "num_pages": 8, "adaptive_speculation": False},
    # At an unlucky pace of the machine a single draft never seems to pay.
    {"num_speculative_tokens": 1, "adaptive_speculation": False},
    {"num_speculative_tokens": 8, "adaptive_speculation": False},
    {"enable_prefix_caching": False},
]
CASES = [
    # Per commit each setting with one method, in turn; the gates cross them through the core.
    pytest.param(
        method, settings, marks=[pytest.mark.full] if (row - column) % len(METHODS) else []
    )
    for row, settings in enumerate(SETTINGS)
    for column, method in enumerate(METHODS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), CASES, ids=str)
def test_speculation_changes_nothing(
    plain: list[object], method: str, settings: dict[str, int]
) -> None:
    settings = {**settings}
    num_pages = settings.pop("num_pages", 0)
    if num_pages > 0:
        with LLM(method=method, draft_model=draft_model(method), **settings) as llm:
            settings["kv_cache_memory"] = num_pages * llm.engine.info.memory_plan["page_bytes"]
    with LLM(method=method, draft_model=draft_model(method), **settings) as llm:
        first = generate(llm)
        assert essence(first) == plain
        if llm.config.enable_prefix_caching:
            again = generate(llm)
            assert essence(again) == plain, "with a warm prefix cache"
        stats = llm.stats()
        # A head costs time, and so short a run may not show that it pays.
        is_costly = get_drafter(method).needs_draft_model
        may_not_draft = is_costly and settings.get("adaptive_speculation", True)
        assert stats.num_draft_tokens > 0 or may_not_draft
        if num_pages > 0:
            assert stats.num_preemptions > 0


def test_garbage_drafter(plain: list[object]) -> None:
    class Garbage(_C.Drafter):
        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            rng = random.Random(len(token_ids))
            if rng.random() < 0.1:
                raise RuntimeError("no idea")
            return [rng.choice([-1, 10**12, 3, 300, token_ids[-1]]) for _ in range(num_wanted + 1)]

    with LLM(num_speculative_tokens=4, drafter=Garbage(), adaptive_speculation=False) as llm:
        assert essence(generate(llm)) == plain
        assert llm.stats().num_drafter_failures > 0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt, also where tests run in processes that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_within_a_drafter_is_no_failure_of_it(plain: list[object]) -> None:
    class Interrupted(_C.Drafter):
        is_armed = True

        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            if self.is_armed:
                self.is_armed = False
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)  # the first waits for the end of the step
            return []

    with LLM(num_speculative_tokens=4, drafter=Interrupted(), adaptive_speculation=False) as llm:
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        assert llm.stats().num_drafter_failures == 0
        assert essence(generate(llm)) == plain


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_cuts_no_call_in_two() -> None:
    with LLM(method="none", max_num_seqs=1) as llm:
        queue = llm.engine._scheduler._queue
        runner = llm.engine._runner

        class Slow:
            """The signal comes while the runner takes the sequence."""

            def __getattr__(self, name: str) -> object:
                return getattr(runner, name)

            def add(self, request: Request) -> int:
                slot = runner.add(request)
                signal.raise_signal(signal.SIGINT)
                return slot

        expected = essence(generate(llm))
        queue._runner = Slow()
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        queue._runner = runner
        assert runner.num_free_slots == 1
        assert essence(generate(llm)) == expected
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fault_in_every_stage(plain: list[object]) -> None:
    with LLM(adaptive_speculation=False, max_num_seqs=6) as llm:
        runner = llm.engine._runner  # type: ignore[attr-defined]
        rng = random.Random(0)
        failed: list[str] = []
        phase = "may fail"

        def hook(stage: str) -> None:
            nonlocal phase
            if phase == "failed" and stage == "reserve":
                phase = "retry"
            elif phase == "retry" and stage == "commit":
                phase = "may fail"
            elif phase == "may fail" and rng.random() < 0.03:
                phase = "failed"
                failed.append(stage)
                raise RuntimeError(f"injected at {stage}")

        runner.set_stage_hook(hook)
        outputs = llm.generate(*mixed_requests(), use_tqdm=False)
        runner.set_stage_hook(None)
        # A page that is not published fails no step.
        assert llm.stats().num_step_failures == sum(stage != "publish" for stage in failed)
        assert len(set(failed)) >= 5
        assert essence(outputs) == plain
        assert essence(generate(llm)) == plain


def test_chat_and_conveniences() -> None:
    with LLM(seed=3) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        conversation = [{"role": "user", "content": "What is 2 + 3?"}]
        one = llm.chat(conversation, greedy, use_tqdm=False)
        two = llm.chat([conversation, conversation], greedy, use_tqdm=False)
        assert [o.outputs[0].text for o in two] == [one[0].outputs[0].text] * 2
        ids = llm.tokenizer.encode("The moon")
        by_text = llm.generate("The moon", greedy, use_tqdm=False)
        by_ids = llm.generate(ids, greedy, use_tqdm=False)
        both = llm.generate([ids, ids], [greedy, greedy], use_tqdm=False)
        assert {o.outputs[0].text for o in [*by_text, *by_ids, *both]} == {
            by_text[0].outputs[0].text
        }
        assert by_ids[0].prompt is None and by_text[0].prompt == "The moon"
        seeded = [llm.generate("The moon", use_tqdm=False)[0].outputs[0].token_ids for _ in "ab"]
        assert seeded[0] == seeded[1], "the engine's seed is the default"
        assert llm.generate([], use_tqdm=False) == []
        with pytest.raises(RequestError, match="outside"):
            llm.generate([[1, 2], [10**6]], use_tqdm=False)
        with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
            llm.generate("a", [greedy, greedy], use_tqdm=False)
        with pytest.raises(RequestError, match="maximum is"):
            llm.generate([[5], [5] * 50_000], use_tqdm=False)
        assert not llm.engine.has_work
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_close_frees_the_model() -> None:
    """At once, not when the collector comes, for the next model takes the memory."""
    llm = LLM(max_num_seqs=4)
    pattern = StructuredOutputs(choice=["yes", "no"])
    llm.generate("a", SamplingParams(structured_outputs=pattern), use_tqdm=False)
    runner = weakref.ref(llm.engine._runner)
    gc.disable()
    try:
        llm.close()
        assert runner() is None
    finally:
        gc.enable()


def test_settings_that_cannot_work() -> None:
    for settings, message in (
        ({"max_model_len": 1 << 20}, "exceeds what the model's positions are made for"),
        ({"kv_cache_memory": "10KiB"}, "holds 0 tokens"),
        ({"num_speculative_tokens": 1000}, r"must be in \[0, "),
        ({"max_seqs": 3}, "did you mean 'max_num_seqs'"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(**settings)  # type: ignore[arg-type]


def test_no_drafts_is_plain() -> None:
    with LLM(num_speculative_tokens=0) as llm:
        llm.generate(PROMPTS, use_tqdm=False)
        assert llm.stats().num_drafts == 0


def test_engine_process(plain: list[object]) -> None:
    async def tokens_of(client: EngineClient, name: str, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=24, seed=0)
        request = engine_request(name, prompt, sampling, [], bad_word_ids=[])
        stream = client.submit(request)
        return [token async for output in stream for token in output.token_ids]

    async def main() -> list[list[int]]:
        client = await EngineClient.start(EngineConfig(max_num_seqs=4))
        try:
            assert client.info.num_speculative_tokens > 0 and client.info.startup_seconds > 0
            kinds = [(step.num_seqs, step.num_rows) for step in client.info.step_times]
            assert kinds[0] == (1, 1) and all(rows >= seqs for seqs, rows in kinds)
            assert all(step.milliseconds > 0 for step in client.info.step_times)
            return await asyncio.gather(
                *(tokens_of(client, str(i), ids) for i, ids in enumerate(prompts))
            )
        finally:
            await client.close()

    with LLM(method=plain_method()) as llm:
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert asyncio.run(main()) == expected


def test_known_step_times_are_not_measured_again() -> None:
    times = [StepTime(num_seqs=1, num_rows=rows, proposes=False, milliseconds=1) for rows in (1, 5)]
    config = EngineConfig(max_num_seqs=4).with_folders()
    with contextlib.closing(load_engine(config, share=Share(step_times=times))) as core:
        assert core.info.step_times == times
    times.append(StepTime(num_seqs=1, num_rows=0, proposes=False, milliseconds=1))
    with pytest.raises(RuntimeError, match="a step time is not positive"):
        load_engine(config, share=Share(step_times=times))


def test_engine_process_refuses_in_one_line() -> None:
    async def main() -> None:
        await EngineClient.start(EngineConfig(max_model_len=1 << 20))

    with pytest.raises(ConfigError, match=r"^max_model_len 1048576 exceeds.*config\.json$"):
        asyncio.run(main())


def test_as_many_stop_ids_as_allowed_beside_the_models_own() -> None:
    with LLM(method=plain_method()) as llm:
        most = SamplingParams(max_tokens=4, stop_token_ids=[*range(1000, 2024)])
        outputs = llm.generate("The moon", most, use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason in ("stop", "length")
        with pytest.raises(RequestError, match="at most 1024 stop_token_ids, got 1025"):
            llm.generate("The moon", SamplingParams(stop_token_ids=[*range(1025)]))


@pytest.fixture(scope="module")
def greedy() -> Iterator[LLM]:
    with LLM(max_num_seqs=8, max_model_len=128, stats_interval_s=0.0) as llm:
        yield llm


def texts_of(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_what_prompts_may_be(greedy: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5)
    ids = greedy.tokenizer.encode("The moon")
    expected = texts_of(greedy.generate(["The moon", "a"], params, use_tqdm=False))
    for prompts in (iter(["The moon", "a"]), ("The moon", "a"), [tuple(ids), "a"]):
        assert texts_of(greedy.generate(prompts, params, use_tqdm=False)) == expected  # type: ignore
    assert texts_of(greedy.generate(ids, params, use_tqdm=False)) == expected[:1]
    assert greedy.generate([], params, use_tqdm=False) == []
    for bad in ({"prompt": "a"}, b"abc", [b"abc"], [True, False], [[1, 2.0]], [1, "a"], 5, [None]):
        with pytest.raises(RequestError):
            greedy.generate(bad, params, use_tqdm=False)  # type: ignore[arg-type]
    one = {"role": "user", "content": "hi"}
    with pytest.raises(RequestError, match="one conversation, or a list"):
        greedy.chat([one, [one]], params, use_tqdm=False)  # type: ignore[list-item]


def test_one_stop_string_is_a_list_of_one(greedy: LLM) -> None:
    def run(stop: object) -> list[str]:
        params = SamplingParams(temperature=0.0, max_tokens=30, stop=stop)  # type: ignore[arg-type]
        return texts_of(greedy.generate(PROMPTS, params, use_tqdm=False))

    assert run("the") == run(["the"]) != run(["t", "h", "e"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 4.0),
        ("max_tokens", None),
        ("top_k", 2.5),
        ("temperature", "0"),
        ("n", True),
        ("seed", 1.5),
        ("stop", None),
        ("stop_token_ids", [1.0]),
        ("logit_bias", {"1": 1.0}),
        ("logprobs_mode", "best"),
        ("ignore_eos", "no"),
    ],
)
def test_a_parameter_of_another_type_is_refused(greedy: LLM, name: str, value: object) -> None:
    with pytest.raises(
        RequestError, match=rf"sampling parameters: (every key of )?{name}(\[0\])?:? "
    ):
        greedy.generate("a", SamplingParams(**{name: value}), use_tqdm=False)  # type: ignore


def test_threads_take_turns(greedy: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    expected = texts_of(greedy.generate(PROMPTS, params, use_tqdm=False))
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(greedy.generate, PROMPTS, params, False) for _ in range(6)]
        assert [texts_of(run.result()) for run in runs] == [expected] * 6
    greedy.engine.check_integrity()


def test_generate_within_generate_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    class Nested(_C.Drafter):
        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            llm.generate("a", use_tqdm=False)
            return []

    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(drafter=Nested(), max_model_len=64, stats_interval_s=0.0) as llm:
        assert len(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) == 4
        assert llm.stats().num_drafter_failures > 0
        llm.engine.check_integrity()
    assert "the LLM was called while it generates" in caplog.text


def test_a_drafter_is_a_drafter(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            return []

    with pytest.raises(ConfigError, match=r"subclass of openspec\._C\.Drafter, got Plain"):
        LLM(drafter=Plain())  # type: ignore[arg-type]

    class Failing(_C.Drafter):
        def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
            raise ValueError("no idea")

    with LLM(drafter=Failing(), max_model_len=64, stats_interval_s=0.0) as llm:
        llm.generate("a", SamplingParams(max_tokens=4), use_tqdm=False)
    assert "no idea" in caplog.text
