"""The tiny trained targets: transformers, their recipe and the engine compute the same."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from bench.oracles.targets import NUM_TOKENS, logits_of_openspec
from safetensors.torch import load_file

from openspec import LLM, SamplingParams, ops
from tests import models
from tests.gates.workload import prompts
from tests.golden.mtp_reference import MtpReference

transformers = pytest.importorskip("transformers", minversion="5.2")

MAX_ERROR = 1e-4
TEXTS = [token for prompt in prompts() for token in prompt]
TEXT = TEXTS[:NUM_TOKENS]


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        models.folder(name), dtype=dtype, attn_implementation="eager"
    ).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TEXT])).logits[0].float()


def worst(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Of all rows, relative to the largest logit of each."""
    return float(((found - truth).abs().amax(-1) / truth.abs().amax(-1)).max())


@pytest.mark.full
@pytest.mark.parametrize("name", models.NAMES)
def test_recipe(name: str) -> None:
    """Its model has the stored configuration and tensors, and computes what transformers does."""
    from bench.tiny_model.targets.train import KINDS

    model = KINDS[name.removeprefix("tiny_")][0]().eval()
    config = json.loads((models.stored(name) / "config.json").read_text())
    assert config == model.config.to_hugging_face()
    tensors = load_file(models.stored(name) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    model.load_state_dict(tensors)
    with torch.inference_mode():
        found = model(torch.tensor([TEXT]))[0]
    assert worst(found, logits_of(reference(name))) < MAX_ERROR


@torch.inference_mode()
def test_steps_of_training_are_drafts() -> None:
    """A chain of the recipe's head is one of the reference's, from a place within a text."""
    # Here, for it takes seconds: it imports torch's compiler.
    from bench.tiny_model.targets.hybrid import MTP_STEPS, TinyHybrid

    model, place = TinyHybrid().eval(), 20
    tensors = load_file(models.stored("tiny_hybrid") / "model.safetensors")
    model.load_state_dict(tensors)
    table = tensors["model.embed_tokens.weight"]
    reference = MtpReference(model.config.to_hugging_face(), tensors, table, table)
    states = model.model(torch.tensor([TEXT]))
    drafts, logits = reference.chain(TEXT[:place], states[0, : place - 1], MTP_STEPS)
    text = torch.tensor([TEXT[:place] + drafts + TEXT[place + MTP_STEPS :]])
    steps = model.mtp(model.model.embed_tokens(text), states)
    found = torch.stack([model.logits(step[0, place - 2]) for step in steps])
    assert worst(found, logits) < MAX_ERROR


@pytest.mark.full
@pytest.mark.parametrize("name", models.NAMES)
def test_logits(name: str) -> None:
    truth = logits_of(reference(name))
    rounded = logits_of(reference(name, torch.bfloat16))
    assert worst(logits_of_openspec(models.folder(name), TEXT, "float32"), truth) < MAX_ERROR
    found = logits_of_openspec(models.folder(name), TEXT, "bfloat16")
    # Of half of the rows: those that rounding sends to other experts are far off in both.
    errors = [(one - truth).square().mean(-1).median() for one in (found, rounded)]
    assert errors[0] <= errors[1]


@pytest.mark.full
@pytest.mark.parametrize("name", models.NAMES)
def test_greedy_texts(name: str) -> None:
    llm = LLM(
        str(models.folder(name)),
        device="cpu",
        dtype="float32",
        max_model_len=512,
        method="ngram",
        num_speculative_tokens=5,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=32)
    asked = [list(prompt) for prompt in prompts()[4:6]]
    for output in llm.generate(asked, sampling, use_tqdm=False):
        expected = reference(name).generate(
            torch.tensor([output.prompt_token_ids]), max_new_tokens=32, do_sample=False
        )[0, len(output.prompt_token_ids) :]
        assert output.outputs[0].token_ids == expected.tolist()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_routing(dtype: torch.dtype) -> None:
    """Every layer of the trained mixture sends its rows where transformers sends them.

    In bfloat16 the last chosen and the next expert may have logits that a step of rounding makes
    equal or swaps; those rows are listed.
    """
    model = reference("tiny_mixture", dtype)
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
        for layer in model.model.layers
    ]
    model(torch.tensor([TEXTS]))
    for hook in hooks:
        hook.remove()
    top_k = model.config.num_experts_per_tok
    for index, (layer, x) in enumerate(zip(model.model.layers, inputs, strict=True)):
        block = layer.mlp
        _, found, _ = ops.mixture(
            x.contiguous(),
            router=block.gate.weight.bfloat16(),
            gate_up=block.experts.gate_up_proj.bfloat16(),
            down=block.experts.down_proj.bfloat16(),
            top_k=top_k,
            norm_top_k=True,
        )
        logits, _, theirs = block.gate(x)
        differs = (found != theirs.sort(-1).values).any(-1)
        best = logits.float().topk(top_k + 1).values[:, -2:]
        step = best.abs().amax(-1) * (2**-7 if dtype == torch.bfloat16 else 0)
        near = (best[:, 0] - best[:, 1] <= step).nonzero().flatten().tolist()
        for row in near:
            print(f"layer {index}, row {row}: {best[row].tolist()}")
        assert not set(differs.nonzero().flatten().tolist()) - set(near)
        assert len(near) < len(TEXTS) / 4
        # Each expert is used: the router is a trained one.
        assert len(found.unique()) == model.config.num_experts
