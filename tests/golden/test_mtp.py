"""MTP drafts of the engine against the reference, over states of transformers' own class."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openspec import _C
from openspec.checkpoint.draft_model import added_token_ids
from openspec.checkpoint.quantization.declared import BLOCKS
from openspec.drafters.mtp import SPECULATORS
from openspec.tools.quantize import quantized_tensor
from tests.gates import hybrid_target
from tests.golden.engine_runs import add, check_logits, make_runner, prefill, step
from tests.golden.mtp_reference import MtpReference
from tests.heads.seeded import write

PROMPT = random.Random(1).choices(range(4000), k=37)
NUM_DRAFTS = 4
FULL = pytest.mark.full


class Truth:
    """Drafts after any tokens, by the reference."""

    def __init__(self, folder: Path) -> None:
        transformers = pytest.importorskip("transformers", minversion="5.2")
        self._model = transformers.Qwen3_5ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.weights = load_file(folder / "model.safetensors")
        self._head = self.head(self.weights)

    def head(self, weights: dict[str, Tensor]) -> MtpReference:
        table = self.weights["model.embed_tokens.weight"]
        return MtpReference(
            hybrid_target.CONFIG, weights, table, self.weights.get("lm_head.weight", table)
        )

    @torch.inference_mode()
    def chain(
        self, tokens: list[int], num_drafts: int = NUM_DRAFTS, head: MtpReference | None = None
    ) -> tuple[list[int], Tensor]:
        """transformers' last hidden state is the one after the final norm."""
        states = self._model.model(torch.tensor([tokens])).last_hidden_state[0]
        return (head or self._head).chain(tokens, states[:-1], num_drafts)


@functools.cache
def folder() -> Path:
    return hybrid_target.folder()


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(folder())


def make(num_drafts: int = NUM_DRAFTS, **options: Any) -> _C.Runner:
    return make_runner((folder(), folder()), "mtp", num_drafts, **options)


def check(runner: _C.Runner, slot: int, known: list[int], truth: Truth, num_drafts: int) -> None:
    """One step; its drafts are those after `known`, which grows by what it adds."""
    drafts, logits = truth.chain(known, num_drafts)
    known += step(runner, slot, 1, num_drafts)
    assert runner.last_drafts() == [drafts]
    check_logits(runner.last_draft_logits(), logits[-1])


@pytest.mark.parametrize("chunk", [16, *(pytest.param(chunk, marks=FULL) for chunk in (99, 7, 1))])
def test_drafts_after_a_prompt(chunk: int, truth: Truth) -> None:
    for num_drafts in (1, NUM_DRAFTS):
        runner = make(num_drafts)
        slot, known = prefill(runner, PROMPT, chunk)
        check(runner, slot, PROMPT + known, truth, num_drafts)


def test_drafts_of_every_step(truth: Truth) -> None:
    """Over the border of two blocks of the recurrence, with steps that draft nothing, and steps
    that are given up."""
    runner = make()
    slot, known = prefill(runner, PROMPT)
    known = PROMPT + known
    for index in range(13):
        if index % 3 == 1:
            known += step(runner, slot, 1, 0)
            continue
        if index % 3 == 2:
            lease = runner.reserve([(slot, 1, NUM_DRAFTS)])
            lease.launch()
            lease.close()
        check(runner, slot, known, truth, NUM_DRAFTS)


def test_a_prefix_hit_loses_nothing(truth: Truth) -> None:
    runner = make()
    for is_cached in (False, True):
        slot = add(runner, PROMPT)
        assert (runner.kv_len(slot) >= 15) is is_cached
        runner.remove_sequence(slot)
        slot, known = prefill(runner, PROMPT)
        check(runner, slot, PROMPT + known, truth, NUM_DRAFTS)
        runner.remove_sequence(slot)
        runner.check_integrity()


def test_a_part_of_the_vocabulary(truth: Truth) -> None:
    """The best of the lowest ids and the tokenizer's added tokens."""
    size = 256
    runner = make(1, draft_vocab_size=size)
    slot, known = prefill(runner, PROMPT)
    added = added_token_ids(folder())
    assert len(added) > 1
    columns = torch.tensor([*range(size - len(added)), *added])
    _, logits = truth.chain(PROMPT + known, 1)
    step(runner, slot, 1, 1)
    assert runner.last_drafts() == [[int(columns[logits[0][columns].argmax()])]]
    check_logits(runner.last_draft_logits(), logits[0][columns])


def test_a_head_as_speculators_writes_it(truth: Truth, tmp_path: Path) -> None:
    """Other names, the same numbers."""
    weights = load_file(folder() / "model.safetensors")
    renamed = {name: weights[one] for name, one in SPECULATORS.items()}
    head = write(tmp_path, ({"speculators_model_type": "mtp"}, renamed))
    runner = make_runner((folder(), head), "mtp", NUM_DRAFTS)
    slot, known = prefill(runner, PROMPT)
    check(runner, slot, PROMPT + known, truth, NUM_DRAFTS)


def test_a_layer_in_codes(truth: Truth, tmp_path: Path) -> None:
    """With scales of blocks; fc stays bfloat16."""
    stored, whole = {}, {}
    for name, tensor in truth.weights.items():
        if name.startswith("mtp."):
            stored[name] = whole[name] = tensor
        if re.match(r"mtp\.layers.*proj", name):
            codes, scale = quantized_tensor(tensor, BLOCKS, name)
            stored |= {name: codes, f"{name}_scale": scale}
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                : tensor.shape[0], : tensor.shape[1]
            ]
            whole[name] = codes.float() * wide
    numbers = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    lists = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
        "ignore": ["lm_head", "mtp.fc"],
    }
    (tmp_path / "config.json").write_text(
        json.dumps(hybrid_target.CONFIG | {"quantization_config": lists})
    )
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner((folder(), tmp_path), "mtp", NUM_DRAFTS)
    slot, known = prefill(runner, PROMPT)
    drafts, logits = truth.chain(PROMPT + known, head=truth.head(whole))
    assert not torch.allclose(logits, truth.chain(PROMPT + known)[1], rtol=1e-2)
    step(runner, slot, 1, NUM_DRAFTS)
    assert runner.last_drafts() == [drafts]
    check_logits(runner.last_draft_logits(), logits[-1])
