"""Small language models that draft: of other families, in FP8, and with ends of texts in drafts."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from openspec.step_detail import StepDetail
from tests.gates import other_targets
from tests.gates.conftest import Reference, drafter_settings
from tests.gates.harness import Job, make_core, run, texts
from tests.gates.test_step_details import DETAILED, run_detailed
from tests.gates.workload import jobs

pytestmark = [pytest.mark.full, pytest.mark.parametrize("num_ranks", [1, 2])]


@pytest.mark.parametrize("family", ["llama", "qwen2.5", "fp8 block"])
def test_another_family_drafts(family: str, num_ranks: int, reference: Reference) -> None:
    """Which has the same tokens, and some of its drafts are right."""
    batch = jobs("mixed", 8)
    core = make_core(
        method="draft_model",
        draft_model=str(other_targets.folder(family)),
        num_speculative_tokens=4,
        adaptive_speculation=False,
        tensor_parallel_size=num_ranks,
    )
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_accepted_tokens > 10


def first_followed(steps: list[StepDetail], text: list[int]) -> int | None:
    """An accepted draft, new to the text, after which more was drafted."""
    num_known = 0
    for step in steps:
        for place, draft in enumerate(step.accepted):
            token = step.draft_token_ids[draft]
            if draft in step.draft_parents and token not in text[: num_known + place]:
                return token
        num_known += len(step.token_ids)
    return None


@pytest.mark.parametrize(
    "name", ["draft_model", "draft_model masks", "draft_model states", "draft_model tree"]
)
def test_texts_end_within_drafts(name: str, num_ranks: int, reference: Reference) -> None:
    """At a stop id that was drafted with others after it, which count for nothing."""
    settings = drafter_settings(name) | {
        "adaptive_speculation": False,
        "tensor_parallel_size": num_ranks,
    }
    batch = [dataclasses.replace(job, speculative=DETAILED) for job in jobs("mixed", 8, 60)]
    core = make_core(**settings)
    stopped: list[Job] = []
    expected = []
    for job, outputs, result in zip(
        batch, run_detailed(core, batch), reference(batch), strict=True
    ):
        steps = [step for output in outputs for step in output.steps or []]
        stop = first_followed(steps, result.token_ids)
        if stop is None:
            continue
        sampling = msgspec.structs.replace(job.sampling, stop_token_ids=[stop])
        stopped.append(dataclasses.replace(job, sampling=sampling))
        end = result.token_ids.index(stop) + 1
        expected.append((result.token_ids[:end], "stop"))
    assert stopped
    assert texts(run(core, stopped)) == expected
    assert texts(run(core, batch)) == texts(reference(batch))  # nothing is left of them
