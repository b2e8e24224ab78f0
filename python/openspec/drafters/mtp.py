"""Multi-token prediction: the layer that came with the target drafts chains, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from openspec.checkpoint.draft_head import LAYER_TENSORS, QK_NORMS
from openspec.checkpoint.draft_model import (
    OTHER_TARGET,
    DraftCheckpoint,
    added_token_ids,
    check_same_tokenizer,
    open_draft_checkpoint,
)
from openspec.checkpoint.quantization.declared import CODES, read_declared
from openspec.checkpoint.quantization.weight_format import WeightFormat, weight_format
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets import kind_of
from openspec.checkpoint.tensor_info import name_some
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.spec import (
    DRAFT_NOISE,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    noise_option,
    window_option,
)
from openspec.errors import ConfigError
from openspec.specs.head import HeadSpec
from openspec.specs.layers import AttentionSpec, LayerSpec
from openspec.specs.target import TargetSpec, TensorScale

PREFIX = "mtp."
_LAYER = (*LAYER_TENSORS, *QK_NORMS)
TENSORS = (
    *(f"{PREFIX}{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    *(f"{PREFIX}layers.0.{name}" for name in _LAYER),
    f"{PREFIX}norm.weight",
)
"""As models bring them."""
_SPECULATORS_LAYER = "mtp_layers.0."
SPECULATORS = {
    f"{_SPECULATORS_LAYER}{name}": one
    for name, one in zip(
        (
            *("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight"),
            *_LAYER,
            "final_layernorm.weight",
        ),
        TENSORS,
        strict=True,
    )
}
"""As speculators writes a head that it has trained on -> as models bring them."""
DRAFT_VOCAB_SIZE = "draft_vocab_size"
VOCAB_UNIT = 16
"""What sizes of a part of the vocabulary are multiples of."""


@dataclass(frozen=True, slots=True)
class _Parts:
    checkpoint: DraftCheckpoint
    layer: LayerSpec
    rms_norm_eps: float
    tensor_names: Mapping[str, str]


def _read_parts(setup: DraftSetup) -> _Parts:
    checkpoint, target = open_draft_checkpoint(setup.draft_folder), setup.target
    keys = checkpoint.keys
    is_trained_on = keys.get("speculators_model_type") is not None
    names = SPECULATORS if is_trained_on else {name: name for name in TENSORS}
    if is_trained_on and keys.get("speculators_model_type") != "mtp":
        keys.refuse("speculators_model_type", '"mtp"', "heads of other kinds have other methods")
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise ConfigError(
            f"{checkpoint.folder}: missing {len(missing)} of the {len(names)} tensors of an MTP "
            f"head: {name_some(missing)}; tools that fine-tune or quantise often drop them, "
            "whatever config.json says: name the checkpoint that this one was made from, such as "
            "--draft-model Qwen/Qwen3.5-4B, or take another --method"
        )
    if is_trained_on:  # config.json is in part that of transformers' class
        return _Parts(checkpoint, _gated_layer(target.spec), target.spec.rms_norm_eps, names)
    text = keys.object("text_config") or keys
    _refuse_others(text)
    source = kind_of(keys).read(keys).spec
    for name, found, expected in (
        ("hidden_size", source.hidden_size, target.hidden_size),
        ("vocab_size", source.vocab_size, target.vocab_size),
    ):
        if found != expected:
            text.refuse(name, f"{expected}, as the target has", OTHER_TARGET)
    return _Parts(checkpoint, _gated_layer(source), source.rms_norm_eps, names)


def _gated_layer(source: TargetSpec) -> LayerSpec:
    """The layers of attention of a model are alike, and so is the one that drafts."""
    for layer in source.layers:
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.has_gate:
            return layer
    raise ConfigError(
        "MTP heads are read of models with gated attention, such as Qwen3.5; take another --method"
    )


def _quantized(checkpoint: DraftCheckpoint) -> dict[str, TensorScale]:
    """Which of the layer's matrices come as codes, by the lists of the model that it came with."""
    layer = f"{PREFIX}layers."
    infos = {
        f"model.layers.{name.removeprefix(layer)}": info
        for name, info in checkpoint.tensors.items()
        if name.startswith(layer)
    }
    declared = read_declared(checkpoint.folder, checkpoint.keys)
    if declared is None or all(info.dtype != CODES for info in infos.values()):
        return {}
    return {
        PREFIX + name.removeprefix("model."): replace(
            scale, name=PREFIX + scale.name.removeprefix("model.")
        )
        for name, scale in weight_format(infos, declared).quantized.items()
    }


def _refuse_others(text: JsonKeys) -> None:
    if text.integer("mtp_num_hidden_layers", 0, 64, 1) != 1:
        text.refuse("mtp_num_hidden_layers", "1: heads of several layers are not supported")
    if text.boolean("mtp_use_dedicated_embeddings", False):
        text.refuse("mtp_use_dedicated_embeddings", "false: the target's embedding is used")


def _read_draft_model(setup: DraftSetup) -> DraftModel:
    parts, target = _read_parts(setup), setup.target
    checkpoint, attention = parts.checkpoint, parts.layer.mixer
    assert isinstance(attention, AttentionSpec)
    vocab_size = target.vocab_size
    part = int(setup.options[DRAFT_VOCAB_SIZE])
    draft_vocab = part if 0 < part < vocab_size else vocab_size
    head = HeadSpec(
        layers=(parts.layer,),
        rms_norm_eps=parts.rms_norm_eps,
        capture_layers=(target.num_layers - 1,),
        captures_normed=True,
        draft_vocab_size=draft_vocab,
        has_embedding=False,
        has_head=False,
        has_token_map=False,
        quantized=_quantized(checkpoint),
        kept_tokens=added_token_ids(target.folder) if draft_vocab < vocab_size else (),
    )
    names = {**parts.tensor_names, **{scale.name: scale.name for scale in head.quantized.values()}}
    num_parameters = sum(math.prod(checkpoint.tensors[name].shape) for name in parts.tensor_names)
    summary = f"drafts {draft_vocab} of {vocab_size} tokens"
    return DraftModel(
        folder=checkpoint.folder,
        description=f"MTP head {checkpoint.folder.name}, {num_parameters / 1e6:.1f} M parameters, "
        f"{summary}, reads the target's state after its final norm",
        head=head,
        weight_format=WeightFormat(quantized=head.quantized),
        tensor_names=names,
        ignored_tensors={
            name: "it is the target's" for name in checkpoint.tensors if name not in names
        },
        details=(
            f"attention: {attention.num_q_heads} query heads, {attention.num_kv_heads} KV heads of "
            f"{attention.head_dim}, {'with' if attention.has_gate else 'without'} a gate",
            f"embedding and head: the target's; {summary}"
            + (", those written most often" if draft_vocab < vocab_size else ""),
            check_same_tokenizer(checkpoint.folder, target.folder),
        ),
    )


def _check(setup: DraftSetup) -> None:
    if setup.acceptance == "rejection" and not setup.options[DRAFT_NOISE]:
        raise ConfigError(
            f"--acceptance rejection needs drafts that are drawn: drop it, or {DRAFT_NOISE}=false"
        )
    size = int(setup.options[DRAFT_VOCAB_SIZE])
    if size % VOCAB_UNIT:
        raise ConfigError(f"{DRAFT_VOCAB_SIZE} must be a multiple of {VOCAB_UNIT}, got {size}")


def _plan_checkup(setup: DraftSetup) -> Checkup:
    return Checkup(
        usual=(0.85, 0.75, 0.60),
        source="Qwen3.6-27B in chats with 6 drafts accepts .92, .84, .65 of the first three; "
        "smaller models and freer texts less",
        least_first=0.45,
        causes=(
            "the target was fine-tuned or quantised after its MTP head was trained",
            f"texts whose tokens are rare: {DRAFT_VOCAB_SIZE}=0 drafts all tokens",
            "another chat template or thinking mode than in training",
        ),
    )


SPEC = DrafterSpec(
    name="mtp",
    summary="the layer for multi-token prediction that came with the model drafts chains",
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=15,
    aliases=("qwen3_5_mtp", "nextn", "NEXTN"),
    options=(
        DrafterOption(
            name=DRAFT_VOCAB_SIZE,
            default=32768,
            minimum=0,
            maximum=1 << 24,
            help="Tokens that are drafted: those that the engine has written most often, at first "
            "the lowest ids, and the tokenizer's added ones. Fewer make drafts cheaper. 0: all.",
        ),
        noise_option(),
        window_option(),
    ),
    supports_rejection=True,
    target_prefix=PREFIX,
    check=_check,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
