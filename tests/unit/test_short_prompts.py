"""Short prompts beside long ones: they start soon, and the long ones lose next to nothing."""

from __future__ import annotations

import dataclasses
import random

import pytest

from openspec.engine.core import planner
from openspec.messages import EngineRequest
from tests.unit.both_depths import both_depths
from tests.unit.fake_core import make_core, make_request
from tests.unit.fake_runner import VOCAB, FakeRunner
from tests.unit.test_schedules import Spec, check_schedule

ROWS = 512


@dataclasses.dataclass
class Load:
    """Requests that come while the first ones are on their way, and what became of them."""

    first: list[EngineRequest]
    later: list[EngineRequest]
    num_steps_ahead: int = 0
    num_pages: int = 4000
    max_num_seqs: int = 64
    started_at: dict[str, int] = dataclasses.field(default_factory=dict)
    """Steps from the arrival of the later ones to a first token."""
    rows_before: dict[str, int] = dataclasses.field(default_factory=dict)
    """Prompt rows of others that ran until then."""

    def run(self) -> Load:
        runner = FakeRunner(
            num_pages=self.num_pages,
            page_size=16,
            max_model_len=8000,
            max_num_batched_tokens=ROWS,
            max_num_seqs=self.max_num_seqs,
            max_draft_tokens=0,
            num_steps_ahead=self.num_steps_ahead,
        )
        core = make_core(runner, self.max_num_seqs)
        for request in self.first:
            core.add_request(request)
        core.step()
        for request in self.later:
            core.add_request(request)
        step = 0
        while core.has_work:
            step += 1
            for output in core.step():
                assert output.finish_reason in (None, "length")
                self.started_at.setdefault(output.request_id, step)
                self.rows_before.setdefault(output.request_id, core.stats().num_prompt_tokens)
            core.check_integrity()
        return self


def prompt(name: str, length: int, max_tokens: int = 1, priority: int = 0) -> EngineRequest:
    noise = random.Random(name)
    tokens = [noise.randrange(VOCAB) for _ in range(length)]
    return make_request(name, tokens, max_tokens=max_tokens, priority=priority)


@both_depths
@pytest.mark.parametrize("num_long", [1, 2])
def test_a_short_prompt_starts_within_three_chunks(num_steps_ahead: int, num_long: int) -> None:
    long = [prompt(f"long{number}", 6000) for number in range(num_long)]
    load = Load(long, [prompt("short", 100, max_tokens=20)], num_steps_ahead).run()
    assert load.started_at["short"] <= 3 + num_steps_ahead
    # In its last step the next long one has its first chunk.
    assert load.rows_before["long0"] <= 1.05 * 6000 + (num_long - 1) * ROWS


@both_depths
def test_a_long_prompt_loses_a_twentieth_at_most(num_steps_ahead: int) -> None:
    """However many pass it."""
    short = [prompt(f"short{number}", 100 + number) for number in range(40)]
    load = Load([prompt("long", 6000)], short, num_steps_ahead).run()
    # Its last step has a chunk of the next prompts, too.
    assert load.rows_before["long"] <= (-(-(6000 + 300) // ROWS) + num_steps_ahead) * ROWS
    started = [load.started_at[request.request_id] for request in short]
    # Rows up to the end of a page are of no use to the long one, and no loss.
    assert sum(step < load.started_at["long"] for step in started) in (2, 3)
    assert started == sorted(started)


def test_who_does_not_pass() -> None:
    """Prompts that are not short beside the first, and those of lower priority."""
    long, short = prompt("long", 6000), prompt("short", 100, priority=1)
    load = Load([long], [prompt("middle", 400), short]).run()
    assert load.started_at["long"] < min(load.started_at["middle"], load.started_at["short"])


def test_what_is_cached_need_not_be_computed() -> None:
    """A long conversation with a short question at its end is short."""
    talk = prompt("talk", 3000)
    more = make_request("more", [*talk.prompt_token_ids, *range(40)], max_tokens=1)
    runner = FakeRunner(
        num_pages=4000, page_size=16, max_model_len=8000, max_num_batched_tokens=ROWS
    )
    core = make_core(runner)
    core.add_request(talk)
    while core.has_work:
        core.step()
    core.add_request(prompt("long", 6000))
    core.step()
    core.add_request(more)
    assert any(output.request_id == "more" for _ in range(3) for output in core.step())


def test_what_another_one_computes_need_not_be_computed() -> None:
    """A follower of the first prompt passes the second one once it has its pages."""
    leader, long = prompt("leader", 3000), prompt("long", 6000)
    more = make_request("more", [*leader.prompt_token_ids, *range(40)], max_tokens=1)
    load = Load([leader, long], [more]).run()
    assert load.started_at["more"] <= load.started_at["leader"] + 3 < load.started_at["long"]
    assert load.rows_before["long"] <= 9000 + 300 + ROWS


@pytest.mark.parametrize("scarce", [{"num_pages": 380}, {"max_num_seqs": 1}])
def test_without_a_place_it_waits(scarce: dict[str, int]) -> None:
    load = Load([prompt("long", 6000)], [prompt("short", 100)], **scarce).run()
    assert load.started_at["long"] < load.started_at["short"]


@both_depths
def test_any_schedule_gives_the_plain_text(
    num_steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where prompts pass each other all the time, pages are short and steps fail."""
    monkeypatch.setattr(planner, "SHORT_SHARE", 2)
    monkeypatch.setattr(planner, "MOST_YIELDED", 1)
    for seed in range(60):
        rng = random.Random(seed)
        specs = [
            Spec(
                prompt=[rng.randrange(4) for _ in range(rng.choice([3, 8, 40, 45]))],
                max_tokens=rng.randrange(1, 15),
                priority=rng.choice([0, 0, 0, 1]),
                arrives=rng.randrange(15),
                aborts=rng.choice([None] * 8 + [3]),
            )
            for _ in range(12)
        ]
        max_num_seqs = rng.randrange(2, 7)
        runner = FakeRunner(
            num_pages=rng.randrange(16, 30),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + 4 + rng.choice([0, 4, 8]),
            max_draft_tokens=rng.choice([0, 3]),
            enable_prefix_caching=rng.random() < 0.5,
            num_steps_ahead=num_steps_ahead,
        )
        check_schedule(runner, max_num_seqs, specs, set(rng.sample(range(60), 3)))
