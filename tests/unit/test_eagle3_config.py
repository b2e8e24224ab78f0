"""EAGLE-3 checkpoints: every format, the numbering of layers, and pairings that cannot work."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.draft_head import LayerIds, captured_layers
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import default_rope
from openspec.checkpoint.weights import DraftModel
from openspec.config import EngineConfig, config_from_settings, parse_engine_args
from openspec.drafters import get_drafter
from openspec.drafters.eagle3.eagle3_format import default_layers
from openspec.drafters.spec import OptionValue
from openspec.errors import ConfigError
from openspec.specs.head import HeadSpec
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec
from tests.heads.stubs import (
    COPY,
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    IDS,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    VOCAB,
    Tensors,
    classic,
    deepspec,
    eagle3_layer,
    specforge,
    speculators,
    tensor,
    token_map,
    tokenizer_json,
    vector,
    write_draft,
    write_json,
    write_target,
)

FORMATS = {"classic": classic, "specforge": specforge, "speculators": speculators}
FORMATS["deepspec"] = deepspec
Format = Callable[[], tuple[dict[str, Any], Tensors]]


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return write_target(tmp_path / "target")


def read(target: ModelConfig, folder: Path, layers: str = "") -> DraftModel:
    spec = get_drafter("eagle3")
    config = EngineConfig(
        model=str(target.folder),
        method="eagle3",
        draft_model=str(folder),
        method_options={"capture_layers": layers} if layers else {},
    )
    spec.validate(config.draft_setup(target))
    assert spec.read_draft_model is not None
    return spec.read_draft_model(config.draft_setup(target))


def read_format(target: ModelConfig, make: Format, **changes: Any) -> DraftModel:
    config, tensors = make()
    return read(target, write_draft(target.folder.parent / "draft", config | changes, tensors))


# ---- Formats ------------------------------------------------------------------------------------


def test_classic(target: ModelConfig) -> None:
    model = read_format(target, classic)
    attention = AttentionSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        has_qk_norm=False,
        inv_freq=default_rope(1e6, HEAD_DIM).inv_freq,
    )
    assert model.head == HeadSpec(
        layers=(LayerSpec(mixer=attention, mlp=DenseMlpSpec(intermediate_size=INTERMEDIATE)),),
        rms_norm_eps=1e-6,
        capture_layers=(1, 17, 32),
        draft_vocab_size=DRAFT_VOCAB,
        has_embedding=False,
        has_token_map=True,
    )
    expected = set(eagle3_layer("midlayer.")) | {"d2t"}
    assert model.tensor_names == {name: name for name in expected}
    assert set(model.ignored_tensors) == {"t2d"}
    assert "classic" in model.description and "layers 1, 17, 32 of 36" in model.description
    details = "\n".join(model.details)
    assert "outputs of 1, 17, 32 = entering 2, 18, 33 (from the default for 36 layers)" in details
    assert "brings none" in details and "made for 2048, the target for 4096" in details


def test_specforge(target: ModelConfig) -> None:
    """Ids in `eagle_config` count outputs, as SGLang takes them."""
    model = read_format(target, specforge)
    assert model.head.capture_layers == (2, 16, 30)


def test_speculators(target: ModelConfig) -> None:
    model = read_format(target, speculators)
    assert model.head.capture_layers == (1, 17, 32)
    assert model.head.norm_before_residual is True
    assert model.tensor_names["layers.0.hidden_norm.weight"] == "midlayer.hidden_norm.weight"
    # The embedding is a copy of the target's, byte for byte.
    assert model.head.has_embedding is False
    ignored = {"t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert set(model.ignored_tensors) == ignored
    assert "trained for: Qwen/Qwen3-8B" in model.details
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 20, LAYERS]}
    assert read_format(target, speculators, **ids).head.capture_layers == (0, 19, 35)


def test_own_embedding(target: ModelConfig, tmp_path: Path) -> None:
    config, tensors = speculators()
    tensors["embed_tokens.weight"] = tensor("BF16", [VOCAB, HIDDEN], 8)
    model = read(target, write_draft(tmp_path / "draft", config, tensors))
    assert model.head.has_embedding is True
    assert model.tensor_names["embed_tokens.weight"] == "embed_tokens.weight"
    assert "embed_tokens.weight" not in model.ignored_tensors


def test_deepspec(target: ModelConfig) -> None:
    model = read_format(target, deepspec)
    assert model.head.capture_layers == (1, 9, 17, 25, 33)
    assert model.head.layers[0].mixer.has_qk_norm is True and model.head.has_token_map is False
    assert model.head.draft_vocab_size == VOCAB
    assert model.head.layers[0].mixer.inv_freq == default_rope(1e6, HEAD_DIM).inv_freq
    assert model.tensor_names["layers.0.self_attn.q_norm.weight"] == (
        "midlayer.self_attn.q_norm.weight"
    )
    assert "d2t" not in model.tensor_names
    assert "embed_tokens.weight" in model.ignored_tensors


def test_classic_keys_with_the_other_prefix(target: ModelConfig, tmp_path: Path) -> None:
    config, _ = classic()
    tensors = eagle3_layer("layers.0.") | token_map()
    model = read(target, write_draft(tmp_path / "draft", config, tensors))
    assert model.tensor_names["layers.0.mlp.up_proj.weight"] == "midlayer.mlp.up_proj.weight"


def test_head_dim_of_old_files_comes_from_the_tensor(target: ModelConfig, tmp_path: Path) -> None:
    """hidden_size / heads is 16 here, and 80 for Qwen3-4B."""
    config, tensors = classic()
    del config["head_dim"]
    model = read(target, write_draft(tmp_path / "draft", config, tensors))
    assert model.head.layers[0].mixer.head_dim == HEAD_DIM


def test_options_of_the_engine_and_of_the_head_are_apart() -> None:
    spec = get_drafter("eagle3")
    names = ["capture_layers", "draft_noise", "draft_window", "draft_top_k", "draft_tree_size"]
    assert [option.name for option in spec.options] == [*names, "draft_feedback"]
    assert spec.needs_draft_model


# ---- Numbering ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(36, (1, 17, 32)), (40, (1, 19, 36)), (64, (1, 31, 60))]
)
def test_default_layers(num_layers: int, expected: tuple[int, ...]) -> None:
    assert captured_layers(default_layers(num_layers), num_layers) == expected


def test_two_ways_to_count_the_same_layers() -> None:
    entering = LayerIds((2, 18, 33), "entering", "")
    output = LayerIds((1, 17, 32), "output", "")
    assert captured_layers(entering, 36) == captured_layers(output, 36) == (1, 17, 32)
    assert captured_layers(LayerIds((36,), "entering", ""), 36) == (35,)


@pytest.mark.parametrize(
    ("ids", "numbering", "message"),
    [
        ((0, 2), "entering", r"rising ids in \[1, 36\].*found \[0, 2\]"),
        ((2, 37), "entering", r"rising ids in \[1, 36\].*found \[2, 37\]"),
        ((-1, 2), "output", r"rising ids in \[0, 35\].*found \[-1, 2\]"),
        ((2, 36), "output", r"rising ids in \[0, 35\].*36 layers.*found \[2, 36\]"),
        ((2, 2), "output", r"rising ids.*found \[2, 2\]"),
        ((9, 2), "output", r"rising ids.*found \[9, 2\]"),
    ],
)
def test_impossible_layers(ids: tuple[int, ...], numbering: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        captured_layers(LayerIds(ids, numbering, "config.json: key"), 36)


def test_no_default_for_few_layers() -> None:
    with pytest.raises(ConfigError, match=r"default for 4 layers.*found \[2, 2, 1\]"):
        captured_layers(default_layers(4), 4)


def test_layers_of_the_user(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *specforge())
    assert read(target, folder, "0, 3,5").head.capture_layers == (0, 3, 5)
    for text, message in (("1;2", "must be a list such as"), ("1,2,99", "capture_layers: expec")):
        with pytest.raises(ConfigError, match=message):
            read(target, folder, text)
    with pytest.raises(ConfigError, match=r"2 captured layers.*that is 3; name all 3"):
        read(target, folder, "1,2")


def test_ids_in_both_places(target: ModelConfig) -> None:
    same = {"eagle_aux_hidden_state_layer_ids": [3, 17, 31]}
    assert read_format(target, specforge, **same).head.capture_layers == (2, 16, 30)
    other = {"eagle_aux_hidden_state_layer_ids": [2, 16, 30]}
    with pytest.raises(ConfigError, match=r"\[2, 16, 30\] \(output\).*different layers"):
        read_format(target, specforge, **other)


def test_ids_one_off_the_usual_ones(target: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    """A converter that moved ids from one place to the other without counting anew."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}
    assert read_format(target, speculators, **ids).head.capture_layers == (0, 16, 31)
    assert "all one less than usual (1, 17, 32)" in caplog.text
    assert "capture_layers=1,17,32" in caplog.text


def test_no_ids_are_the_default_ones(target: ModelConfig) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": []}
    default = read_format(target, speculators).head.capture_layers
    assert read_format(target, speculators, **ids).head.capture_layers == default


def test_a_message_stays_short_and_keeps_its_remedy(target: ModelConfig) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": list(range(100_000))}
    with pytest.raises(ConfigError, match=r"expected rising.*set capture_layers") as error:
        read_format(target, speculators, **ids)
    assert len(str(error.value)) <= 2000


# ---- What cannot work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (classic, {"hidden_size": 128}, r"hidden_size: expected 64, as the target.*found 128; the"),
        (classic, {"vocab_size": 170}, r"vocab_size: expected 160.*found 170.*another target"),
        (specforge, {"target_hidden_size": 32}, "target_hidden_size: expected 64.*found 32"),
        (deepspec, {"num_target_layers": 28}, "num_target_layers: expected 36.*found 28"),
        (deepspec, {"target_layer_ids": [1, 9, 17, 25, 36]}, r"target_layer_ids: expected rising"),
        (deepspec, {"target_layer_ids": [1, 9, 17]}, r"3 captured layers.*that is 5"),
        (classic, {"num_hidden_layers": 65}, r"num_hidden_layers: expected an integer in \[1, 64"),
        (classic, {"attention_bias": True}, "attention_bias: expected false"),
        (classic, {"hidden_act": "gelu"}, "hidden_act"),
        (classic, {"quantization_config": {}}, "quantization_config: .*unquantised"),
        (
            classic,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4}},
            "rope_scaling: rope_type: expected one of default, linear, yarn, llama3",
        ),
        (classic, {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        (classic, {"draft_vocab_size": 41}, "d2t: expected 41 entries, found 40"),
        (classic, {"draft_vocab_size": 161}, r"draft_vocab_size: expected an integer in \[1, 160"),
        (specforge, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (
            speculators,
            {"norm_before_fc": True, "fc_norm": True},
            "norm_before_fc: expected false beside fc_norm, found true; they exclude",
        ),
        (
            specforge,
            {"eagle_config": {"norm_before_fc": True, "use_aux_norm": True}},
            "eagle_config: norm_before_fc: expected false beside use_aux_norm",
        ),
        (classic, {"norm_output": 1}, "norm_output: expected true or false"),
        (classic, {"parallel_drafting": True}, "one with mask_hidden; use --method peagle"),
        (speculators, {"speculators_model_type": "peagle"}, "with mask_hidden; use --method pea"),
        (speculators, {"speculators_model_type": "dflash"}, 'type: expected "eagle3", found "df'),
        (speculators, {"transformer_layer_config": None}, "transformer_layer_config: expected an"),
    ],
)
def test_refused_configuration(
    target: ModelConfig, make: Format, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_format(target, make, **changes)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def setting(name: str, value: tuple[str, list[int], bytes]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: value})


OFFSETS = [token - i for i, token in enumerate(IDS)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("fc.weight"), r"missing tensor fc\.weight"),
        (without("midlayer.self_attn.q_proj.weight"), "missing tensor midlayer"),
        (without("d2t"), "missing tensor d2t: the head knows 40 of the target's 160"),
        (
            setting("fc.weight", tensor("BF16", [HIDDEN, 2 * HIDDEN])),
            r"expected shape \[64, 192\] for 3 captured layers \(1, 17, 32, from the default for "
            r"36 layers\), found \[64, 128\], that is 2",
        ),
        (
            setting("fc.weight", tensor("BF16", [32, 96])),
            r"expected shape \[64, n \* 64\].*found \[32, 96\]; the head was trained for another",
        ),
        (setting("d2t", tensor("F32", [40])), r"d2t: expected a vector of I64 or I32, found F32"),
        (setting("d2t", vector("I64", [-1, *OFFSETS[1:]])), r"found 0 \+ -1; the head was trained"),
        # Ids where offsets belong: out of range, or not what t2d marks.
        (setting("d2t", vector("I64", [160 - 40 + i for i in range(40)])), "subtract 0, 1, 2"),
        (setting("d2t", vector("I64", IDS)), r"t2d to mark .* found it unmarked .*subtract 0, 1"),
        (setting("d2t", vector("I64", [9, *OFFSETS[1:]])), r"unmarked \(1 of 40.*different heads"),
        (setting("t2d", tensor("BOOL", [150])), r"t2d: expected BOOL \[160\].*found BOOL \[150\]"),
    ],
)
def test_refused_tensors(
    target: ModelConfig, tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    config, tensors = classic()
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        read(target, write_draft(tmp_path / "draft", config, tensors))


def test_token_map_of_short_integers_without_a_mask(target: ModelConfig, tmp_path: Path) -> None:
    config, tensors = classic()
    del tensors["t2d"]
    tensors["d2t"] = vector("I32", OFFSETS)
    assert read(target, write_draft(tmp_path / "d", config, tensors)).head.has_token_map


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_token_map_of_zeros_means_the_first_ids(
    target: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_mask: bool
) -> None:
    config, tensors = classic()
    tensors["d2t"] = vector("I64", [0] * DRAFT_VOCAB)
    if not has_mask:
        del tensors["t2d"]
    assert read(target, write_draft(tmp_path / "d", config, tensors)).head.has_token_map
    num_marked = sum(token < DRAFT_VOCAB for token in IDS)
    said = f"ids 0 to {DRAFT_VOCAB - 1}, of which t2d does not mark {DRAFT_VOCAB - num_marked}"
    assert (said in caplog.text) == has_mask


def test_offsets_that_repeat_are_no_ids(target: ModelConfig, tmp_path: Path) -> None:
    """Though each of them is an id that t2d marks."""
    config, tensors = classic()
    tensors["d2t"] = vector("I64", [IDS[0]] * DRAFT_VOCAB)
    with pytest.raises(ConfigError, match="d2t and t2d are of different heads"):
        read(target, write_draft(tmp_path / "d", config, tensors))


def test_a_head_without_lm_head(target: ModelConfig, tmp_path: Path) -> None:
    """The target's serves one that knows all tokens."""
    config, tensors = deepspec()
    del tensors["lm_head.weight"]
    model = read(target, write_draft(tmp_path / "whole", config, tensors))
    assert model.head.has_head is False and "lm_head.weight" not in model.tensor_names
    assert any("head: the target's, 160 of 160" in line for line in model.details)
    for make in (classic, speculators):
        config, tensors = make()
        del tensors["lm_head.weight"]
        folder = write_draft(tmp_path / make.__name__, config, tensors)
        with pytest.raises(ConfigError, match=r"missing tensor lm_head\..*: the head knows 40"):
            read(target, folder)


@pytest.mark.parametrize(("is_tied", "has_head"), [(True, False), (False, True)])
def test_a_copy_of_the_targets_head_is_not_loaded(
    tmp_path: Path, is_tied: bool, has_head: bool
) -> None:
    """A copy of the embedding is one only where the target's head is its embedding."""
    target = write_target(tmp_path / "target", tie_word_embeddings=is_tied)
    config, tensors = deepspec()
    tensors["lm_head.weight"] = tensor("BF16", [VOCAB, HIDDEN], COPY)
    model = read(target, write_draft(tmp_path / "draft", config, tensors))
    assert model.head.has_head is has_head


def test_folders_that_are_no_head(target: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected an EAGLE-3 head.*architectures .*Qwen3For"):
        read(target, target.folder)
    config, tensors = speculators()
    for name in list(tensors):
        if name.startswith("layers.0."):
            del tensors[name]
    with pytest.raises(ConfigError, match=r"expected tensors midlayer\.\* or layers\.0\.\*"):
        read(target, write_draft(tmp_path / "draft", config, tensors))
    with pytest.raises(ConfigError, match=r"draft model folder .*nowhere does not exist"):
        read(target, tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json; give the folder of a complete draft"):
        read(target, empty)
    write_json(empty / "config.json", classic()[0])
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        read(target, empty)
    (empty / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"python -m openspec\.convert_drafter .*empty NEW_FOL"):
        read(target, empty)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (tokenizer_json(149), "expected 150 tokens, as the target's, found 149; the draft model"),
        (tokenizer_json(t3=4, t4=3), "token 't3': expected id 3, as the target's, found 4"),
        (tokenizer_json(151), "expected 150 tokens, as the target's, found 151; the draft model"),
        ({"model": {}}, "model: expected an object with vocab"),
    ],
)
def test_another_tokenizer(
    target: ModelConfig, tmp_path: Path, tokenizer: dict[str, Any], message: str
) -> None:
    folder = write_draft(tmp_path / "draft", *classic())
    write_json(folder / "tokenizer.json", tokenizer_json())
    assert "tokenizer: the target's and the draft model's are the same, 150 tokens" in (
        read(target, folder).details
    )
    with_mask = tokenizer_json()
    with_mask["added_tokens"] += [{"id": 150, "content": "<|MASK|>", "special": True}]
    write_json(folder / "tokenizer.json", with_mask)
    assert "tokenizer: the target's 150 tokens and after them <|MASK|>" in (
        read(target, folder).details
    )
    write_json(folder / "tokenizer.json", tokenizer)
    with pytest.raises(ConfigError, match=message):
        read(target, folder)


# ---- Settings -----------------------------------------------------------------------------------


def test_flags(target: ModelConfig, tmp_path: Path) -> None:
    folder = str(write_draft(tmp_path / "draft", *classic()))
    model = str(target.folder)
    config, _ = parse_engine_args(
        "openspec",
        "",
        ["--model", model, "--method", "eagle3", "--draft-model", folder],
        environ={"OPENSPEC_METHOD_OPTIONS": "capture_layers=1,2,3"},
    )
    assert (config.draft_depth, config.draft_model_path) == (3, Path(folder))
    assert config.method_options["capture_layers"] == "1,2,3"
    assert config.max_draft_tokens == 3  # a chain
    config = config_from_settings(
        {
            "model": model,
            "speculative_config": {
                "method": "eagle3",
                "model": folder,
                "num_speculative_tokens": 5,
            },
        }
    )
    assert (config.draft_depth, config.draft_model) == (5, folder)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be in \[0, 15\]"):
        get_drafter("eagle3").validate(
            EngineConfig(
                method="eagle3", draft_model=folder, num_speculative_tokens=16
            ).draft_setup(target)
        )


def test_head_beside_the_model(target: ModelConfig) -> None:
    spec = get_drafter("eagle3")
    config = EngineConfig(model=str(target.folder), method="eagle3")
    with pytest.raises(ConfigError, match=r"needs --draft-model DIR, or a folder .*/eagle3 beside"):
        spec.validate(config.draft_setup(target))
    write_draft(target.folder / "eagle3", *classic())
    spec.validate(config.draft_setup(target))
    assert spec.read_draft_model is not None
    assert spec.read_draft_model(config.draft_setup(target)).folder == target.folder / "eagle3"


def test_checkup_names_the_neighbours(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *deepspec())
    spec = get_drafter("eagle3")
    assert spec.plan_checkup is not None
    config = EngineConfig(method="eagle3", draft_model=str(folder))
    checkup = spec.plan_checkup(config.draft_setup(target))
    assert [variant.options for variant in checkup.variants] == [
        {"capture_layers": "0,8,16,24,32"},
        {"capture_layers": "2,10,18,26,34"},
        {"draft_feedback": "normed"},
    ]
    assert all("other numbering" in variant.advice for variant in checkup.variants[:2])
    assert 0 < checkup.least_first < checkup.usual[0] < 1
    text = " ".join(checkup.causes)
    assert "normed states" in text and "offsets" in text
    edge = EngineConfig(
        method="eagle3",
        draft_model=str(write_draft(tmp_path / "edge", *classic())),
        method_options={"capture_layers": "0,1,35"},
    )
    variants = spec.plan_checkup(edge.draft_setup(target)).variants
    assert [variant.options for variant in variants] == [{"draft_feedback": "normed"}]


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
def test_description_is_one_line(
    target: ModelConfig, make: Format, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = read_format(target, make)
    assert model.description.isprintable() and "EAGLE-3" in model.description
    assert all(line.isprintable() for line in model.details)
    assert not caplog.records


# ---- Trees --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "options", "num_rows"),
    [
        (5, {}, 5),
        (0, {"draft_top_k": 4}, 0),
        (1, {"draft_top_k": 2}, 2),  # no more are made
        (1, {"draft_top_k": 4}, 3),
        (2, {"draft_top_k": 4}, 7),
        (3, {"draft_top_k": 4}, 11),
        (8, {"draft_top_k": 4}, 15),
        (4, {"draft_top_k": 4, "draft_tree_size": 30}, 30),
        (2, {"draft_top_k": 2, "draft_tree_size": 30}, 6),
    ],
)
def test_drafts_of_a_tree(depth: int, options: dict[str, OptionValue], num_rows: int) -> None:
    config = EngineConfig(method="eagle3", num_speculative_tokens=depth, method_options=options)
    assert (config.draft_depth, config.max_draft_tokens) == (depth, num_rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tree_size": 15}, "draft_tree_size is for trees: set draft_top_k"),
        ({"draft_top_k": 4, "draft_tree_size": 2}, "2 is less than the tree's depth"),
        ({"draft_top_k": 11}, "draft_top_k must be at most 10"),
        ({"draft_top_k": 0}, "draft_top_k must be at least 1"),
    ],
)
def test_trees_that_cannot_be(
    target: ModelConfig, tmp_path: Path, options: dict[str, OptionValue], message: str
) -> None:
    folder = str(write_draft(tmp_path / "draft", *classic()))
    config = EngineConfig(method="eagle3", draft_model=folder, method_options=options)
    with pytest.raises(ConfigError, match=message):
        get_drafter("eagle3").validate(config.draft_setup(target))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_top_k": 4}, "rejection is for chains: drop it, or draft_top_k=4"),
        ({"draft_noise": False}, "needs drafts that are drawn: drop it, or draft_noise=false"),
    ],
)
def test_rejection_that_cannot_be(
    target: ModelConfig, tmp_path: Path, options: dict[str, OptionValue], message: str
) -> None:
    folder = str(write_draft(tmp_path / "draft", *classic()))
    config = EngineConfig(
        method="eagle3", draft_model=folder, acceptance="rejection", method_options=options
    )
    with pytest.raises(ConfigError, match=message):
        get_drafter("eagle3").validate(config.draft_setup(target))
    plain = dataclasses.replace(config, method_options={})
    get_drafter("eagle3").validate(plain.draft_setup(target))
