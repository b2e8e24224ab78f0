"""Checkpoints of block drafters: every format, what they normalise to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.rope import default_rope
from openspec.checkpoint.weights import DraftModel
from openspec.config import EngineConfig, config_from_settings
from openspec.drafters import get_drafter
from openspec.drafters.spec import Checkup, OptionValue
from openspec.errors import ConfigError
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec
from tests.heads.formats import markov_tensors
from tests.heads.stubs import (
    BLOCK,
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    OUTPUTS,
    Q_HEADS,
    RANK,
    SIZES,
    VOCAB,
    Checkpoint,
    block_deepspec,
    block_speculators,
    dspark,
    filled,
    jetspec,
    tensor,
    write_draft,
    write_target,
    zlab,
)

NUM_LAYERS, MASK = BLOCK.num_layers, BLOCK.mask


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return write_target(tmp_path / "target")


LAYER = LayerSpec(
    mixer=AttentionSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        has_qk_norm=True,
        inv_freq=default_rope(1e6, HEAD_DIM).inv_freq,
    ),
    mlp=DenseMlpSpec(intermediate_size=INTERMEDIATE),
)
WINDOW = {"use_sliding_window": True, "sliding_window": 2048}
SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}


def sliding(**changes: Any) -> Checkpoint:
    """A z-lab head whose first layer slides; with changes at top level."""
    config, tensors = zlab()
    return config | WINDOW | SLIDES | changes, tensors


FORMATS: dict[str, tuple[Callable[[], Checkpoint], str]] = {
    "zlab": (zlab, "dflash"),
    "jetspec": (jetspec, "dflash"),
    "deepspec": (block_deepspec, "dflash"),
    "dspark": (dspark, "dspark"),
    "speculators": (block_speculators, "dflash"),
}


def windows(model: DraftModel) -> list[int]:
    return [layer.mixer.window for layer in model.head.layers]


def config_of(
    target: ModelConfig, folder: Path, method: str, **options: OptionValue
) -> EngineConfig:
    num_drafts = options.pop("num_speculative_tokens", None)
    return EngineConfig(
        model=str(target.folder),
        method=method,
        draft_model=str(folder),
        num_speculative_tokens=None if num_drafts is None else int(num_drafts),
        method_options=options,
    )


def read(
    target: ModelConfig, made: Checkpoint, method: str = "dflash", **options: OptionValue
) -> DraftModel:
    folder = write_draft(target.folder.parent / "draft", *made)
    spec = get_drafter(method)
    config = config_of(target, folder, method, **options)
    spec.validate(config.draft_setup(target))
    assert spec.read_draft_model is not None
    return spec.read_draft_model(config.draft_setup(target))


# ---- Formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zlab", {"block_size": 16, "anchor_drafts": False, "is_causal": False}),
        ("jetspec", {"block_size": 16, "anchor_drafts": False, "is_causal": True}),
        ("deepspec", {"block_size": 7, "anchor_drafts": True, "has_head": False}),
        (
            "dspark",
            {
                "block_size": 7,
                "anchor_drafts": True,
                "markov_rank": RANK,
                "has_confidence": True,
                "confidence_sees_token": True,
            },
        ),
        (
            "speculators",
            {
                "block_size": 8,
                "anchor_drafts": False,
                "has_head": True,
                "has_embedding": True,
                "has_token_map": True,
                "draft_vocab_size": DRAFT_VOCAB,
            },
        ),
    ],
)
def test_formats(target: ModelConfig, name: str, expected: dict[str, OptionValue]) -> None:
    """All come down to the same layers, mask and geometry."""
    make, method = FORMATS[name]
    model = read(target, make(), method)
    common = {
        "capture_layers": (1, 9, 17, 25, 33),
        "mask_token": MASK,
        "layers": (LAYER,) * NUM_LAYERS,
    }
    assert {name: getattr(model.head, name) for name in common | expected} == common | expected
    assert all(inner == outer for outer, inner in model.tensor_names.items())
    shown = "\n".join((model.description, *model.details))
    assert "outputs of 1, 9, 17, 25, 33 = entering 2, 10, 18, 26, 34" in shown
    assert ("anchor-first" if expected["anchor_drafts"] else "anchor-drop") in shown


@pytest.mark.parametrize("name", ["causal_head", "is_causal", "causal"])
def test_names_of_causal_blocks(target: ModelConfig, name: str) -> None:
    config, tensors = zlab()
    config["dflash_config"] |= {name: True}
    assert read(target, (config, tensors)).head.is_causal is True
    config["dflash_config"] |= {name: False}
    assert read(target, (config, tensors)).head.is_causal is False


def test_copies_of_the_targets_tensors_are_not_loaded(target: ModelConfig) -> None:
    """The target ties its head, so a copy of the embedding is a copy of the head."""
    model = read(target, block_deepspec())
    assert {"embed_tokens.weight", "lm_head.weight"} <= set(model.ignored_tensors)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(model.tensor_names)
    config, tensors = block_deepspec()
    tensors["lm_head.weight"] = tensor("BF16", [VOCAB, HIDDEN], 9)
    assert read(target, (config, tensors)).head.has_head is True


def test_a_last_state_that_only_training_reads(target: ModelConfig) -> None:
    config, tensors = block_speculators()
    config["aux_hidden_state_layer_ids"] = [*config["aux_hidden_state_layer_ids"], LAYERS]
    assert read(target, (config, tensors)).head.capture_layers == (1, 9, 17, 25, 33)
    tensors |= {"fc.weight": tensor("BF16", [HIDDEN, 6 * HIDDEN])}
    assert read(target, (config, tensors)).head.capture_layers == (1, 9, 17, 25, 33, 35)


def test_default_layers(target: ModelConfig) -> None:
    config, tensors = zlab()
    del config["dflash_config"]["target_layer_ids"]
    tensors |= {"fc.weight": tensor("BF16", [HIDDEN, 2 * HIDDEN])}
    assert read(target, (config, tensors)).head.capture_layers == (1, 33)


def test_default_block_size(target: ModelConfig) -> None:
    """The speculators format has one; z-lab's and DeepSpec's have not (see the refused blocks)."""
    config, tensors = block_speculators()
    del config["block_size"]
    assert read(target, (config, tensors)).head.block_size == 8
    assert config_of(target, target.folder.parent / "draft", "dflash").draft_depth == 7


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"use_sliding_window": False, "sliding_window": 4096}, {"sliding_window": None}),
        ({"use_sliding_window": True, "sliding_window": None}, {}),
        ({"sliding_window": 4096}, {}),  # of transformers' Qwen3Config, which does not use it
        ({"target_layer_ids": OUTPUTS}, {}),
        ({}, {"block_size": None}),  # a null counts as absent
    ],
)
def test_harmless_keys(target: ModelConfig, outer: dict[str, Any], inner: dict[str, Any]) -> None:
    config, tensors = zlab()
    config["dflash_config"] |= inner
    assert read(target, (config | outer, tensors)).head == read(target, zlab()).head


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [2048, 0]),
        ({"layer_types": ["sliding_attention"] * 2}, [2048, 2048]),
        ({"use_sliding_window": False}, [0, 0]),  # transformers' Qwen3Config drops it
        ({"use_sliding_window": None}, [0, 0]),
        ({"use_sliding_window": None, "model_type": "llama"}, [2048, 0]),
        ({"sliding_window": None}, [0, 0]),
        ({"layer_types": None}, [0, 0]),  # layers from max_window_layers on, which is 28
        ({"layer_types": None, "max_window_layers": 1}, [0, 2048]),
        ({"layer_types": ["full_attention"] * 2}, [0, 0]),
    ],
)
def test_which_layers_slide(
    target: ModelConfig, changes: dict[str, Any], expected: list[int]
) -> None:
    assert windows(read(target, sliding(**changes))) == expected
    config, tensors = block_speculators()
    config["transformer_layer_config"] |= WINDOW | SLIDES | changes
    assert windows(read(target, (config, tensors))) == expected


def test_windows_that_stand_elsewhere(target: ModelConfig) -> None:
    config, tensors = sliding()
    del config["sliding_window"]  # what equals the class's default is not written
    assert windows(read(target, (config, tensors))) == [4096, 0]
    for inner, window in (
        ({"use_swa": True, "swa_window_size": 64}, 64),
        ({"use_swa": False, "swa_window_size": 64}, 0),
    ):
        config, tensors = zlab()
        config["dflash_config"] |= inner
        config["layer_types"] = None
        assert windows(read(target, (config, tensors))) == [window, window]
    config, tensors = zlab()
    config["dflash_config"]["sliding_window"] = 64
    assert windows(read(target, (config | SLIDES, tensors))) == [64, 0]


@pytest.mark.parametrize(
    ("outer", "inner", "attention", "full", "sliding_is_causal", "reason"),
    [
        ({}, {}, "auto", False, True, "by layer type, no key says so"),
        ({"is_causal": True}, {}, "auto", True, True, "by is_causal"),
        ({"is_causal": False}, {}, "auto", False, False, "by is_causal"),
        ({}, {"causal": False}, "auto", False, False, "by causal"),
        ({"sliding_window_non_causal": True}, {}, "auto", False, False, "by sliding_window_non"),
        ({"sliding_window_non_causal": False}, {}, "auto", False, True, "by sliding_window_non"),
        ({"sliding_window_non_causal": True}, {"causal": True}, "auto", True, True, "by causal"),
        ({"is_causal": True}, {}, "full", False, False, "by draft_attention"),
    ],
)
def test_causality_of_layers(
    target: ModelConfig,
    outer: dict[str, Any],
    inner: dict[str, Any],
    attention: str,
    full: bool,
    sliding_is_causal: bool,
    reason: str,
) -> None:
    config, tensors = sliding(**outer)
    config["dflash_config"] |= inner
    model = read(target, (config, tensors), draft_attention=attention)
    assert model.head.is_causal is full
    assert model.head.sliding_is_causal is sliding_is_causal
    sight = next(line for line in model.details if line.startswith("sight: "))
    assert "layer 0 sees the last 2048 tokens" in sight and f"({reason}" in sight


def test_what_the_user_says_counts(target: ModelConfig) -> None:
    model = read(
        target,
        zlab(),
        capture_layers="0,8,16,24,32",
        draft_anchor="first",
        draft_attention="causal",
    )
    assert model.head.capture_layers == (0, 8, 16, 24, 32)
    assert model.head.anchor_drafts is True and model.head.is_causal is True


def test_drafts_by_default_are_those_of_a_block(target: ModelConfig, tmp_path: Path) -> None:
    for name, expected in (("zlab", 15), ("deepspec", 7), ("dspark", 7), ("speculators", 7)):
        make, method = FORMATS[name]
        folder = write_draft(tmp_path / name, *make())
        assert config_of(target, folder, method).draft_depth == expected
    folder = write_draft(tmp_path / "first", *zlab())
    assert config_of(target, folder, "dflash", draft_anchor="first").draft_depth == 16
    read(target, zlab(), num_speculative_tokens=15)
    with pytest.raises(ConfigError, match=r"at most 15, the drafts of a block .*got 16"):
        read(target, zlab(), num_speculative_tokens=16)


def test_trees(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *zlab())
    for options, rows in (
        ({"draft_top_k": 8}, 15),
        ({"draft_top_k": 8, "draft_tree_size": 63}, 63),
        ({"draft_top_k": 2, "num_speculative_tokens": 3}, 14),
        ({}, 15),
    ):
        assert config_of(target, folder, "dflash", **options).max_draft_tokens == rows
    folder = write_draft(tmp_path / "markov", *dspark())
    for options, rows in (({}, 7), ({"draft_top_k": 64, "draft_tree_size": 31}, 31)):
        assert config_of(target, folder, "dspark", **options).max_draft_tokens == rows
    with pytest.raises(ConfigError, match=r"draft_tree_size=7 is less than the tree's depth"):
        read(target, zlab(), draft_top_k=4, draft_tree_size=7)
    with pytest.raises(ConfigError, match=r"set draft_top_k above 1"):
        read(target, zlab(), draft_tree_size=31)


def test_head_beside_the_model(target: ModelConfig) -> None:
    for name in ("zlab", "dspark"):
        make, method = FORMATS[name]
        write_draft(target.folder / method, *make())
        config = config_from_settings({"model": str(target.folder), "method": method})
        assert config.draft_model_path == target.folder / method
        assert config.draft_depth == (15 if name == "zlab" else 7)


# ---- What cannot work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("zlab", {"projector_type": "domino"}, "projector_type.*Domino heads are not supported"),
        ("zlab", {"draft_shift": True}, "draft_shift.*not supported"),
        ("zlab", {"block_size": None}, "block_size: expected an integer"),
        ("zlab", {"block_size": 65}, "dflash_config: block_size.*found 65"),
        ("zlab", {"sliding_window": 2048}, "dflash_config: sliding_window.*layer_types at top"),
        ("zlab", {"use_swa": True}, "dflash_config: swa_window_size: expected an integer"),
        ("zlab", {"mask_token_id": VOCAB}, "mask_token_id"),
        ("zlab", {"target_layer_ids": [1, 9, 17, 25, 36]}, "expected rising ids"),
        ("zlab", {"target_layer_ids": [1, 9, 17]}, r"3 captured layers.*that is 5"),
        *(
            ("dspark", {"markov_head_type": kind}, f'markov_head_type.*"vanilla".*found "{kind}"')
            for kind in ("gated", "rnn", "lstm")
        ),
    ],
)
def test_refused_blocks(
    target: ModelConfig, name: str, changes: dict[str, Any], message: str
) -> None:
    make, method = FORMATS[name]
    config, tensors = make()
    (config["dflash_config"] if name == "zlab" else config).update(changes)
    if changes.get("block_size", 1) is None:
        del config["block_size"], config["dflash_config"]["block_size"]
    with pytest.raises(ConfigError, match=message):
        read(target, (config, tensors), method)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("zlab", {"layer_types": ["sliding_attention"] * 3}, "layer_types: expected 2 times"),
        ("zlab", {"layer_types": ["chunked_attention"] * 2}, "layer_types.*other kinds"),
        ("zlab", {"hidden_size": 128}, "hidden_size: expected 64, as the target"),
        ("zlab", {"num_target_layers": 28}, "num_target_layers: expected 36"),
        ("zlab", {"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "rope_scaling"),
        ("zlab", WINDOW | SLIDES | {"sliding_window": 0}, "sliding_window: expected an integer"),
        ("zlab", {"block_size": 65}, "config.json: block_size.*found 65"),
        ("zlab", {"markov_rank": 8}, "config.json: markov_rank.*--method dspark"),
        (
            "zlab",
            {"target_layer_ids": [0, 8, 16, 24, 32]},
            r"dflash_config: target_layer_ids says \[1, .*: target_layer_ids says \[0, .*different",
        ),
        ("speculators", {"speculators_model_type": "xpress"}, "XPress's heads are not supported"),
        ("speculators", {"speculators_model_type": "eagle3"}, "other methods' heads are not"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config"),
    ],
)
def test_refused_configuration(
    target: ModelConfig, name: str, changes: dict[str, Any], message: str
) -> None:
    make, method = FORMATS[name]
    config, tensors = make()
    with pytest.raises(ConfigError, match=message):
        read(target, (config | changes, tensors), method)


def test_the_method_goes_with_the_markov_head(target: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"markov_rank.*--method dspark"):
        read(target, dspark(), "dflash")
    with pytest.raises(ConfigError, match=r"markov_rank.*--method dflash"):
        read(target, block_deepspec(), "dspark")


def test_a_markov_head_may_know_tokens_of_its_own(target: ModelConfig) -> None:
    config, tensors = block_speculators()
    config |= {"speculators_model_type": "dspark", "markov_rank": RANK}
    model = read(target, (config, tensors | filled(markov_tensors(SIZES, RANK))), "dspark")
    assert model.head.draft_vocab_size == DRAFT_VOCAB and model.head.has_token_map
    assert model.head.anchor_drafts is True  # DSpark's default in that format


@pytest.mark.parametrize("rank", [12, 264])
def test_a_markov_head_has_a_rank_that_the_kernels_know(target: ModelConfig, rank: int) -> None:
    config, tensors = dspark()
    with pytest.raises(ConfigError, match=f"markov_rank: expected a multiple of 8.*found {rank}"):
        read(target, (config | {"markov_rank": rank}, tensors), "dspark")


def test_refused_tensors(target: ModelConfig) -> None:
    config, tensors = dspark()
    wrong = {"confidence_head.proj.weight": tensor("BF16", [1, HIDDEN + 1])}
    with pytest.raises(ConfigError, match=r"\[1, 64\] or \[1, 72\] .*found \[1, 65\]"):
        read(target, (config, tensors | wrong), "dspark")
    config, tensors = block_speculators()
    del tensors["d2t"]
    with pytest.raises(ConfigError, match="missing tensor d2t: the head knows 40"):
        read(target, (config, tensors))
    with pytest.raises(ConfigError, match=r"expected a DFlash draft model.*Qwen3For"):
        spec = get_drafter("dflash")
        assert spec.read_draft_model is not None
        spec.read_draft_model(config_of(target, target.folder, "dflash").draft_setup(target))


# ---- What the doctor tries ----------------------------------------------------------------------


def checkup(target: ModelConfig, made: Checkpoint, method: str, **options: OptionValue) -> Checkup:
    folder = write_draft(target.folder.parent / "draft", *made)
    spec = get_drafter(method)
    assert spec.plan_checkup is not None
    return spec.plan_checkup(config_of(target, folder, method, **options).draft_setup(target))


def test_checkup_tries_the_traps(target: ModelConfig) -> None:
    plan = checkup(target, zlab(), "dflash")
    assert [variant.options for variant in plan.variants] == [
        {"capture_layers": "0,8,16,24,32"},
        {"capture_layers": "2,10,18,26,34"},
        {"draft_anchor": "first"},
        {"draft_attention": "causal"},
    ]
    options = [v.options for v in checkup(target, sliding(), "dflash").variants]
    assert [{"draft_attention": name} for name in ("causal", "full")] == options[-2:]
    options = [v.options for v in checkup(target, jetspec(), "dflash").variants]
    assert options[-1] == {"draft_attention": "full"}
    assert 0 < plan.least_first < plan.usual[0] < 1
    assert "normed states" in " ".join(plan.causes)
    options = [v.options for v in checkup(target, dspark(), "dspark").variants]
    assert {"draft_anchor": "drop"} in options and {"draft_attention": "causal"} in options
    # With so many drafts as the last token's row as well gives, the other layout has one fewer.
    variants = checkup(target, dspark(), "dspark", num_speculative_tokens=7).variants
    fewer: dict[str, OptionValue] = {"draft_anchor": "drop", "num_speculative_tokens": 6}
    advice = next(variant.advice for variant in variants if variant.options == fewer)
    assert "--method-option draft_anchor=drop" in advice and "--num-speculative-tokens 6" in advice
    read(target, dspark(), "dspark", **fewer)
    # With the last token's row as well a block is one deeper, which the tree has to have room for.
    trees: dict[str, OptionValue] = {"draft_top_k": 8, "draft_tree_size": 15}
    options = [v.options for v in checkup(target, zlab(), "dflash", **trees).variants]
    assert {"draft_anchor": "first", "draft_tree_size": 16} in options
    spec = get_drafter("dflash")
    for one in options:
        folder = target.folder.parent / "draft"
        config = config_of(target, folder, "dflash", **{**trees, **one})
        spec.validate(config.draft_setup(target))
