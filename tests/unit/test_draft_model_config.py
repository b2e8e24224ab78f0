"""Folders of small language models that draft: what is read, and which pairs are refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.vocabularies import share_vocabulary
from openspec.checkpoint.weights import DraftModel
from openspec.config import EMBEDDED_MODEL, EngineConfig, config_from_settings
from openspec.drafters import get_drafter
from openspec.engine.plan import plan_engine
from openspec.errors import ConfigError
from openspec.tools.convert_drafter import convert
from openspec.tools.quantize import write_quantized
from tests.gates import hybrid_target
from tests.heads import models
from tests.heads.stubs import tokenizer_json

TARGET = ModelConfig.from_folder(EMBEDDED_MODEL)


def read(folder: Path, **settings: Any) -> DraftModel:
    config = EngineConfig(method="draft_model", draft_model=str(folder), **settings)
    spec = get_drafter("draft_model")
    setup = config.draft_setup(TARGET)
    spec.validate(setup)
    assert spec.read_draft_model is not None
    return spec.read_draft_model(setup)


def copy_of(folder: Path, to: Path, **keys: Any) -> Path:
    """The folder with other keys in config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | keys))
    return to


@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_both"),
    [
        (models.CUT, 4096, 4096),
        (models.STRANGER, 4096, 4096),
        (models.SHORT, models.FEWER, models.FEWER),
        (models.LONG, 4096 + models.MORE, 4096),
    ],
)
def test_families(kind: str, num_tokens: int, num_both: int) -> None:
    model = read(models.folder(kind))
    assert model.head.model is not None
    assert model.head.model.vocab_size == num_tokens
    assert model.head.draft_vocab_size == num_both
    assert model.head.layers == model.head.model.layers
    assert model.head.capture_layers == ()


def test_plan_has_bytes_of_both() -> None:
    folder = models.folder(models.CUT)
    plan = plan_engine(EngineConfig(method="draft_model", draft_model=str(folder))).memory
    plain = plan_engine(EngineConfig(method="none")).memory
    layers = ModelConfig.from_folder(folder).num_layers
    share = plain.token_bytes * layers // TARGET.num_layers
    assert plan.as_dict()["draft_token_bytes"] == share
    assert plan.token_bytes == plain.token_bytes + share
    assert "of a token and" in plan.describe() and "of the drafter" in plan.describe()
    assert "of the drafter" not in plain.describe()


def test_names_of_other_engines() -> None:
    folder = str(models.folder(models.CUT))
    given: dict[str, Any] = {"num_speculative_tokens": 3, "model": folder}
    given["draft_tensor_parallel_size"] = 1
    for name in ("draft_model", "STANDALONE"):
        config = config_from_settings({"speculative_config": {"method": name, **given}})
        assert (config.method, config.draft_model) == ("draft_model", folder)
        assert config.num_speculative_tokens == 3


def test_fp8(tmp_path: Path) -> None:
    write_quantized(models.folder(models.CUT), tmp_path / "fp8", "fp8")
    model = read(tmp_path / "fp8")
    assert model.head.model is not None and len(model.head.model.quantized) == 7 * 3
    assert "FP8" in model.description
    assert set(model.tensor_names) >= {scale.name for scale in model.head.model.quantized.values()}


def test_tied_models_may_bring_a_head_all_the_same(tmp_path: Path) -> None:
    copy_of(models.folder(models.LONG), tmp_path / "m", tie_word_embeddings=False)
    names = read(tmp_path / "m").tensor_names
    assert "lm_head.weight" in names
    assert "lm_head.weight" in read(models.folder(models.CUT)).ignored_tensors


def test_larger_than_the_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(models.folder(models.CUT))
        assert not caplog.records
        small = copy_of(models.folder(models.CUT), tmp_path / "target")
        config = EngineConfig(
            model=str(small), method="draft_model", draft_model=str(EMBEDDED_MODEL)
        )
        setup = config.draft_setup(ModelConfig.from_folder(small))
        assert setup.spec.read_draft_model is not None
        setup.spec.read_draft_model(setup)
    assert "a draft costs more than the token that it saves" in caplog.text


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    mixture = copy_of(
        models.folder(models.CUT),
        tmp_path / "m",
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    for folder, kind in (
        (mixture, "qwen3_moe is a mixture of experts"),
        (hybrid_target.folder(), "qwen3_5_text is a hybrid"),
    ):
        with pytest.raises(ConfigError, match=f"{kind}.*does not draft; give a dense model"):
            read(folder)


def vocabularies(root: Path, draft: dict[str, Any], target: dict[str, Any]) -> tuple[Path, Path]:
    for name, content in (("draft", draft), ("target", target)):
        (root / name).mkdir()
        (root / name / "tokenizer.json").write_text(json.dumps(content))
    return root / "draft", root / "target"


def test_ids_of_one_table_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = tokenizer_json(150)
    more["added_tokens"].append({"id": 180, "content": "<|mask|>"})
    less = tokenizer_json(150)
    less["added_tokens"] += [{"id": 190 + i, "content": f"<|{i}|>"} for i in range(3)]
    less["model"]["unk_token"] = "t7"
    with caplog.at_level(logging.INFO):
        both = share_vocabulary(*vocabularies(tmp_path, less, more))
    assert "150 tokens in common, 3 the draft model's alone, 1 the target's alone" in caplog.text
    assert both.unknown_token == 7


def test_first_id_of_two_texts_is_named(tmp_path: Path) -> None:
    other = tokenizer_json(150)
    vocab = other["model"]["vocab"]
    vocab["t9"], vocab["t20"] = 20, 9
    with pytest.raises(ConfigError, match="token id 9 is 't20', but 't9' in the target's"):
        share_vocabulary(*vocabularies(tmp_path, other, tokenizer_json(150)))


def test_no_tokenizer_to_compare(tmp_path: Path) -> None:
    draft, target = vocabularies(tmp_path, {}, tokenizer_json())
    (draft / "tokenizer.json").unlink()
    assert "brings none" in share_vocabulary(draft, target).described


def test_rejection_needs_noise() -> None:
    config = EngineConfig(
        method="draft_model",
        draft_model=str(models.folder(models.CUT)),
        method_options={"draft_noise": False},
        acceptance="rejection",
    )
    with pytest.raises(ConfigError, match="needs drafts that are drawn"):
        config.drafter.validate(config.draft_setup(TARGET))
    dataclasses.replace(config, acceptance="match").draft_setup(TARGET)


# ---- Masks, and states of the target ------------------------------------------------------------


def with_options(folder: Path, num_drafts: int | None = None, **options: Any) -> DraftModel:
    return read(folder, num_speculative_tokens=num_drafts, method_options=options)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_mask_token(tmp_path: Path, key: str) -> None:
    folder = copy_of(models.folder(models.CUT), tmp_path / "m", **{key: 4000})
    assert read(folder).head.mask_token == 4000
    assert with_options(folder, parallel_drafting=False).head.mask_token == -1
    config = EngineConfig(method="draft_model", draft_model=str(folder))
    assert (config.draft_depth, config.max_draft_tokens) == (8, 8)
    chain = dataclasses.replace(config, method_options={"parallel_drafting": False})
    assert chain.draft_depth == 4
    tree = dataclasses.replace(config, method_options={"draft_top_k": 4})
    assert tree.max_draft_tokens == 15


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pard_token": 4096}, "pard_token: expected an integer in"),
        ({"pard_token": 7, "mask_token_id": 8}, "as mask_token_id says"),
    ],
)
def test_bad_mask_tokens(tmp_path: Path, keys: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(copy_of(models.folder(models.CUT), tmp_path / "m", **keys))


def test_chains_have_limits() -> None:
    folder = models.folder(models.CUT)
    with pytest.raises(ConfigError, match="trees are for draft models with a mask token"):
        with_options(folder, draft_top_k=4)
    with pytest.raises(ConfigError, match=r"in \[0, 15\] for a draft model that drafts one"):
        with_options(folder, num_drafts=16)
    assert with_options(models.folder(models.MASKS), num_drafts=16).head.mask_token == models.MASK


def test_states() -> None:
    model = read(models.folder(models.STATES))
    assert (model.head.capture_layers, model.head.captures_normed) == ((1, 2, 3), True)
    assert model.head.has_projection_bias
    # Columns come in the order of config.json: the last layer, the second, the third.
    hidden = TARGET.hidden_size
    weight = torch.arange(3.0).repeat_interleave(hidden).expand(hidden, 3 * hidden)
    edited = model.edits["target_proj.weight"](weight)
    assert (edited[0, ::hidden] / models.SCALE).tolist() == [1.0, 2.0, 0.0]
    chain = with_options(models.folder(models.STATES), parallel_drafting=False)
    assert (chain.head.capture_layers, "target_proj.weight" in chain.ignored_tensors) == ((), True)


def test_states_of_another_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_of(models.folder(models.STATES), tmp_path / "m", pard2_target_dim=4096)
    with caplog.at_level(logging.INFO):
        model = read(folder)
    assert model.head.capture_layers == () and model.head.mask_token == models.MASK
    assert "target_proj.weight" in model.ignored_tensors
    assert "pard2_target_dim is 4096, the target has 3 states of 320" in caplog.text


@pytest.mark.parametrize("layers", [[-1, -3, 0], [-1, -2, 5], [-1, 4, 2], [-5, -1, -2]])
def test_bad_layers_of_states(tmp_path: Path, layers: list[int]) -> None:
    folder = copy_of(models.folder(models.STATES), tmp_path / "m", pard2_target_layers=layers)
    with pytest.raises(ConfigError, match=r"different indices in \[1, 4\], or in \[-4, -1\]"):
        read(folder)


def test_projection_in_a_pickle(tmp_path: Path) -> None:
    """The engine asks for a conversion, which puts all tensors into one file."""
    folder = copy_of(models.folder(models.STATES), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    beside = {name: tensors.pop(name) for name in ("target_proj.weight", "target_proj.bias")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    torch.save(beside, folder / "warp_model.bin")
    with pytest.raises(ConfigError, match=r"published in warp_model\.bin; convert the folder once"):
        read(folder)
    convert(folder, tmp_path / "converted")
    assert read(tmp_path / "converted").head.capture_layers == (1, 2, 3)
    (folder / "warp_model.bin").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    with pytest.raises(ConfigError, match="torch does not load it as weights only"):
        convert(folder, tmp_path / "hostile")
