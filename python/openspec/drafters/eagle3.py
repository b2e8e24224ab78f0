"""EAGLE-3: a head of one layer that reads the target's hidden states and drafts chains or trees."""

from __future__ import annotations

import logging
from pathlib import Path

from openspec.checkpoint.config import ModelConfig
from openspec.checkpoint.draft_head import (
    CAPTURE_LAYERS,
    EMBEDDING,
    HEAD,
    LAYER_TENSORS,
    QK_NORMS,
    TARGET_EMBEDDING,
    TOKEN_MAP,
    TOKEN_MASK,
    Dialect,
    LayerIds,
    check_computation,
    check_target,
    check_token_map,
    details,
    ignored_tensors,
    layer_geometry,
    layer_ids_at,
    layers_of_user,
    listed,
    num_parameters,
    read_captures,
    speculators_layer,
    whose,
)
from openspec.checkpoint.draft_model import DraftCheckpoint, opened_draft_checkpoint
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.spec import (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    DRAFT_WINDOW_OPTION,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    Options,
    OptionValue,
    check_rejection,
    check_trees,
    layer_variants,
)
from openspec.errors import ConfigError

logger = logging.getLogger(__name__)

LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
INNER_LAYER = "midlayer."
"""The layer's prefix in the names that the runner expects."""
LAYER_PREFIXES = (INNER_LAYER, "layers.0.")
OUTER_TENSORS = ("fc.weight", "norm.weight", HEAD)


def default_layers(num_layers: int) -> LayerIds:
    """The three layers that a head reads which names none."""
    ids = (2, num_layers // 2, num_layers - 3)
    return LayerIds(ids, "entering", f"the default for {num_layers} layers")


def _read_dialect(checkpoint: DraftCheckpoint) -> Dialect:
    """Recognises the format by its keys.

    Raises:
        ConfigError: none of those known, or a variant whose computation is another one.
    """
    keys = checkpoint.keys
    if keys.get("speculators_model_type") is not None:
        return _speculators(keys)
    if keys.get("target_layer_ids") is not None and keys.get("ttt_length") is not None:
        return Dialect("DeepSpec", keys, keys, layer_ids_at(keys, "target_layer_ids", "output"))
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
    _check_variant(keys)
    _check_variant(eagle)
    inner = layer_ids_at(eagle, LAYER_IDS_KEY, "output")
    outer = layer_ids_at(keys, LAYER_IDS_KEY, "entering")
    if inner and outer and inner.outputs() != outer.outputs():
        raise ConfigError(
            f"{inner.origin} says {list(inner.ids)} (outputs), {outer.origin} "
            f"{list(outer.ids)} (entering), which are different layers; keep the one that is right"
        )
    return Dialect("classic (AngelSlim, SpecForge)", keys, keys, inner or outer)


def _check_variant(keys: JsonKeys) -> None:
    """Refuses what makes the head another one, in any format."""
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if keys.boolean(name, False):
            keys.refuse(
                name,
                "false",
                "this variant of the head computes something else, which is not supported; give a "
                "head without it",
            )


def _speculators(keys: JsonKeys) -> Dialect:
    if keys.get("speculators_model_type") != "eagle3":
        keys.refuse("speculators_model_type", '"eagle3"')
    _check_variant(keys)
    layer_ids = layer_ids_at(keys, LAYER_IDS_KEY, "entering")
    return Dialect("speculators", keys, speculators_layer(keys), layer_ids)


def _layer_prefix(checkpoint: DraftCheckpoint) -> str:
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(prefix) for name in checkpoint.tensors):
            return prefix
    raise ConfigError(
        f"{checkpoint.folder}: expected tensors {LAYER_PREFIXES[0]}* or {LAYER_PREFIXES[1]}* (the "
        "one layer of an EAGLE-3 head), found none of them"
    )


def describe(checkpoint: DraftCheckpoint, options: Options, target: ModelConfig) -> DraftModel:
    """The head, checked against the target.

    Raises:
        ConfigError: it cannot be run, or not with this target.
    """
    dialect = _read_dialect(checkpoint)
    layer = dialect.layer
    prefix = _layer_prefix(checkpoint)
    if layer.integer("num_hidden_layers", 0, 1 << 10, 1) != 1:
        layer.refuse("num_hidden_layers", "1", "heads of several layers are not supported")
    check_computation(layer)
    check_target(dialect.keys, layer, target)

    layer_ids = (
        layers_of_user(str(options[CAPTURE_LAYERS]))
        or dialect.layer_ids
        or default_layers(target.num_layers)
    )
    layers = read_captures(checkpoint, layer_ids, target)
    geometry = layer_geometry(checkpoint, layer, prefix)
    draft_vocab = dialect.keys.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size)

    has_token_map = TOKEN_MAP in checkpoint.tensors
    check_token_map(checkpoint, draft_vocab, target.vocab_size)
    has_qk_norm = any(prefix + name in checkpoint.tensors for name in QK_NORMS)
    ignored = ignored_tensors(checkpoint, {EMBEDDING: (TARGET_EMBEDDING,)}, target.folder)
    has_embedding = EMBEDDING in checkpoint.tensors and EMBEDDING not in ignored
    model_options: dict[str, OptionValue] = {
        **geometry,
        "draft_vocab_size": draft_vocab,
        CAPTURE_LAYERS: ",".join(map(str, layers)),
        "has_qk_norm": has_qk_norm,
        "has_embedding": has_embedding,
        "has_token_map": has_token_map,
        "norm_before_residual": dialect.keys.boolean("norm_before_residual", False),
    }
    names = _tensor_names(prefix, has_qk_norm, has_embedding, has_token_map)
    _warn_of_unusual_layers(checkpoint.folder, layers, target.num_layers)
    _warn_of_window(checkpoint.folder, layer, options)
    return DraftModel(
        folder=checkpoint.folder,
        description=f"EAGLE-3 head {checkpoint.folder.name}, format {dialect.name}, "
        f"{num_parameters(checkpoint, names) / 1e6:.1f} M parameters, drafts {draft_vocab} of "
        f"{target.vocab_size} tokens, reads the outputs of layers {listed(layers)} of "
        f"{target.num_layers}",
        options=model_options,
        tensor_names=names,
        ignored_tensors=ignored,
        details=details(
            checkpoint, dialect, layers, layer_ids, target, _details(model_options, target)
        ),
    )


def _tensor_names(
    prefix: str, has_qk_norm: bool, has_embedding: bool, has_token_map: bool
) -> dict[str, str]:
    layer = (*LAYER_TENSORS, "hidden_norm.weight", *(QK_NORMS if has_qk_norm else ()))
    names = {prefix + name: INNER_LAYER + name for name in layer}
    outer = [*OUTER_TENSORS, *[EMBEDDING] * has_embedding, *[TOKEN_MAP] * has_token_map]
    return {**names, **{name: name for name in outer}}


def _details(model: Options, target: ModelConfig) -> list[str]:
    return [
        f"attention: {model['num_q_heads']} query heads, {model['num_kv_heads']} KV heads of "
        f"{model['head_dim']}, q/k norm {'yes' if model['has_qk_norm'] else 'no'}, "
        f"RoPE base {model['rope_theta']:g}",
        f"embedding: {whose(model['has_embedding'])}; vocabulary: {model['draft_vocab_size']} of "
        f"{target.vocab_size}, "
        f"{'mapped by ' + TOKEN_MAP if model['has_token_map'] else 'not mapped'}",
        f"residual: {'behind' if model['norm_before_residual'] else 'before'} hidden_norm",
    ]


def _warn_of_unusual_layers(folder: Path, layers: tuple[int, ...], num_layers: int) -> None:
    """Ids that are all one off the usual ones were most likely written in the other numbering."""
    usual = default_layers(num_layers).outputs()
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


def _warn_of_window(folder: Path, layer: JsonKeys, options: Options) -> None:
    """A head that was trained to look no further back accepts little in long texts if it does."""
    types, window = layer.get("layer_types"), layer.get("sliding_window")
    if types == ["sliding_attention"] and isinstance(window, int) and not options["draft_window"]:
        logger.warning(
            "%s: was trained with a window of %d tokens; --draft-window %d gives it one",
            folder,
            window,
            window,
        )


def _read_draft_model(setup: DraftSetup) -> DraftModel:
    with opened_draft_checkpoint(setup.draft_folder) as checkpoint:
        return describe(checkpoint, setup.options, setup.target)


def _plan_checkup(setup: DraftSetup) -> Checkup:
    return Checkup(
        usual=(0.65, 0.40),
        source="AngelSlim's heads for Qwen3 4B and 8B accept about 1.05 of 2 drafts (vLLM, their "
        "model cards); the split over the two is an estimate",
        least_first=0.30,
        variants=layer_variants(_read_draft_model(setup), setup.target),
        causes=(
            *HEAD_CAUSES,
            "norm_before_residual in config.json does not say what the training did",
            f"{TOKEN_MAP} holds the target's ids where offsets (id - index) are expected; a file "
            f"without {TOKEN_MASK} cannot be checked for that when it is loaded",
            "lm_head or embed_tokens is not the one that the head was trained with",
            "another chat template or thinking mode than in training; texts far from its data",
        ),
    )


def _max_draft_tokens(depth: int, options: Options) -> int:
    """Drafts of a step: K, or the nodes of a tree of depth K."""
    top_k, wanted = int(options[DRAFT_TOP_K]), int(options[DRAFT_TREE_SIZE])
    if top_k == 1 or depth == 0:
        return depth
    num_candidates = top_k + (depth - 1) * top_k**2
    # With the last known token a power of two of rows, as far as depth is worth it.
    return min(wanted or min(4 * depth, 16) - 1, num_candidates)


def _check(setup: DraftSetup) -> None:
    check_rejection(setup)
    check_trees(setup)


SPEC = DrafterSpec(
    name="eagle3",
    summary="a head of one layer reads the target's hidden states and drafts chains or trees",
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=15,
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
    max_draft_tokens=_max_draft_tokens,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
