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


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_copies_beside_a_drafter(
    drafter_name: str, target_name: str, concurrency: int, kind: str, reference: Reference
) -> None:
    batch = repeating(kind)
    expected = texts(reference(batch))
    settings = drafter_settings(drafter_name) | {
        "adaptive_speculation": False,
        "copied_drafts": True,
    }
    core = make_core(**settings, max_num_seqs=concurrency)
    assert texts(run(core, batch)) == expected
    stats = core.stats()
    assert stats.num_accepted_copied_tokens <= stats.num_copied_tokens <= stats.num_draft_tokens
    if not has_copies(drafter_name):
        assert stats.num_copied_tokens == 0
    elif target_name == EMBEDDED:
        # A deep tree is seldom worth less than a copy.
        least = 0 if drafter_name == "eagle3 deep tree" else 20
        assert stats.num_accepted_copied_tokens > least


@pytest.mark.by_turns
def test_a_request_limits_copies_too(drafter_name: str, reference: Reference) -> None:
    batch = [
        dataclasses.replace(job, speculative=SpeculativeOptions(num_speculative_tokens=limit))
        for limit, job in enumerate(repeating("greedy"))
    ]
    core = make_core(**drafter_settings(drafter_name) | {"copied_drafts": True})
    assert texts(run(core, batch)) == texts(reference(batch))


def test_rejection_sampling_does_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    core = make_core(
        method="eagle3", acceptance="rejection", copied_drafts=True, adaptive_speculation=False
    )
    assert core.info.max_copied_drafts == 0
    assert "copied from the text are off: --acceptance rejection" in caplog.text
    run(core, repeating("sampled"))
    assert core.stats().num_draft_tokens > 0 == core.stats().num_copied_tokens


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("ngram", "greedy"),
        ("eagle3", "sampled"),
        ("dspark", "greedy"),
        pytest.param("ngram", "sampled", marks=pytest.mark.full),
        pytest.param("eagle3", "greedy", marks=pytest.mark.full),
        pytest.param("dspark", "sampled", marks=pytest.mark.full),
    ],
)
def test_answers_are_copied_for_their_owner_alone(
    method: str, kind: str, reference: Reference
) -> None:
    """Where texts do not repeat themselves, but others before."""
    batch = list(jobs(kind, 16, 60))[4:]
    expected = texts(reference(batch))
    settings = drafter_settings(method) | {"adaptive_speculation": False}
    core = make_core(**settings, draft_memory=1 << 18)

    def num_accepted(salt: str) -> int:
        before = core.stats().num_accepted_copied_tokens
        salted = [dataclasses.replace(job, cache_salt=salt) for job in batch]
        assert texts(run(core, salted)) == expected
        return core.stats().num_accepted_copied_tokens - before

    first, again, of_others = num_accepted("a"), num_accepted("a"), num_accepted("b")
    num_tokens = sum(len(tokens) for tokens, _ in expected)
    assert again > first + num_tokens // 4
    assert of_others < again - num_tokens // 4
    core.reset_prefix_cache()
    assert num_accepted("a") < again - num_tokens // 4
