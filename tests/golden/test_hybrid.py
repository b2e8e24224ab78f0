"""Qwen3.5's kind of target: logits and greedy texts of transformers' own class."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.oracles.targets import logits_of_openspec

from openspec import LLM, SamplingParams
from tests.gates import harness, hybrid_target

NUM_TOKENS = 64
PROMPT = random.Random(1).choices(range(4000), k=NUM_TOKENS)


def reference(folder: Path, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.2")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def logits_of(model: Any, tokens: list[int], *, one_by_one: bool) -> torch.Tensor:
    """Of every position [tokens, vocabulary]; one by one: by the recurrent form."""
    with torch.inference_mode():
        if not one_by_one:
            return model(torch.tensor([tokens])).logits[0].float()
        cache, rows = None, []
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, 0].float())
        return torch.stack(rows)


@pytest.mark.parametrize(
    "one_by_one",
    [
        pytest.param(False, id="prompt"),
        pytest.param(True, id="token by token", marks=pytest.mark.full),
    ],
)
def test_logits(one_by_one: bool) -> None:
    folder = hybrid_target.folder()
    model = reference(folder, torch.bfloat16)
    rounded = logits_of(model, PROMPT, one_by_one=one_by_one)
    truth = logits_of(model.float(), PROMPT, one_by_one=one_by_one)

    def error(found: torch.Tensor) -> float:
        return float(((found - truth).square().mean() / truth.square().mean()).sqrt())

    if harness.DEVICE == "cpu":
        found = logits_of_openspec(folder, PROMPT, "float32")
        assert float(((found - truth).abs().amax(-1) / truth.abs().amax(-1)).max()) < 1e-4
    found = logits_of_openspec(folder, PROMPT, "bfloat16", harness.DEVICE)
    assert error(found) <= error(rounded)


def test_greedy_text() -> None:
    """Plain and drafted, over blocks of the recurrence and chunks of the prompt."""
    if harness.DEVICE == "cuda":
        pytest.skip("float32 is the CPU's")
    folder = hybrid_target.folder()
    model = reference(folder, torch.float32)
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=80, do_sample=False, eos_token_id=-1
    )[0, NUM_TOKENS:].tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    for settings in ({"method": "none"}, {"method": "ngram", "num_speculative_tokens": 7}):
        llm = LLM(
            str(folder),
            device="cpu",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=2,
            **settings,
        )
        assert llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0].token_ids == expected
