"""Text that is copied beside a drafter: answers are plain decoding's, and copies get through."""

from __future__ import annotations

import dataclasses

import pytest

from openspec.drafters import get_drafter, plain_method
from openspec.messages import SpeculativeOptions
from tests.gates.conftest import PYTHON_DRAFTERS, Reference, drafter_settings
from tests.gates.harness import Job, make_core, run, texts
from tests.gates.pairs import EMBEDDED
from tests.gates.workload import jobs

NUM_REPEATING = 4
"""The first prompts of the workload ask for text that stands in them."""


def repeating(kind: str) -> list[Job]:
    return list(jobs(kind, NUM_REPEATING, 60))


def has_copies(drafter_name: str) -> bool:
    """Beside what drafts itself, and does not itself copy."""
    if drafter_name in (*PYTHON_DRAFTERS, plain_method()):
        return False
    return not get_drafter(str(drafter_settings(drafter_name)["method"])).copies_text


@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_copies_beside_a_drafter(
    drafter_name: str, target_name: str, concurrency: int, kind: str, reference: Reference
) -> None:
    batch = repeating(kind)
    expected = texts(reference(batch))
    settings = drafter_settings(drafter_name) | {"adaptive_speculation": False}
    core = make_core(**settings, max_num_seqs=concurrency)
    assert texts(run(core, batch)) == expected
    stats = core.stats()
    assert stats.num_accepted_copied_tokens <= stats.num_copied_tokens <= stats.num_draft_tokens
    if not has_copies(drafter_name):
        assert stats.num_copied_tokens == 0
    elif target_name == EMBEDDED:
        assert stats.num_accepted_copied_tokens > 20


@pytest.mark.parametrize("adaptive", [True, False])
def test_copies_can_be_turned_off(drafter_name: str, adaptive: bool, reference: Reference) -> None:
    batch = repeating("mixed")
    settings = {"adaptive_speculation": adaptive, **drafter_settings(drafter_name)}
    core = make_core(**settings, copied_drafts=False)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.stats().num_copied_tokens == 0


def test_a_request_limits_copies_too(drafter_name: str, reference: Reference) -> None:
    batch = [
        dataclasses.replace(job, speculative=SpeculativeOptions(num_speculative_tokens=limit))
        for limit, job in enumerate(repeating("greedy"))
    ]
    core = make_core(**drafter_settings(drafter_name))
    assert texts(run(core, batch)) == texts(reference(batch))


def test_rejection_sampling_does_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    core = make_core(method="eagle3", acceptance="rejection", adaptive_speculation=False)
    assert core.info.max_copied_drafts == 0
    assert "copied from the text are off: --acceptance rejection" in caplog.text
    run(core, repeating("sampled"))
    assert core.stats().num_draft_tokens > 0 == core.stats().num_copied_tokens
