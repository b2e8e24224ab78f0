"""Small language models that draft: transformers' assisted generation makes the same drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EMBEDDED_MODEL, EngineConfig
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions
from openspec.step_detail import StepDetail
from tests.gates.harness import make_core
from tests.gates.workload import prompts
from tests.heads import models

Round = tuple[list[int], int]
"""Drafts, and how many of them were accepted."""
NUM_DRAFTS, NUM_TOKENS = 4, 60
STOPS = ModelConfig.from_folder(EMBEDDED_MODEL).eos_token_ids


def steps_here(prompt: list[int], folder: Path) -> Iterator[StepDetail]:
    """Of a greedy answer."""
    core = make_core(
        method="draft_model",
        draft_model=str(folder),
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,
    )
    core.add_request(
        EngineRequest(
            request_id="0",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=NUM_TOKENS, seed=0, stop_token_ids=list(STOPS)
            ),
            speculative=SpeculativeOptions(detailed=True),
        )
    )
    while core.has_work:
        for output in core.step():
            yield from output.steps or []


def rounds_there(
    known: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Round], list[int]]:
    """The same of transformers, from a first chosen token on."""
    pytest.importorskip("transformers")
    from transformers.generation.candidate_generator import AssistedCandidateGenerator

    target, assistant = loaded(EMBEDDED_MODEL), loaded(folder)
    assistant.generation_config.update(
        num_assistant_tokens=NUM_DRAFTS,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    rounds: list[Round] = []
    drafts: list[list[int]] = []
    candidates, update = (
        AssistedCandidateGenerator.get_candidates,
        AssistedCandidateGenerator.update_candidate_strategy,
    )

    def noting_candidates(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found = candidates(self, input_ids, **kwargs)
        drafts.append(found[0][0, input_ids.shape[1] :].tolist())
        return found

    def noting_matches(self: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        rounds.append((drafts[-1], int(num_matches)))
        update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", noting_candidates)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", noting_matches)
    ids = torch.tensor([known])
    generated = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=NUM_TOKENS - 1,
    )
    return rounds, generated[0, len(known) :].tolist()


@pytest.mark.full
@pytest.mark.parametrize("kind", [models.CUT, models.STRANGER])
def test_drafts_of_assisted_generation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = num_accepted = 0
    for prompt in (list(prompts()[at]) for at in (0, 4, 8)):
        steps = list(steps_here(prompt, models.folder(kind)))
        here = [(step.draft_token_ids, len(step.accepted)) for step in steps]
        tokens = [token for step in steps for token in step.token_ids]
        there, others = rounds_there([*prompt, tokens[0]], models.folder(kind), monkeypatch)
        monkeypatch.undo()
        assert [tokens[0], *others] == tokens
        # The first step has the prompt alone; at the end both leave out drafts, each in its way.
        for (drafts, accepted), (expected, matches) in zip(here[1:-2], there[:-1], strict=False):
            assert (drafts[: len(expected)], accepted) == (expected, matches)
            num_compared += 1
            num_accepted += accepted
    assert num_compared >= 40
    assert num_accepted > 0 or kind == models.STRANGER


def loaded(folder: Path) -> Any:
    """A model of transformers, in fp32."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def drafts_there(known: list[int], drafter: Any, target: Any | None) -> list[int]:
    """Choices at the last known token and at masks after it.

    With a target its states, of the positions before, are added to the embeddings; masks repeat
    those of the last known token.
    """
    embedded = drafter.get_input_embeddings()(
        torch.tensor([known + [models.MASK] * (NUM_DRAFTS - 1)])
    )
    if target is not None:
        tensors = load_file(models.folder(models.STATES) / "model.safetensors")
        found = target(torch.tensor([known]), output_hidden_states=True).hidden_states
        states = torch.cat([found[index] for index in models.STATES_OF], dim=-1)[0]
        rows = [torch.zeros_like(states[0]), *states[:-1], *[states[-2]] * (NUM_DRAFTS - 1)]
        weight, bias = (tensors[f"target_proj.{name}"].float() for name in ("weight", "bias"))
        embedded = embedded + models.SCALE * (torch.stack(rows) @ weight.T + bias)
    logits: torch.Tensor = drafter(inputs_embeds=embedded).logits[0, len(known) - 1 :]
    return logits.argmax(-1).tolist()


@pytest.mark.full
@pytest.mark.parametrize("kind", [models.MASKS, models.STATES])
@torch.no_grad()
def test_masks_draft_as_in_pard(kind: str) -> None:
    folder = models.folder(kind)
    drafter, target = loaded(folder), loaded(EMBEDDED_MODEL) if kind == models.STATES else None
    num_compared = 0
    for prompt in (list(prompts()[at]) for at in (0, 4, 8)):
        known = list(prompt)
        for step in steps_here(prompt, folder):
            if step.draft_token_ids:
                drafts = drafts_there(known, drafter, target)
                assert step.draft_token_ids == drafts[: len(step.draft_token_ids)]
                num_compared += 1
            known += step.token_ids
    assert num_compared >= 40


@pytest.mark.full
@torch.no_grad()
def test_tokens_beyond_the_table_are_read_as_unknown() -> None:
    folder = models.folder(models.SHORT)
    config = EngineConfig(method="draft_model", draft_model=str(folder))
    setup = config.draft_setup(ModelConfig.from_folder(EMBEDDED_MODEL))
    assert setup.spec.read_draft_model is not None
    unknown = setup.spec.read_draft_model(setup).head.unknown_token
    drafter = loaded(folder)
    num_compared = num_unknown = 0
    known = list(prompts()[0])
    for step in steps_here(list(known), folder):
        if step.draft_token_ids:
            read = [token if token < models.FEWER else unknown for token in known]
            num_unknown += read != known
            drafts = drafter.generate(
                torch.tensor([read]), max_new_tokens=NUM_DRAFTS, do_sample=False, eos_token_id=None
            )[0, len(read) :].tolist()
            assert step.draft_token_ids == drafts[: len(step.draft_token_ids)]
            num_compared += 1
        known += step.token_ids
    assert num_compared >= 15 and num_unknown >= 15
