"""A call of the CUDA runtime that fails: the step is given up, the books are whole, the text stays.

What was enqueued before the failing call runs all the same, so every one of them leaves a step that
is half done. Where devices share a model, the others wait for what a step that is half done will
never send: there the engine ends, with one error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from openspec import _C
from openspec.engine import load
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import EngineError
from openspec.messages import SamplingParams
from tests.gates import harness
from tests.gates.conftest import drafter_settings
from tests.gates.harness import Job, make_core, run, texts

NUM_PROBED_STARTS = 12
JOBS = [
    # Longer than any recorded step, so that kernels are launched one by one.
    Job(
        prompt=tuple(400 + i % 7 for i in range(90)),
        sampling=SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    ),
    Job(
        prompt=tuple(500 + i % 3 for i in range(30)),
        sampling=SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True),
        arrives_at=3,
    ),
]


@pytest.fixture(autouse=True)
def needs_a_device() -> None:
    if harness.DEVICE != "cuda":
        pytest.skip("runs with --device cuda")


def small_core(drafter_name: str, **settings: object) -> EngineCore:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    return make_core(**{**limits, **drafter_settings(drafter_name), **settings})


def num_failures(core: EngineCore) -> int:
    stats = core.stats()
    return stats.num_step_failures + stats.num_admission_failures


def test_every_call_of_a_run(drafter_name: str) -> None:
    core = small_core(drafter_name)
    expected = texts(run(core, JOBS))
    core.reset_prefix_cache()
    _C.fail_check(0)
    run(core, JOBS)
    num_calls = _C.fail_check(0)
    core.check_integrity()  # as `run` does at its end
    num_calls -= _C.fail_check(0)
    assert num_calls > 25
    num_errors = 0
    for call in range(1, num_calls + 1):
        core.reset_prefix_cache()
        before = num_failures(core)
        _C.fail_check(call)
        try:
            results = run(core, JOBS)  # checks books and pages
        except EngineError as error:
            # Steps vary with the time they take, and then the check at the end is what fails.
            assert "cudaStreamSynchronize" in str(error) and not core.has_work
            continue
        finally:
            _C.fail_check(0)
        assert num_failures(core) <= before + 1
        for result, text in zip(results, expected, strict=True):
            if result.finish_reason == "error":  # the device refused to take it
                num_errors += 1
                assert result.token_ids == []
            else:
                assert result.text == text, f"call {call} of {num_calls}"
    assert 0 < num_errors < num_calls / 4
    assert num_failures(core) > num_calls / 4
    assert texts(run(core, JOBS)) == expected


def test_calls_of_a_start(drafter_name: str) -> None:
    # Timing steps takes as many of them as there is time for.
    untimed = {"adaptive_speculation": False}
    _C.fail_check(0)
    core = small_core(drafter_name, **untimed)
    num_calls = _C.fail_check(0)
    expected = texts(run(core, JOBS))
    del core
    for probe in range(NUM_PROBED_STARTS):
        # The first start of a process makes some calls that later ones do not.
        _C.fail_check(1 + probe * num_calls * 9 // (10 * NUM_PROBED_STARTS))
        with pytest.raises(EngineError, match="a failure that a test asked for"):
            small_core(drafter_name, **untimed)
    _C.fail_check(0)
    assert texts(run(small_core(drafter_name, **untimed), JOBS)) == expected


# ---- Devices that share a model -----------------------------------------------------------------

DEADLINE_S = 0.5


@pytest.fixture
def shared_core(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Callable[[], EngineCore]:
    """Makes engines of so many devices, which wait for each other for a short time."""
    if len(_C.cuda_device_names()) < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    plan_engine = load.plan_engine

    def impatient(*args: object) -> object:
        planned = plan_engine(*args)  # type: ignore[arg-type]
        runner = dataclasses.replace(planned.runner, exchange_deadline_s=DEADLINE_S)
        return dataclasses.replace(planned, runner=runner)

    monkeypatch.setattr(load, "plan_engine", impatient)
    return lambda: small_core("ngram", tensor_parallel_size=num_ranks, adaptive_speculation=False)


def ended(core: EngineCore) -> str:
    """Why the engine ends with the jobs; nothing is done by it afterwards."""
    began = time.monotonic()
    with pytest.raises(EngineError) as raised:
        run(core, JOBS)
    assert time.monotonic() - began < 20 * DEADLINE_S
    with pytest.raises(EngineError, match="the engine ends"):
        core.check_integrity()
    return str(raised.value)


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_device_that_fails(rank: int, shared_core: Callable[[], EngineCore]) -> None:
    core = shared_core()

    def fail(stage: str) -> None:
        if stage == f"rank {rank}":
            raise RuntimeError("broken")

    core._runner.set_stage_hook(fail)  # type: ignore[attr-defined]
    said = f"GPU {rank} could not do its part of a step; the engine ends: RuntimeError: broken"
    assert said in ended(core)


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_device_that_stalls(
    rank: int, num_ranks: int, shared_core: Callable[[], EngineCore]
) -> None:
    core = shared_core()

    def stall(stage: str) -> None:
        if stage == f"rank {rank}":
            time.sleep(4 * DEADLINE_S)

    core._runner.set_stage_hook(stall)  # type: ignore[attr-defined]
    error = ended(core)
    said = f"waited {DEADLINE_S} s for another GPU's part of a step; the engine ends"
    assert any(f"GPU {other} {said}" in error for other in range(num_ranks) if other != rank)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_of_devices(shared_core: Callable[[], EngineCore]) -> None:
    core = shared_core()
    expected = texts(run(core, JOBS))
    core.reset_prefix_cache()
    _C.fail_check(0)
    assert texts(run(core, JOBS)) == expected
    num_calls = _C.fail_check(0)
    num_ended = 0
    for probe in range(NUM_PROBED_STARTS):
        core = shared_core()
        _C.fail_check(1 + probe * num_calls * 9 // (10 * NUM_PROBED_STARTS))
        try:
            results = run(core, JOBS)
        except EngineError as error:
            assert "a failure that a test asked for" in str(error)
            num_ended += 1
        else:  # nothing of a step was enqueued by then, or all of it
            for result, text in zip(results, expected, strict=True):
                assert result.finish_reason == "error" or result.text == text
        finally:
            _C.fail_check(0)
    assert num_ended > 0
