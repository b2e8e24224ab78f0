"""Made-up loads against the plain text: no schedule may show, no page may leak."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openspec.errors import RequestError
from openspec.messages import EngineRequest, SpeculativeOptions
from tests.unit.both_depths import both_depths
from tests.unit.examples import examples
from tests.unit.fake_core import Seen, expected, make_core, make_request
from tests.unit.fake_runner import VOCAB, FakeRunner, logprobs_of


@dataclasses.dataclass(kw_only=True)
class Spec:
    """One request of a made-up load; `arrives` and `aborts` count steps."""

    prompt: list[int]
    max_tokens: int
    min_tokens: int = 0
    stop: list[int] = dataclasses.field(default_factory=list)
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    drafts: int | None = None
    arrives: int = 0
    aborts: int | None = None
    has_grammar: bool = False

    def request(self, index: int) -> EngineRequest:
        return make_request(
            f"r{index}",
            self.prompt,
            priority=self.priority,
            max_tokens=self.max_tokens,
            min_tokens=0 if self.has_grammar else min(self.min_tokens, self.max_tokens),
            stop_token_ids=self.stop,
            seed=index % 3,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            speculative=SpeculativeOptions(num_speculative_tokens=self.drafts),
            grammar="g" if self.has_grammar else "",
        )


def check_schedule(
    runner: FakeRunner,
    max_num_seqs: int,
    specs: list[Spec],
    failures: set[int],
    displaces: bool = False,
) -> int:
    """Runs a load, with failing steps; returns the number of preemptions."""
    core = make_core(runner, max_num_seqs, displaces=displaces)
    core.grammars.set_vocabulary([b"a"], 1, [0])
    core.grammars.load_grammar("g", b"data")
    masks = random.Random(runner.num_pages + 1)
    runner.looks_away = lambda: masks.choice([0, 0, 1, 3])
    stages = random.Random(runner.num_pages)
    attempt = -1
    fails_at = ""

    def hook(stage: str) -> None:
        nonlocal attempt, fails_at
        if stage == "reserve":
            attempt += 1
            # Never twice in a row: the retry must save the step.
            is_due = attempt in failures and attempt - 1 not in failures
            fails_at = (
                stages.choice(["reserve", "propose", "score", "accept", "commit"]) if is_due else ""
            )
        if stage == fails_at:
            raise RuntimeError(f"injected at {stage}")

    runner.hook = hook
    requests = {f"r{index}": spec.request(index) for index, spec in enumerate(specs)}
    seen = {name: Seen() for name in requests}
    pending = dict(enumerate(specs))
    step = 0
    while pending or core.has_work:
        for index in [index for index, spec in pending.items() if spec.arrives <= step]:
            del pending[index]
            try:
                core.add_request(requests[f"r{index}"])
            except RequestError:
                del seen[f"r{index}"]
        for index, spec in enumerate(specs):
            if spec.aborts is not None and spec.arrives + spec.aborts == step:
                core.abort(f"r{index}")
        for output in core.step():
            seen[output.request_id].take(output)
        core.check_integrity()
        step += 1
        assert step < 5000, "the engine does not finish"
    assert runner.num_dry_steps == 0
    assert runner.num_free_pages == runner.num_pages
    assert runner.num_free_slots == max_num_seqs
    for name, one in seen.items():
        check_seen(requests[name], one)
    return core.stats().num_preemptions


def check_seen(request: EngineRequest, one: Seen) -> None:
    prompt, sampling = request.prompt_token_ids, request.sampling
    if sampling.max_tokens == 0:
        assert one.token_ids == []
        return
    tokens, reason = expected(request, 64)
    if one.finish_reason == "abort":
        assert one.token_ids == tokens[: len(one.token_ids)]
    else:
        assert (one.token_ids, one.finish_reason) == (tokens, reason)
    if sampling.logprobs is not None:
        assert len(one.logprobs) == len(one.token_ids)
        known = prompt + one.token_ids
        assert one.logprobs == [
            logprobs_of(known[:i], known[i], 0)[1][0] for i in range(len(prompt), len(known))
        ]
    if sampling.prompt_logprobs is not None and one.token_ids:
        assert one.prompt_logprobs == [
            logprobs_of(prompt[:i], prompt[i], 1)[1][0] for i in range(1, len(prompt))
        ]


REQUEST = {
    "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=40),
    "max_tokens": st.integers(0, 40),
    "min_tokens": st.integers(0, 3),
    "stop": st.lists(st.integers(0, VOCAB - 1), max_size=8),
    "priority": st.integers(-1, 1),
    "logprobs": st.sampled_from([None, 0, 2]),
    "prompt_logprobs": st.sampled_from([None, None, 1]),
    "drafts": st.sampled_from([None, None, 0, 1, 3]),
    "arrives": st.integers(0, 30),
    "aborts": st.sampled_from([None, None, None, 1, 5, 20]),
    "has_grammar": st.booleans(),
}


@pytest.mark.slow
@examples(300)
@given(
    specs=st.lists(st.builds(Spec, **REQUEST), min_size=1, max_size=12),
    num_pages=st.integers(16, 60),
    page_size=st.sampled_from([1, 4, 5]),
    max_num_seqs=st.integers(1, 6),
    extra_rows=st.sampled_from([0, 1, 3, 40]),
    num_drafts=st.integers(0, 6),
    caching=st.booleans(),
    failures=st.sets(st.integers(0, 200), max_size=6),
    num_steps_ahead=st.integers(0, 1),
    displaces=st.booleans(),
)
def test_any_schedule_gives_the_plain_text(
    specs: list[Spec],
    num_pages: int,
    page_size: int,
    max_num_seqs: int,
    extra_rows: int,
    num_drafts: int,
    caching: bool,
    failures: set[int],
    num_steps_ahead: int,
    displaces: bool,
) -> None:
    runner = FakeRunner(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + page_size + extra_rows,
        max_draft_tokens=num_drafts,
        enable_prefix_caching=caching,
        num_steps_ahead=num_steps_ahead,
    )
    check_schedule(runner, max_num_seqs, specs, failures, displaces)


@pytest.mark.slow
@both_depths
def test_scarce_pages_and_rows(num_steps_ahead: int) -> None:
    """The same under a load that hypothesis seldom makes up: preemption in most runs."""
    num_preemptions = 0
    for seed in range(150):
        rng = random.Random(seed)
        specs = [
            Spec(
                prompt=[rng.randrange(4) for _ in range(rng.randrange(1, 40))],
                max_tokens=rng.randrange(10, 40),
                priority=rng.randrange(3),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                arrives=rng.randrange(20),
                aborts=rng.choice([None] * 8 + [3, 15]),
                has_grammar=rng.random() < 0.5,
            )
            for _ in range(10)
        ]
        max_num_seqs = rng.randrange(2, 7)
        runner = FakeRunner(
            num_pages=rng.randrange(16, 24),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + 4 + rng.choice([0, 0, 1, 20]),
            max_draft_tokens=rng.choice([0, 3, 6]),
            enable_prefix_caching=rng.random() < 0.5,
            num_steps_ahead=num_steps_ahead,
        )
        failures = set(rng.sample(range(100), rng.choice([0, 0, 5])))
        displaces = rng.random() < 0.3
        num_preemptions += check_schedule(runner, max_num_seqs, specs, failures, displaces)
    assert num_preemptions > 200
