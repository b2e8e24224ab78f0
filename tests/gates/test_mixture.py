"""Mixtures of experts: FP8, experts that a file keeps together, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bench import known_text
from bench.random_target import PUBLISHED, write_random_target

from openspec.errors import ConfigError
from openspec.tools.quantize import write_quantized
from tests.gates import harness, other_targets
from tests.gates.test_logits import MAX_ERROR, assert_same_bits, reference, worst_error
from tests.gates.test_quantized import dequantised, subject
from tests.gates.test_tensor_parallel import new_folder
from tests.gates.workload import jobs

SHAPE = {
    # Blocks of 128 that an expert's rows cut; a layer without experts.
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 208,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 160,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "vocab_size": 515,
    "eos_token_id": 2,
}
# What every device computes.
WIDE = {"hidden_size": 320, "num_attention_heads": 4, "head_dim": 128, "vocab_size": 4096}
TOKENS = np.random.default_rng(3).integers(0, SHAPE["vocab_size"], 85).tolist()


@pytest.fixture
def on_the_host() -> None:
    if harness.DEVICE != "cpu":
        pytest.skip("of the host, whatever the device")


@cache
def plain_folder() -> Path:
    return write_random_target(new_folder(), PUBLISHED["qwen3-30b-a3b"] | SHAPE)


def with_tensors(folder: Path, root: Path, tensors: dict[str, Any], **changes: Any) -> Path:
    """A copy of a model folder's config.json with other weights."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (root / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return root


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("wanted", ["fp8", "fp8_per_block"])
def test_logits_in_fp8(wanted: str, tmp_path: Path) -> None:
    """Those of the dequantised model; codes of a file and codes made at load have the same bits."""
    write_quantized(plain_folder(), tmp_path / "codes", wanted)
    tensors = safetensors.torch.load_file(tmp_path / "codes" / "model.safetensors")
    (tmp_path / "whole").mkdir()
    whole = with_tensors(plain_folder(), tmp_path / "whole", dequantised(tensors), dtype="float32")
    truth = reference(whole, TOKENS, torch.float32)
    found = subject(tmp_path / "codes").score(TOKENS, len(TOKENS))
    assert worst_error(found.logits, truth.logits) < MAX_ERROR
    for chunk in (1, 16):
        assert_same_bits(subject(tmp_path / "codes").score(TOKENS, chunk), found)
    assert_same_bits(subject(plain_folder(), wanted).score(TOKENS, 33), found)


@pytest.mark.usefixtures("on_the_host")
def test_experts_in_a_file_together(tmp_path: Path) -> None:
    tensors = safetensors.torch.load_file(plain_folder() / "model.safetensors")
    for layer in (0, 2):
        at = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors.pop(f"{at}{i}.{part}_proj.weight") for i in range(12)])
            for part in ("gate", "up", "down")
        }
        tensors[f"{at}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{at}down_proj"] = parts["down"].contiguous()
    together = with_tensors(plain_folder(), tmp_path, tensors)
    expected = subject(plain_folder()).score(TOKENS, len(TOKENS))
    assert_same_bits(subject(together).score(TOKENS, len(TOKENS)), expected)
    # From float16, which is read by way of torch.
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    halves |= {name: one.float() for name, one in tensors.items() if "norm" in name}
    coarse = subject(with_tensors(plain_folder(), tmp_path, halves)).score(TOKENS, len(TOKENS))
    assert worst_error(coarse.logits, expected.logits) < 0.2


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.full
def test_a_layer_of_published_widths() -> None:
    """Of Qwen3-235B-A22B, with 4 experts of 128. All of it fits no GPU, so none has kernels for 16
    query heads of a key head."""
    few = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 515}
    config = PUBLISHED["qwen3-235b-a22b"] | few | {"eos_token_id": 2}
    folder = write_random_target(new_folder(), config)
    truth = reference(folder, TOKENS[:9], torch.float32)
    found = subject(folder).score(TOKENS[:9], 9)
    assert worst_error(found.logits, truth.logits) < MAX_ERROR
    assert_same_bits(subject(folder).score(TOKENS[:9], 1), found)


def test_heads_draft_for_mixtures() -> None:
    """The embedded model's own heads, for experts that are its MLP, disturbed."""
    folder = str(other_targets.folder("mixture"))
    core = harness.make_core(model=folder, method="eagle3", adaptive_speculation=False)
    batch = jobs("greedy", 6)
    plain = harness.run_alone(harness.make_core(model=folder, **harness.PLAIN), batch)
    assert harness.texts(harness.run(core, batch)) == harness.texts(plain)
    stats = core.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 20
    # All layers but one are mixtures, in which each row goes to two of eight experts.
    num_layers = other_targets.EMBEDDED["num_hidden_layers"] - 1
    assert stats.num_expert_layers == num_layers * stats.num_steps
    assert stats.num_expert_rows == 2 * num_layers * core._runner.stats.num_rows
    assert 2 < stats.num_distinct_experts / stats.num_expert_layers < 8
    # Tokens that follow each other share experts; requests have nothing in common.
    assert 0 < stats.experts_of_drafts < 1.0
    assert 0 < stats.experts_of_sequences < 1.5


def test_timed_rows_are_unrelated(tmp_path: Path) -> None:
    """The rows of a step that is timed have different tokens, and go to different experts."""
    model = write_random_target(tmp_path, PUBLISHED["qwen3-30b-a3b"] | SHAPE | WIDE)
    core = harness.make_core(model=str(model), method="ngram")
    plain = [step for step in core.info.step_times if not step.proposes and step.num_seqs == 1]
    by_rows = {step.num_rows: step.num_experts for step in plain}
    assert by_rows[1] == SHAPE["num_experts_per_tok"]
    assert by_rows[max(by_rows)] > 1.5 * by_rows[1]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_known_text(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's heads offer the next token as often as they were asked to."""
    monkeypatch.setattr(known_text, "HEAD_MLP", 256)
    config = PUBLISHED["qwen3-30b-a3b"] | SHAPE | WIDE
    folder = known_text.write_target(tmp_path / "model", config)
    head = known_text.write_head(tmp_path / "head", config, share)
    batch = jobs("greedy", 12)
    plain = harness.run_alone(harness.make_core(model=str(folder), method="none"), batch)
    core = harness.make_core(
        **{"model": str(folder), "method": "eagle3", "draft_model": str(head), "draft_top_k": 1},
        **{"num_speculative_tokens": 3, "adaptive_speculation": False},
    )
    assert harness.texts(harness.run(core, batch)) == harness.texts(plain)
    order = known_text.order().tolist()
    for result in plain:
        at = order.index(result.token_ids[1])
        assert result.token_ids[1:9] == order[at : at + len(result.token_ids[1:9])]
    stats = core.stats()
    assert abs(stats.num_accepted_tokens_per_pos[0] / stats.num_drafts - share) < 0.15


@pytest.mark.usefixtures("on_the_host")
def test_refusals(tmp_path: Path) -> None:
    folder = str(plain_folder())
    with pytest.raises(ConfigError, match=r"mixture run on one device.*tensor_parallel_size at 1"):
        harness.make_core(model=folder, method="none", tensor_parallel_size=2)
    shutil.copytree(plain_folder(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    for change in ({name: tensors[name][:-1].contiguous()}, {}):
        others = {key: one for key, one in tensors.items() if key != name} | change
        safetensors.torch.save_file(others, file, {"format": "pt"})
        problem = f"{name}: expected shape" if change else f"missing 1 of .*{name}"
        with pytest.raises(ConfigError, match=problem):
            harness.make_core(model=str(file.parent), method="none")
