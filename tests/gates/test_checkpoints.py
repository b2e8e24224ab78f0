"""Checkpoint folders as transformers writes them, into the core."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openspec.checkpoint.config import ModelConfig
from openspec.errors import ConfigError
from tests.gates.test_logits import EMBEDDED, RANDOM_MODELS, Subject, make_random_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TOKEN_IDS = list(range(40, 70))


def save(folder: Path, dtype: Any, **options: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=dtype)
    model.save_pretrained(folder, **options)
    return folder


def test_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    folder = save(tmp_path, torch.bfloat16, max_shard_size="3MB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    expected = Subject(EMBEDDED).score(TOKEN_IDS, 16)
    np.testing.assert_array_equal(Subject(folder).score(TOKEN_IDS, 16).logits, expected.logits)


def test_float32_and_float16_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        folder = save(tmp_path / str(dtype), dtype)
        with pytest.raises(ConfigError, match=r"model\.safetensors: model\..*convert"):
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


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_config_as_transformers_writes_it(tmp_path: Path, name: str) -> None:
    folder = make_random_model(tmp_path, RANDOM_MODELS[name])
    config = ModelConfig.from_folder(folder)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert config.hidden_size == theirs.hidden_size
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.kind == theirs.rope_parameters["rope_type"]
