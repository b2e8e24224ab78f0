"""A language model's folder as a drafter: read like a target's, crossed with the target."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterable
from pathlib import Path

from openspec.checkpoint.draft_head import (
    HEAD,
    LAYER_TENSORS,
    QK_NORMS,
    TARGET_EMBEDDING,
    listed,
)
from openspec.checkpoint.draft_model import (
    MASK_KEYS,
    DraftCheckpoint,
    open_draft_checkpoint,
    read_draft_keys,
    read_mask_token,
)
from openspec.checkpoint.quantization.weight_format import WeightFormat, weight_format
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.tensor_info import TensorInfo
from openspec.checkpoint.vocabularies import share_vocabulary
from openspec.checkpoint.weights import DraftModel, target_tensors
from openspec.drafters.draft_model.states_format import BIAS, NONE, PROJECTION, read_states
from openspec.drafters.spec import DRAFT_TOP_K, DraftSetup, Options
from openspec.errors import ConfigError
from openspec.specs.head import HeadSpec
from openspec.specs.layers import AttentionSpec, DenseMlpSpec
from openspec.specs.target import TargetSpec

logger = logging.getLogger(__name__)

BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
FINAL_NORM = "model.norm.weight"
PARALLEL_DRAFTING = "parallel_drafting"
MAX_CHAIN, NUM_CHAIN, NUM_PARALLEL = 15, 4, 8
"""Drafts one after another, at most and by default; and by default in one pass."""


def num_drafts_of(folder: Path, options: Options) -> int:
    """K by default.

    Raises:
        ConfigError: there is no config.json.
    """
    keys = read_draft_keys(folder)
    is_parallel = options[PARALLEL_DRAFTING] and any(keys.get(key) is not None for key in MASK_KEYS)
    return NUM_PARALLEL if is_parallel else NUM_CHAIN


def read_language_model(setup: DraftSetup) -> DraftModel:
    """Reads the headers of a model folder.

    Raises:
        ConfigError: it is no model that drafts, or its ids mean other texts, with the remedy.
    """
    checkpoint = open_draft_checkpoint(setup.draft_folder)
    model = ModelConfig.from_folder(checkpoint.folder)
    _check_layers(checkpoint, model.spec)
    weights = WeightFormat()
    if model.quantization is not None:
        weights = weight_format(checkpoint.tensors, model.quantization)
    spec = dataclasses.replace(model.spec, quantized=weights.quantized)
    mask = _mask_token(checkpoint, setup, spec.vocab_size)
    states = NONE if mask is None else read_states(checkpoint, setup, spec.hidden_size)
    vocabulary = share_vocabulary(checkpoint.folder, setup.target_folder)
    num_parameters = _num_parameters(checkpoint.tensors.values())
    _warn_of_size(setup, num_parameters)
    names = (
        *_tensor_names(spec),
        *((PROJECTION,) if states.layers else ()),
        *((BIAS,) if states.has_bias else ()),
    )
    size = setup.target.vocab_size
    details = (
        f"layers: {spec.num_layers} of {spec.hidden_size}, weights {weights.name}",
        f"vocabulary: {spec.vocab_size} rows, the target's {size}",
        vocabulary.described,
        f"states: outputs of {listed(states.layers) or 'no layers'}"
        f"{', the last one normed' if states.is_normed else ''}",
        "drafts: one after another"
        if mask is None
        else f"drafts: in one pass, masks: token {mask}",
    )
    return DraftModel(
        folder=checkpoint.folder,
        description=f"language model {checkpoint.folder.name}, {num_parameters / 1e6:.1f} M "
        f"parameters, {spec.num_layers} layers, weights {weights.name}, drafts "
        f"{'one after another' if mask is None else 'in one pass'}"
        f"{' from states of the target, too' if states.layers else ''}",
        head=HeadSpec(
            layers=spec.layers,
            rms_norm_eps=spec.rms_norm_eps,
            capture_layers=states.layers,
            draft_vocab_size=min(spec.vocab_size, size),
            has_embedding=True,
            has_head=not spec.tie_word_embeddings,
            has_token_map=False,
            mask_token=-1 if mask is None else mask,
            model=spec,
            unknown_token=min(vocabulary.unknown_token, spec.vocab_size - 1),
            captures_normed=states.is_normed,
            has_projection_bias=states.has_bias,
        ),
        tensor_names={name: name for name in names},
        ignored_tensors=_ignored(checkpoint, names),
        details=details,
        weight_format=weights,
        edits=states.edits,
        trained_length=model.max_model_len,
    )


def _mask_token(checkpoint: DraftCheckpoint, setup: DraftSetup, vocab: int) -> int | None:
    """Of a model that drafts in one pass; None: it drafts one after another."""
    mask = None
    if setup.options[PARALLEL_DRAFTING]:
        mask = read_mask_token(checkpoint.keys, vocab)
    if mask is None and setup.options[DRAFT_TOP_K] != 1:
        raise ConfigError(
            f"{DRAFT_TOP_K}: trees are for draft models with a mask token ({', '.join(MASK_KEYS)} "
            f"in config.json), which {checkpoint.keys.source} does not name; set it to 1"
        )
    if mask is None and setup.draft_depth > MAX_CHAIN:
        raise ConfigError(
            f"num_speculative_tokens must be in [0, {MAX_CHAIN}] for a draft model that drafts one "
            f"token after another, got {setup.draft_depth}"
        )
    return mask


def _check_layers(checkpoint: DraftCheckpoint, spec: TargetSpec) -> None:
    """Refuses what a drafter's pass does not compute."""
    for layer in spec.layers:
        if not isinstance(layer.mixer, AttentionSpec):
            kind = "a hybrid with layers of linear attention"
        elif not isinstance(layer.mlp, DenseMlpSpec):
            kind = "a mixture of experts"
        else:
            continue
        raise ConfigError(
            f"{checkpoint.keys.source}: {checkpoint.keys.get('model_type')} is {kind}, which does "
            "not draft; give a dense model of the target's family"
        )


def _tensor_names(spec: TargetSpec) -> tuple[str, ...]:
    """All tensors that its files have to hold."""
    attention = spec.layers[0].mixer
    assert isinstance(attention, AttentionSpec)
    inner = (
        *LAYER_TENSORS,
        *(QK_NORMS if attention.has_qk_norm else ()),
        *(BIASES if attention.has_qkv_bias else ()),
    )
    return (
        TARGET_EMBEDDING,
        FINAL_NORM,
        *(() if spec.tie_word_embeddings else (HEAD,)),
        *(f"model.layers.{i}.{name}" for i in range(spec.num_layers) for name in inner),
        *(scale.name for scale in spec.quantized.values()),
    )


def _ignored(checkpoint: DraftCheckpoint, names: tuple[str, ...]) -> dict[str, str]:
    ignored = {
        name: "it follows from rope_theta"
        for name in checkpoint.tensors
        if name.endswith("rotary_emb.inv_freq")
    }
    if HEAD not in names:
        ignored[HEAD] = "config.json ties it to the embedding"
    if PROJECTION not in names:
        ignored |= dict.fromkeys((PROJECTION, BIAS), "the model drafts without the target's states")
    return ignored


def _num_parameters(tensors: Iterable[TensorInfo]) -> int:
    return sum(math.prod(info.shape) for info in tensors)


def _warn_of_size(setup: DraftSetup, num_parameters: int) -> None:
    with contextlib.suppress(ConfigError):  # the target may come without its files
        num_others = _num_parameters(target_tensors(setup.target_folder).values())
        if num_parameters > num_others:
            logger.warning(
                "%s: the draft model has %.2f billion parameters, the model that it drafts for "
                "%.2f; a draft costs more than the token that it saves",
                setup.draft_folder,
                num_parameters / 1e9,
                num_others / 1e9,
            )
