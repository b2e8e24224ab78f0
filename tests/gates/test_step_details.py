"""What an engine reports of each step, against the answer and against the counters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from openspec.drafters import plain_method
from openspec.engine.core.engine_core import EngineCore
from openspec.messages import EngineOutput, EngineRequest, SpeculativeOptions
from openspec.step_detail import StepDetail
from tests.gates import harness
from tests.gates.conftest import SELECTORS, STRANGER, TREES, Reference, drafter_settings
from tests.gates.harness import Job, make_core
from tests.gates.pairs import EMBEDDED
from tests.gates.workload import jobs

DETAILED = SpeculativeOptions(detailed=True)


def run_detailed(core: EngineCore, batch: Sequence[Job]) -> list[list[EngineOutput]]:
    """Every output of each job; every second job asks for details."""
    for index, job in enumerate(batch):
        core.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=list(job.prompt),
                sampling=job.sampling,
                speculative=job.speculative,
            )
        )
    outputs: list[list[EngineOutput]] = [[] for _ in batch]
    while core.has_work:
        for output in core.step():
            outputs[int(output.request_id)].append(output)
    core.check_integrity()
    return outputs


def path_of(step: StepDetail) -> list[int]:
    """The accepted drafts, found again: from the root the child that is the next token, if any."""
    path: list[int] = []
    for token in step.token_ids:
        at = path[-1] if path else -1
        children = [
            index
            for index, parent in enumerate(step.draft_parents)
            if parent == at and step.draft_token_ids[index] == token
        ]
        if not children:
            break
        path.append(children[0])
    return path


def num_levels(parents: Sequence[int]) -> int:
    """How deep a tree is: the most parents on the way from a draft to the root, itself counted."""

    def level(draft: int) -> int:
        return 0 if draft < 0 else 1 + level(parents[draft])

    return max((level(draft) for draft in range(len(parents))), default=0)


def check_step(step: StepDetail) -> None:
    """One step by itself."""
    num_drafts = len(step.draft_token_ids)
    assert len(step.draft_parents) == num_drafts
    assert all(-1 <= parent < index for index, parent in enumerate(step.draft_parents))
    assert step.accepted == path_of(step)
    # One token that is no draft ends every step, but one that ended with a draft.
    assert len(step.token_ids) - len(step.accepted) in (0, 1)
    if step.draft_scores is not None:
        assert len(step.draft_scores) == num_drafts
        assert all(score <= 0 for score in step.draft_scores)
        assert step.draft_scores == sorted(step.draft_scores, reverse=True)
    assert step.num_rows >= 1 + num_drafts
    assert 1 <= step.num_seqs <= step.num_rows
    assert 0 <= (step.draft_seconds or 0) <= step.device_seconds
    # On CUDA the device may have waited for others meanwhile, and the host is a step ahead.
    if harness.DEVICE == "cpu":
        assert step.device_seconds <= step.seconds * 1.1 + 1e-4


@pytest.mark.by_turns
@pytest.mark.parametrize("kind", ["mixed"])
def test_details(drafter_name: str, target_name: str, kind: str, reference: Reference) -> None:
    """Every token is in one step, in its place, and the steps add up to the counters."""
    batch = [
        dataclasses.replace(job, speculative=DETAILED if index % 2 else SpeculativeOptions())
        for index, job in enumerate(jobs(kind, 8))
    ]
    settings = drafter_settings(drafter_name, 5)
    settings.setdefault("adaptive_speculation", False)
    core = make_core(**settings, max_num_seqs=4)
    is_tree = drafter_name in (*TREES, "eagle3 copies tree")
    assert (core.info.max_draft_tokens > core.info.num_speculative_tokens) == is_tree
    expected = reference([dataclasses.replace(job, arrives_at=0) for job in jobs(kind, 8)])
    num_accepted, has_branch, has_scores = 0, False, False
    for index, outputs in enumerate(run_detailed(core, batch)):
        tokens = [token for output in outputs for token in output.token_ids]
        assert (tokens, outputs[-1].finish_reason) == expected[index].text
        if not index % 2:
            assert all(output.steps is None for output in outputs)
            continue
        for output in outputs:
            reported = [token for step in output.steps or () for token in step.token_ids]
            assert reported == output.token_ids
        steps = [step for output in outputs for step in output.steps or ()]
        for step in steps:
            check_step(step)
            has_branch = has_branch or step.draft_parents != list(
                range(-1, len(step.draft_parents) - 1)
            )
            has_scores = has_scores or step.draft_scores is not None
        assert all(len(step.token_ids) == 1 + len(step.accepted) for step in steps[:-1])
        stats = outputs[-1].spec_decode
        assert stats is not None
        drafted = [step for step in steps if step.draft_token_ids]
        assert stats.num_steps == len(steps)
        assert stats.num_drafts == len(drafted)
        assert stats.num_draft_tokens == sum(len(step.draft_token_ids) for step in drafted)
        assert stats.num_accepted_tokens_per_step == [len(step.accepted) for step in steps]
        deepest = max((len(step.accepted) for step in steps), default=0)
        per_pos = [sum(len(step.accepted) > k for step in steps) for k in range(deepest)]
        assert stats.num_accepted_tokens_per_pos[:deepest] == per_pos
        assert not any(stats.num_accepted_tokens_per_pos[deepest:])
        depths = [num_levels(step.draft_parents) for step in drafted]
        reached = [sum(depth > k for depth in depths) for k in range(max(depths, default=0))]
        assert stats.num_drafts_per_pos[: len(reached)] == reached
        assert not any(stats.num_drafts_per_pos[len(reached) :])
        assert max(len(step.draft_token_ids) for step in steps) <= max(
            core.info.max_draft_tokens, core.info.max_copied_drafts
        )
        num_accepted += sum(per_pos)
    # Others guess what these few answers say by luck only.
    is_lucky = drafter_name in (*SELECTORS, STRANGER) or target_name != EMBEDDED
    if drafter_name not in (plain_method(), "(garbage)") and not is_lucky:
        assert num_accepted > 0, "a gate without an accepted draft shows little"
    if drafter_name in TREES:
        assert has_branch
        assert has_scores


def test_offered_drafts(reference: Reference) -> None:
    """The drafts that a step reports are those that the drafter was seen to propose."""
    if harness.DEVICE != "cpu":
        pytest.skip("other steps are launched before the drafts of one can be looked at")
    settings = drafter_settings("(bush tree)", 5)
    core = make_core(**settings, max_num_seqs=1)
    job = dataclasses.replace(jobs("greedy", 1)[0], speculative=DETAILED)
    core.add_request(
        EngineRequest(
            request_id="0",
            prompt_token_ids=list(job.prompt),
            sampling=job.sampling,
            speculative=DETAILED,
        )
    )
    runner = core._runner
    num_seen = 0
    while core.has_work:
        for output in core.step():
            for step in output.steps or ():
                if not step.draft_token_ids:
                    continue
                count = len(step.draft_token_ids)
                assert step.draft_token_ids == runner.last_drafts()[0][:count]
                assert step.draft_parents == runner.last_draft_parents()[0][:count]
                num_seen += count
    assert num_seen > 0
