"""Checkpoints of DFlash2: where its keys stand, what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import config_from_settings
from openspec.drafters import get_drafter
from openspec.drafters.spec import OptionValue
from openspec.errors import ConfigError
from tests.heads.formats import dflash2_keys, dflash2_tensors
from tests.heads.stubs import (
    DRAFT_VOCAB,
    HIDDEN,
    SIZES,
    VOCAB,
    Checkpoint,
    Tensors,
    block_speculators,
    filled,
    tensor,
    token_map,
    write_draft,
    write_target,
    zlab,
)
from tests.unit.test_dflash_config import NUM_LAYERS, read

RANK, GROUP = 16, 16
KEYS = dflash2_keys(RANK, GROUP)
PARTS = {"conv_group": GROUP, "selector_rank": RANK, "selector_top_k": 16}


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    return write_target(tmp_path / "target")


def parts(rank: int = RANK, group: int = GROUP) -> Tensors:
    return filled(dflash2_tensors(SIZES, NUM_LAYERS, rank, group))


def of_zlab(**changes: Any) -> Checkpoint:
    config, tensors = zlab()
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= KEYS | changes
    return config, tensors | parts()


def of_speculators(**changes: Any) -> Checkpoint:
    """As it is saved: neither embedding nor LM head, and the whole vocabulary."""
    config, tensors = block_speculators()
    config |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
    config |= {"draft_vocab_size": VOCAB, **KEYS, **changes}
    dropped = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "verifier_norm.weight")
    kept = {name: value for name, value in tensors.items() if name not in dropped}
    return config, kept | parts()


@pytest.mark.parametrize("make", [of_zlab, of_speculators])
def test_formats(target: ModelConfig, make: Any) -> None:
    model = read(target, make())
    assert {name: getattr(model.head, name) for name in PARTS} == PARTS
    assert model.head.anchor_drafts is False
    assert set(parts()) <= set(model.tensor_names)
    shown = "\n".join((model.description, *model.details))
    name = "speculators" if make is of_speculators else "z-lab"
    assert model.description.startswith(f"DFlash2 head draft, format {name} (DFlash2), ")
    assert "convolutions: 2 taps, groups of 16 columns" in shown
    assert "selector: rank 16, among the best 16 tokens of every position" in shown


def test_what_absent_keys_mean(target: ModelConfig) -> None:
    """speculators has defaults; elsewhere a head without the keys is DFlash's."""
    config, tensors = of_speculators()
    for key in KEYS:
        del config[key]
    model = read(target, (config, tensors | parts(rank=256)))
    assert model.head.selector_rank == 256 and model.head.conv_group == 16
    plain = read(target, zlab())
    assert {getattr(plain.head, name) for name in PARTS} == {0}
    assert plain.description.startswith("DFlash head")


def test_convolutions_or_a_selector_alone(target: ModelConfig) -> None:
    config, tensors = of_zlab(selector_rank=0, selector_top_k=None)
    config["architectures"] = ["DFlashDraftModel"]
    model = read(target, (config, tensors))
    assert model.head.conv_group == GROUP and model.head.selector_rank == 0
    model = read(target, of_zlab(conv_kernel_size=0, conv_group_size=0))
    assert model.head.conv_group == 0 and model.head.selector_rank == RANK


def test_blocks_of_layers_that_slide(target: ModelConfig) -> None:
    """speculators' class says so of itself; elsewhere the layers' type does."""
    window = {
        "use_sliding_window": True,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * NUM_LAYERS,
    }
    config, tensors = of_speculators()
    config["transformer_layer_config"] |= window
    assert read(target, (config, tensors)).head.sliding_is_causal is False
    config["sliding_window_non_causal"] = False
    assert read(target, (config, tensors)).head.sliding_is_causal is True
    config, tensors = of_zlab()
    assert read(target, (config | window, tensors)).head.sliding_is_causal is True


def test_names_of_the_method(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *of_zlab())
    assert get_drafter("dflash2") is get_drafter("dflash")
    settings = {"model": str(target.folder), "draft_model": str(folder), "method": "dflash2"}
    assert config_from_settings(settings).method == "dflash"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 3}, r"dflash_config: conv_kernel_size: expected 2, found 3"),
        ({"conv_group_size": None}, "conv_group_size: expected a size beside conv_kernel_size"),
        ({"conv_group_size": 12}, "conv_group_size: expected a multiple of 8"),
        ({"conv_group_size": 24}, r"conv_group_size: expected a divisor of hidden_size \(64\)"),
        ({"selector_top_k": None}, "selector_top_k: expected a number beside selector_rank"),
        ({"selector_rank": 12}, "selector_rank: expected a multiple of 8, at most 256"),
        ({"selector_rank": 512}, "selector_rank: expected a multiple of 8, at most 256"),
        ({"selector_top_k": 65}, "selector_top_k: expected at most 64"),
        ({"selector_rank": 0, "selector_top_k": 0}, "architectures names a DFlash2 head"),
        ({"output_multiplier": 0.5}, "output_multiplier: expected 1, found 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: expected null"),
        ({"markov_rank": 8}, "markov_rank"),
    ],
)
def test_refused_keys(target: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(target, of_zlab(**changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_top_k": 17}, "draft_top_k must be at most 16, the candidates"),
        ({"num_speculative_tokens": 16}, "at most 15, the drafts of a block"),
    ],
)
def test_refused_options(
    target: ModelConfig, options: dict[str, OptionValue], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(target, of_zlab(), **options)


def test_rejection_needs_all_chances(target: ModelConfig, tmp_path: Path) -> None:
    folder = write_draft(tmp_path / "draft", *of_zlab())
    config = config_from_settings(
        {
            "model": str(target.folder),
            "draft_model": str(folder),
            "method": "dflash",
            "acceptance": "rejection",
        }
    )
    spec = get_drafter("dflash")
    assert spec.read_draft_model is not None
    with pytest.raises(ConfigError, match=r"--acceptance rejection .* candidates alone"):
        spec.read_draft_model(config.draft_setup(target))


def test_a_selector_knows_the_whole_vocabulary(target: ModelConfig) -> None:
    config, tensors = of_speculators(draft_vocab_size=DRAFT_VOCAB)
    tensors |= token_map() | {"lm_head.weight": tensor("BF16", [DRAFT_VOCAB, HIDDEN])}
    with pytest.raises(ConfigError, match=r"draft_vocab_size: expected the target's 160"):
        read(target, (config, tensors))
