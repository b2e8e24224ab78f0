"""Checkpoint folders as transformers writes them, into the core."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bench.random_target import PUBLISHED, write_random_target

from openspec.checkpoint.targets.config import ModelConfig
from openspec.errors import ConfigError
from tests.gates import harness
from tests.gates.conftest import Reference
from tests.gates.test_logits import EMBEDDED, FAMILIES, RANDOM_MODELS, Subject, make_random_model
from tests.gates.workload import jobs

transformers = harness.imported("transformers")
TOKEN_IDS = list(range(40, 70))
HALF = FAMILIES["qwen2.5"] | {"torch_dtype": "float16"}


def save(folder: Path, dtype: Any, **options: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype)
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.full
def test_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    folder = save(tmp_path, torch.bfloat16, max_shard_size="3MB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    expected = Subject(EMBEDDED).score(TOKEN_IDS, 16)
    np.testing.assert_array_equal(Subject(folder).score(TOKEN_IDS, 16).logits, expected.logits)


def test_float32_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = save(tmp_path, torch.float32)
    with pytest.raises(ConfigError, match=r"model\.safetensors: model\..*convert"):
        Subject(folder)


def test_float16_weights_become_what_transformers_makes_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = write_random_target(tmp_path / "half", HALF, dtype=torch.float16)
    model = transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "converted")
    expected = Subject(tmp_path / "converted").score(TOKEN_IDS, 16)
    with caplog.at_level(logging.INFO):
        found = Subject(half).score(TOKEN_IDS, 16)
    np.testing.assert_array_equal(found.logits, expected.logits)
    said = [text for text in caplog.messages if "became bfloat16" in text]
    assert len(said) == 1 and "27 tensors of float16 became" in said[0]
    assert said[0].endswith(" relative; 0 overflows, 0 underflows")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_float16_that_overflows_is_refused(tmp_path: Path, number: float) -> None:
    folder = write_random_target(tmp_path, HALF, dtype=torch.float16)
    with_one_odd_number(folder, "model.layers.1.mlp.up_proj.weight", number)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight: 1 overflows: .*take"):
        Subject(folder)


def test_config_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 5}, r"missing 11 of 57 expected tensors: model\.layers\.4\."),
        (
            {"num_hidden_layers": 3},
            r"11 tensors that config\.json has no place for: model\.layers\.3",
        ),
        ({"intermediate_size": 1280}, r"expected shape \[\d+, \d+\] .* found \[\d+, \d+\]"),
        ({"tie_word_embeddings": False}, r"missing 1 of 47 expected tensors: lm_head\.weight"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ConfigError, match=message):
            Subject(folder)


def with_one_odd_number(folder: Path, tensor: str, number: float) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[-1] = number
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("tensor", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_model_of_nan_is_refused(tmp_path: Path, tensor: str, number: float) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    with_one_odd_number(folder, tensor, number)
    with pytest.raises(ConfigError, match=rf"in 1 of its tensors: .*{tensor}.*checkpoint anew"):
        harness.make_core(model=str(folder))


def test_a_head_of_nan_costs_drafts_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reference: Reference
) -> None:
    folder = tmp_path / "head"
    shutil.copytree(EMBEDDED / "eagle3", folder)
    with_one_odd_number(folder, "midlayer.mlp.up_proj.weight", float("nan"))
    core = harness.make_core(method="eagle3", draft_model=str(folder))
    assert core.info.num_non_finite_draft_tensors == 1
    assert "1 tensors of the draft model" in caplog.text and "up_proj" in caplog.text
    batch = jobs("mixed", 4)
    assert harness.texts(harness.run(core, batch)) == harness.texts(reference(batch))


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_config_as_transformers_writes_it(tmp_path: Path, name: str) -> None:
    folder = make_random_model(tmp_path, RANDOM_MODELS[name])
    config = ModelConfig.from_folder(folder)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert config.hidden_size == theirs.hidden_size
    assert config.spec.layers[0].mixer.num_kv_heads == theirs.num_key_value_heads
    assert config.spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.kind == theirs.rope_parameters["rope_type"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_after_transformers(tmp_path: Path, name: str) -> None:
    """The older dialect, as it was published, and the newer one say the same."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    older = ModelConfig.from_folder(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in written and written["rope_parameters"]["rope_theta"]
    assert ModelConfig.from_folder(tmp_path) == older
