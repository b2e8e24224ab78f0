"""Sequences that sit steps out while their masks are made: when they do must not show."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import msgspec
import pytest

from openspec import _C
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.request import StepPlan
from openspec.messages import EngineOutput
from tests.gates import harness
from tests.gates.conftest import drafter_settings
from tests.gates.grammars import KINDS, ebnf, grammar_core, grammar_jobs, plain, tokens
from tests.gates.harness import Job, kv_memory, run, texts

AMBIGUOUS = 'root ::= root root | [a-z] | ""'


class Holder:
    """Gives each step of an engine a time for masks of its own: none, some or enough."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._random = random.Random(7)
        self.num_held = 0
        self._take = core._scheduler.update
        core._scheduler.update = self._update  # type: ignore[method-assign]
        core.on_launch = self._begin_step

    def _update(self, plan: StepPlan, results: Sequence[_C.SpanResult]) -> list[EngineOutput]:
        self.num_held += sum(result.is_held for result in results)
        return self._take(plan, results)

    def _begin_step(self, num_rows: int) -> None:
        pick = self._random.choice
        self._core._runner.set_grammar_times(
            mask=pick([0.0, 0.005, 0.005]),
            token=0.0001,
            step=pick([0.0, 1e-6, 3e-5, 0.05, 0.05]),
            first_try=pick([1e-6, 0.02]),
            request=1000.0,
        )


def mixed_jobs(kind: str, num_jobs: int) -> list[Job]:
    """Every grammar, and requests without one."""
    return [
        dataclasses.replace(job, grammar=job.grammar and KINDS[index % len(KINDS)])
        for index, job in enumerate(grammar_jobs(KINDS[0], kind, num_jobs, max_tokens=32))
    ]


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_holds_do_not_show(drafter_name: str, kind: str) -> None:
    batch = mixed_jobs(kind, 10)
    core = grammar_core(**drafter_settings(drafter_name))
    holder = Holder(core)
    assert texts(run(core, batch)) == texts(plain(batch))
    assert holder.num_held > 10


@pytest.mark.by_turns
def test_holds_with_preemption_chunks_and_prefix_hits(drafter_name: str) -> None:
    batch = mixed_jobs("mixed", 10)
    settings = drafter_settings(drafter_name)
    core = grammar_core(
        **settings,
        kv_cache_memory=kv_memory(12, **settings),
        max_model_len=160,
        max_num_batched_tokens=48,
    )
    holder = Holder(core)
    for _ in range(8):  # what is held, and so how many run at once, hangs on the clock
        assert texts(run(core, batch)) == texts(plain(batch))
        if core.stats().num_preemptions > 0 and core.stats().prefix_cache_hits > 0:
            break
    assert holder.num_held > 10
    assert core.stats().prefix_cache_hits > 0
    assert core.stats().num_preemptions > 0


def test_a_grammar_that_takes_too_long_ends_its_request_alone() -> None:
    core = grammar_core(**harness.PLAIN)
    core.grammars.load_grammar("ambiguous", ebnf(AMBIGUOUS))
    jobs = [dataclasses.replace(job, arrives_at=0) for job in grammar_jobs("regex", "greedy", 2)]
    sampling = msgspec.structs.replace(
        jobs[0].sampling, max_tokens=400, logit_bias={tokens()[2][0]: -100.0}
    )
    slow = dataclasses.replace(jobs[0], grammar="ambiguous", sampling=sampling)
    core._runner.set_grammar_times(mask=0.005, token=0.0001, step=0.05, first_try=0.02, request=0.3)
    [ended, other] = run(core, [slow, jobs[1]])
    assert ended.finish_reason == "error"
    assert ended.error is not None and "make it less ambiguous" in ended.error
    assert other.text == plain([jobs[1]])[0].text
