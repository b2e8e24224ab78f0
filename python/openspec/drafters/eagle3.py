"""EAGLE-3: a head of one layer that reads hidden states of the target and drafts chains or trees.

Published heads come in several formats ("dialects") that differ in keys, tensor names and in how
they number the target's layers. All of that ends here: the engine gets one geometry, one set of
tensor names and one numbering.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openspec.draft_head import (
    CAPTURE_LAYERS,
    EMBEDDING,
    HEAD,
    TARGET_EMBEDDING,
    TOKEN_MAP,
    TOKEN_MASK,
    LayerIds,
    Numbering,
    check_captures,
    check_computation,
    check_target,
    check_token_map,
    copies_of_target,
    entering,
    layers_of_user,
    listed,
    neighbouring_layers,
    num_parameters,
    rope_theta,
    trained_for,
)
from openspec.draft_head import captured_layers as layers_of_ids
from openspec.draft_model import (
    DraftCheckpoint,
    DraftModel,
    check_same_tokenizer,
    opened_draft_checkpoint,
)
from openspec.drafters import (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_TOP_K,
    DRAFT_WINDOW_OPTION,
    Checkup,
    DrafterOption,
    DrafterSpec,
    Options,
    OptionValue,
    Variant,
    check_rejection,
)
from openspec.errors import ConfigError
from openspec.json_keys import JsonKeys

if TYPE_CHECKING:
    from openspec.config import EngineConfig
    from openspec.model_config import ModelConfig

logger = logging.getLogger(__name__)

DRAFT_TREE_SIZE = "draft_tree_size"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
INNER_LAYER = "midlayer."
"""The layer's prefix in the names that the runner expects."""
LAYER_PREFIXES = (INNER_LAYER, "layers.0.")
LAYER_TENSORS = (
    "input_layernorm.weight",
    "hidden_norm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
OUTER_TENSORS = ("fc.weight", "norm.weight", HEAD)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What a checkpoint's config.json says, whatever the format."""

    name: str
    keys: JsonKeys
    """Top level."""
    layer: JsonKeys
    """Where the layer's geometry stands."""
    layer_ids: LayerIds | None


def captured_layers(layer_ids: LayerIds | None, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads; the usual three where it names none.

    Raises:
        ConfigError: ids out of range or not rising, with the numbers.
    """
    if layer_ids is None:
        ids = (2, num_layers // 2, num_layers - 3)
        layer_ids = LayerIds(ids, "entering", f"default for {num_layers} layers")
    return layers_of_ids(layer_ids, num_layers)


def _read_dialect(checkpoint: DraftCheckpoint) -> _Dialect:
    """Recognises the format by its keys.

    Raises:
        ConfigError: none of those known, or a variant whose computation is another one.
    """
    keys = checkpoint.keys
    if keys.get("speculators_model_type") is not None:
        return _speculators(keys)
    if keys.get("target_layer_ids") is not None and keys.get("ttt_length") is not None:
        ids = keys.integers("target_layer_ids") or ()
        return _Dialect(
            "DeepSpec",
            keys,
            keys,
            LayerIds(ids, "output", f"{keys.source}: target_layer_ids"),
        )
    is_head = keys.get("draft_vocab_size") is not None or any(
        name.startswith(INNER_LAYER) for name in checkpoint.tensors
    )
    if not is_head:
        raise ConfigError(
            f"{keys.source}: expected an EAGLE-3 head: draft_vocab_size (AngelSlim, SpecForge), "
            'speculators_model_type "eagle3" (speculators) or target_layer_ids with ttt_length '
            f"(DeepSpec); found architectures {keys.get('architectures')!r}; give the folder of "
            "such a head, not of a target or of another method's draft model"
        )
    eagle = keys.object("eagle_config") or JsonKeys({}, f"{keys.source}: eagle_config")
    if not eagle.boolean("use_aux_hidden_state", True):
        eagle.refuse("use_aux_hidden_state", "true", "without it this is no EAGLE-3 head")
    inner = _ids_at(eagle, "output")
    outer = _ids_at(keys, "entering")
    if inner and outer and [i + 1 for i in inner.ids] != list(outer.ids):
        raise ConfigError(
            f"{inner.origin} says {list(inner.ids)} (outputs), {outer.origin} "
            f"{list(outer.ids)} (entering), which are different layers; keep the one that is right"
        )
    return _Dialect("classic (AngelSlim, SpecForge)", keys, keys, inner or outer)


def _ids_at(keys: JsonKeys, numbering: Numbering) -> LayerIds | None:
    ids = keys.integers(LAYER_IDS_KEY)
    return None if ids is None else LayerIds(ids, numbering, f"{keys.source}: {LAYER_IDS_KEY}")


def _speculators(keys: JsonKeys) -> _Dialect:
    if keys.get("speculators_model_type") != "eagle3":
        keys.refuse("speculators_model_type", '"eagle3"')
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if keys.boolean(name, False):
            keys.refuse(
                name,
                "false",
                "this variant of the head computes something else, which is not supported; give a "
                "head without it",
            )
    layer = keys.object("transformer_layer_config")
    if layer is None:
        keys.refuse("transformer_layer_config", "an object with the layer's geometry")
    return _Dialect("speculators", keys, layer, _ids_at(keys, "entering"))


def _layer_prefix(checkpoint: DraftCheckpoint) -> str:
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(prefix) for name in checkpoint.tensors):
            return prefix
    raise ConfigError(
        f"{checkpoint.folder}: expected tensors {LAYER_PREFIXES[0]}* or {LAYER_PREFIXES[1]}* (the "
        "one layer of an EAGLE-3 head), found none of them"
    )


def _read_draft_model(config: EngineConfig, target: ModelConfig) -> DraftModel:
    """The head in `config.draft_model_path`, checked against the target."""
    folder = config.draft_model_path
    assert folder is not None  # DrafterSpec.validate has seen to it
    with opened_draft_checkpoint(folder) as checkpoint:
        options = SPEC.complete_options(config.method_options)
        return _describe(checkpoint, layers_of_user(str(options[CAPTURE_LAYERS])), target)


def _describe(
    checkpoint: DraftCheckpoint, user_layers: LayerIds | None, target: ModelConfig
) -> DraftModel:
    dialect = _read_dialect(checkpoint)
    layer = dialect.layer
    prefix = _layer_prefix(checkpoint)
    if layer.integer("num_hidden_layers", 0, 1 << 10, 1) != 1:
        layer.refuse("num_hidden_layers", "1", "heads of several layers are not supported")
    check_computation(layer)
    check_target(dialect.keys, layer, target)

    layer_ids = user_layers or dialect.layer_ids
    layers = captured_layers(layer_ids, target.num_layers)
    origin = "the default" if layer_ids is None else layer_ids.origin
    check_captures(checkpoint.tensor("fc.weight"), target.hidden_size, layers, origin)

    num_q_heads = layer.integer("num_attention_heads", 1, 4096)
    num_kv_heads = layer.integer("num_key_value_heads", 1, 4096, num_q_heads)
    if num_q_heads % num_kv_heads:
        layer.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    q_shape = checkpoint.tensor(f"{prefix}self_attn.q_proj.weight").shape
    q_rows = q_shape[0] if q_shape else 0
    draft_vocab = dialect.keys.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size)

    has_token_map = TOKEN_MAP in checkpoint.tensors
    check_token_map(checkpoint, draft_vocab, target.vocab_size)
    has_qk_norm = any(prefix + name in checkpoint.tensors for name in QK_NORMS)
    ignored = _ignored_tensors(checkpoint, prefix, target.folder)
    has_embedding = EMBEDDING in checkpoint.tensors and EMBEDDING not in ignored
    options: dict[str, OptionValue] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        # Not hidden_size / heads, which is another number for 4B; old files have no such key.
        "head_dim": layer.integer("head_dim", 1, 4096, max(q_rows // num_q_heads, 1)),
        "intermediate_size": layer.integer("intermediate_size", 1, 1 << 20),
        "draft_vocab_size": draft_vocab,
        "rope_theta": rope_theta(layer),
        "rms_norm_eps": layer.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        CAPTURE_LAYERS: ",".join(map(str, layers)),
        "has_qk_norm": has_qk_norm,
        "has_embedding": has_embedding,
        "has_token_map": has_token_map,
        "norm_before_residual": dialect.keys.boolean("norm_before_residual", False),
    }
    names = _tensor_names(prefix, has_qk_norm, has_embedding, has_token_map)
    _warn_of_unusual_layers(checkpoint.folder, layers, target.num_layers)
    return DraftModel(
        folder=checkpoint.folder,
        description=_description(checkpoint, dialect, names, layers, draft_vocab, target),
        options=options,
        tensor_names=names,
        ignored_tensors=ignored,
        details=_details(checkpoint, dialect, options, layers, origin, target),
    )


def _tensor_names(
    prefix: str, has_qk_norm: bool, has_embedding: bool, has_token_map: bool
) -> dict[str, str]:
    layer = (*LAYER_TENSORS, *(QK_NORMS if has_qk_norm else ()))
    names = {prefix + name: INNER_LAYER + name for name in layer}
    outer = [*OUTER_TENSORS, *[EMBEDDING] * has_embedding, *[TOKEN_MAP] * has_token_map]
    return {**names, **{name: name for name in outer}}


def _ignored_tensors(
    checkpoint: DraftCheckpoint, prefix: str, target_folder: Path
) -> dict[str, str]:
    ignored = {TOKEN_MASK: f"it follows from {TOKEN_MAP}"}
    for name in checkpoint.tensors:
        if name.startswith("verifier_"):
            ignored[name] = "only training needs it"
        elif name == f"{prefix}self_attn.rotary_emb.inv_freq":
            ignored[name] = "it follows from rope_theta"
    return ignored | copies_of_target(checkpoint, {EMBEDDING: (TARGET_EMBEDDING,)}, target_folder)


def _description(
    checkpoint: DraftCheckpoint,
    dialect: _Dialect,
    names: Mapping[str, str],
    layers: tuple[int, ...],
    draft_vocab: int,
    target: ModelConfig,
) -> str:
    return (
        f"EAGLE-3 head {checkpoint.folder.name}, format {dialect.name}, "
        f"{num_parameters(checkpoint, names) / 1e6:.1f} M parameters, drafts {draft_vocab} of "
        f"{target.vocab_size} tokens, reads the outputs of layers {listed(layers)} of "
        f"{target.num_layers}"
    )


def _details(
    checkpoint: DraftCheckpoint,
    dialect: _Dialect,
    options: Mapping[str, OptionValue],
    layers: tuple[int, ...],
    origin: str,
    target: ModelConfig,
) -> tuple[str, ...]:
    fc = checkpoint.tensor("fc.weight")
    given = "own" if options["has_embedding"] else "the target's"
    lines = [
        f"format: {dialect.name}",
        f"layers: outputs of {listed(layers)} = entering {entering(layers)} (from {origin})",
        f"fc: {list(fc.shape)}, {len(layers)} states of {target.hidden_size}",
        f"attention: {options['num_q_heads']} query heads, {options['num_kv_heads']} KV heads of "
        f"{options['head_dim']}, q/k norm {'yes' if options['has_qk_norm'] else 'no'}, "
        f"RoPE base {options['rope_theta']:g}",
        f"embedding: {given}; vocabulary: {options['draft_vocab_size']} of {target.vocab_size}, "
        f"{'mapped by ' + TOKEN_MAP if options['has_token_map'] else 'not mapped'}",
        f"residual: {'behind' if options['norm_before_residual'] else 'before'} hidden_norm",
        check_same_tokenizer(checkpoint.folder, target.folder),
    ]
    trained_len = dialect.layer.get("max_position_embeddings")
    if isinstance(trained_len, int) and trained_len < target.max_model_len:
        lines.append(
            f"positions: made for {trained_len}, the target for {target.max_model_len}; "
            "acceptance falls beyond"
        )
    verifier = trained_for(dialect.keys)
    if verifier is not None:
        lines.append(f"trained for: {verifier}")
    return tuple(lines)


def _warn_of_unusual_layers(folder: Path, layers: tuple[int, ...], num_layers: int) -> None:
    """Ids that are all one off the usual ones were most likely written in the other numbering."""
    usual = (1, num_layers // 2 - 1, num_layers - 4)
    for shift in (-1, 1):
        if layers == tuple(layer + shift for layer in usual):
            logger.warning(
                "%s: reads the outputs of layers %s, all one %s than usual (%s); were the ids "
                "written in the other numbering? --capture-layers %s reads the usual ones, "
                "python -m openspec.doctor says which of them accepts more",
                folder,
                listed(layers),
                "less" if shift < 0 else "more",
                listed(usual),
                ",".join(map(str, usual)),
            )


def _plan_checkup(config: EngineConfig, target: ModelConfig) -> Checkup:
    layers = tuple(
        int(part)
        for part in str(_read_draft_model(config, target).options[CAPTURE_LAYERS]).split(",")
    )
    variants = []
    for moved in neighbouring_layers(layers, target.num_layers):
        text = ",".join(map(str, moved))
        variants.append(
            Variant(
                label=f"outputs of layers {listed(moved)}",
                options={CAPTURE_LAYERS: text},
                advice=f"the layer ids are in the other numbering: use --capture-layers {text} "
                "or mend config.json",
            )
        )
    return Checkup(
        usual=(0.65, 0.40),
        source="AngelSlim's heads for Qwen3 4B and 8B accept about 1.05 of 2 drafts (vLLM, their "
        "model cards); the split over the two is an estimate",
        least_first=0.30,
        variants=tuple(variants),
        causes=(
            "the head was trained for another target of the same size (base against instruct, "
            "2504 against 2507), or for its quantised form",
            "the head expects other layers; its card or training configuration names them "
            "(--capture-layers takes outputs, counted from 0)",
            "the head was trained on normed states; it has to read the residual stream as it is",
            "norm_before_residual in config.json does not say what the training did",
            f"{TOKEN_MAP} holds the target's ids where offsets (id - index) are expected; a file "
            f"without {TOKEN_MASK} cannot be checked for that when it is loaded",
            "lm_head or embed_tokens is not the one that the head was trained with",
            "another chat template or thinking mode than in training; texts far from its data",
        ),
    )


def _num_draft_rows(depth: int, options: Options) -> int:
    """Drafts of a step: K, or the nodes of a tree of depth K."""
    top_k, wanted = int(options[DRAFT_TOP_K]), int(options[DRAFT_TREE_SIZE])
    if top_k == 1 or depth == 0:
        return depth
    num_candidates = top_k + (depth - 1) * top_k**2
    # With the last known token a power of two of rows, as far as depth is worth it.
    return min(wanted or min(4 * depth, 16) - 1, num_candidates)


def _check(config: EngineConfig, target: ModelConfig) -> None:
    options = SPEC.complete_options(config.method_options)
    if options[DRAFT_TOP_K] == 1 and options[DRAFT_TREE_SIZE] != 0:
        raise ConfigError("--draft-tree-size is for trees: set --draft-top-k above 1 (such as 4)")
    check_rejection(config, options)
    if config.num_drafts > 0 and config.num_draft_rows < config.num_drafts:
        raise ConfigError(
            f"--draft-tree-size {options[DRAFT_TREE_SIZE]} is less than the tree's depth; raise it "
            f"or lower --num-speculative-tokens ({config.num_drafts})"
        )


SPEC = DrafterSpec(
    name="eagle3",
    summary="a head of one layer reads the target's hidden states and drafts chains or trees",
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=8,
    options=(
        CAPTURE_LAYERS_OPTION,
        DrafterOption(
            name=DRAFT_TOP_K,
            default=1,
            minimum=1,
            maximum=10,
            help="Above 1 a tree is drafted: the best so many drafts of a level get so many "
            "children each.",
        ),
        DrafterOption(
            name=DRAFT_TREE_SIZE,
            default=0,
            minimum=0,
            maximum=128,
            help="Drafts of a tree, the most likely ones. Default: 4 K - 1, at most 15.",
        ),
        DRAFT_NOISE_OPTION,
        DRAFT_WINDOW_OPTION,
    ),
    supports_rejection=True,
    check=_check,
    num_draft_rows=_num_draft_rows,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
