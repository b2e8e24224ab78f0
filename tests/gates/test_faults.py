"""An exception in any stage of the step: nothing is lost, no page leaks, later text is unchanged."""  # noqa: E501

from __future__ import annotations

from itertools import count

import pytest

from openspec.engine.core import engine_core
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import EngineError
from openspec.messages import SamplingParams
from tests.gates import harness
from tests.gates.conftest import Reference, drafter_settings
from tests.gates.harness import Job, make_core, run, texts
from tests.gates.workload import jobs

STAGES = ("reserve", "propose", "score", "choose", "accept", "commit")


class Fault:
    """Raises at the given stage of chosen attempts."""

    def __init__(self, core: EngineCore, stage: str, every: int, times: int = 1) -> None:
        self.stage, self.every, self.times = stage, every, times
        self.num_attempts = self.num_raised = 0
        # The engine has no use for a hook; only tests and profilers reach for it.
        core._runner.set_stage_hook(self)  # type: ignore[attr-defined]

    def __call__(self, stage: str) -> None:
        self.num_attempts += stage == "reserve"
        if stage == self.stage and self.num_attempts % self.every < self.times:
            self.num_raised += 1
            raise RuntimeError(f"injected in {stage}")


@pytest.mark.by_turns
@pytest.mark.parametrize("stage", STAGES)
def test_one_failure_is_retried(drafter_name: str, stage: str, reference: Reference) -> None:
    batch = jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name))
    fault = Fault(core, stage, every=3)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert fault.num_raised > 3
    assert core.stats().num_step_failures == fault.num_raised


@pytest.mark.by_turns
@pytest.mark.parametrize("stage", STAGES)
def test_two_failures_fail_the_requests_of_the_step(
    drafter_name: str, stage: str, reference: Reference
) -> None:
    batch = jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name))
    Fault(core, stage, every=12, times=2)
    results = run(core, batch)  # checks that no page is held
    assert any(result.finish_reason == "error" for result in results)
    for result, expected in zip(results, reference(batch), strict=True):
        if result.finish_reason == "error":
            assert result.error is not None and "injected" in result.error
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            assert result.text == expected.text
    core._runner.set_stage_hook(None)  # type: ignore[attr-defined]
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.by_turns
def test_a_prefix_of_one_token_is_whole_while_it_is_all_there_is(drafter_name: str) -> None:
    """With a head the cached token runs again, so its page belongs to a sequence without KV."""
    if harness.DEVICE == "cuda":
        pytest.skip("on CUDA no page has one token")
    core = make_core(page_size=1, **drafter_settings(drafter_name))
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    run(core, [Job(prompt=(400, 401, 402), sampling=sampling)])
    Fault(core, "score", every=1)
    assert run(core, [Job(prompt=(400, 777), sampling=sampling)])[0].finish_reason == "error"


def test_a_drafter_that_raises_costs_drafts_only(reference: Reference) -> None:
    batch = jobs("mixed", 8)
    core = make_core(**drafter_settings("(garbage)"))
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_drafter_failures > 0
    assert core.stats().num_step_failures == 0


@pytest.mark.by_turns
def test_a_page_that_is_not_published_costs_nothing(
    drafter_name: str, reference: Reference
) -> None:
    batch = jobs("mixed", 8)
    core = make_core(**drafter_settings(drafter_name))
    fault = Fault(core, "publish", every=2)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert fault.num_raised > 3
    assert core.stats().num_step_failures == 0


@pytest.mark.by_turns
def test_a_request_that_is_not_admitted_is_the_only_one(
    drafter_name: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = jobs("mixed", 8)
    monkeypatch.setattr(engine_core, "MAX_FAILURES_IN_A_ROW", 100)
    core = make_core(**drafter_settings(drafter_name))

    numbers = count()

    def refuse(stage: str) -> None:
        if stage == "add" and next(numbers) % 3 == 1:
            raise RuntimeError("injected in add")

    core._runner.set_stage_hook(refuse)  # type: ignore[attr-defined]
    results = run(core, batch)
    refused = [result for result in results if result.finish_reason == "error"]
    assert len(refused) == core.stats().num_admission_failures >= 2
    for result, expected in zip(results, reference(batch), strict=True):
        assert result in refused or result.text == expected.text


def test_nothing_but_failures_end_the_engine() -> None:
    core = make_core()
    Fault(core, "score", every=1)
    job = Job(prompt=(400, 401), sampling=SamplingParams(temperature=0.0, max_tokens=4))
    for _ in range(engine_core.MAX_FAILURES_IN_A_ROW - 1):
        assert run(core, [job])[0].finish_reason == "error"
    with pytest.raises(EngineError, match=r"3 failures in a row; the last: .*injected in score"):
        run(core, [job])
