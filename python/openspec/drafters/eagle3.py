"""EAGLE-3: a head of one layer that reads the target's hidden states and drafts chains or trees."""

from __future__ import annotations

import logging
from pathlib import Path

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
    DraftHead,
    LayerIds,
    agreed_layer_ids,
    layer_ids_at,
    layers_of_user,
    listed,
    speculators_layer,
)
from openspec.checkpoint.draft_model import DraftCheckpoint, open_draft_checkpoint
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.spec import (
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    DRAFT_WINDOW,
    HEAD_CAUSES,
    Checkup,
    DrafterSpec,
    DraftSetup,
    Options,
    check_head_options,
    head_options,
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
    layer_ids = agreed_layer_ids(
        layer_ids_at(eagle, LAYER_IDS_KEY, "output"), layer_ids_at(keys, LAYER_IDS_KEY, "entering")
    )
    return Dialect("classic (AngelSlim, SpecForge)", keys, keys, layer_ids)


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


def _read_draft_model(setup: DraftSetup) -> DraftModel:
    target, options = setup.target, setup.options
    checkpoint = open_draft_checkpoint(setup.draft_folder)
    dialect = _read_dialect(checkpoint)
    layer, prefix = dialect.layer, _layer_prefix(checkpoint)
    if layer.integer("num_hidden_layers", 0, 1 << 10, 1) != 1:
        layer.refuse("num_hidden_layers", "1", "heads of several layers are not supported")
    layer_ids = (
        layers_of_user(str(options[CAPTURE_LAYERS]))
        or dialect.layer_ids
        or default_layers(target.num_layers)
    )
    head = DraftHead(checkpoint, dialect, layer_ids, target, {EMBEDDING: (TARGET_EMBEDDING,)})
    vocab = target.vocab_size
    draft_vocab = dialect.keys.integer("draft_vocab_size", 1, vocab, vocab)
    has_qk_norm = any(prefix + name in checkpoint.tensors for name in QK_NORMS)
    is_norm_first = dialect.keys.boolean("norm_before_residual", False)
    model = {
        **head.geometry(prefix, draft_vocab),
        "has_qk_norm": has_qk_norm,
        "norm_before_residual": is_norm_first,
    }
    inner = (*LAYER_TENSORS, "hidden_norm.weight", *(QK_NORMS if has_qk_norm else ()))
    outer = (*OUTER_TENSORS, *filter(head.has, (EMBEDDING, TOKEN_MAP)))
    _warn_of_unusual_layers(checkpoint.folder, head.layers, target.num_layers)
    _warn_of_window(checkpoint.folder, layer, options)
    return head.model(
        "EAGLE-3",
        f"drafts {draft_vocab} of {vocab} tokens",
        model,
        {prefix + name: INNER_LAYER + name for name in inner} | {name: name for name in outer},
        [
            f"norms: {'' if has_qk_norm else 'no '}q/k norm, residual "
            f"{'after' if is_norm_first else 'before'} hidden_norm"
        ],
    )


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
    if types == ["sliding_attention"] and isinstance(window, int) and not options[DRAFT_WINDOW]:
        logger.warning(
            "%s: was trained with a window of %d tokens; --draft-window %d gives it one",
            folder,
            window,
            window,
        )


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


def _num_nodes(depth: int, options: Options) -> int:
    top_k = int(options[DRAFT_TOP_K])
    num_candidates = top_k + (depth - 1) * top_k**2
    # With the last known token a power of two of rows, as far as depth is worth it.
    return min(int(options[DRAFT_TREE_SIZE]) or min(4 * depth, 16) - 1, num_candidates)


SPEC = DrafterSpec(
    name="eagle3",
    summary="a head of one layer reads the target's hidden states and drafts chains or trees",
    default_num_speculative_tokens=3,
    max_num_speculative_tokens=15,
    options=head_options(
        max_top_k=10,
        top_k_help="Above 1 a tree is drafted: the best so many drafts of a level get so many "
        "children each.",
        max_tree_size=128,
        tree_size_help="4 K - 1, at most 15",
    ),
    supports_rejection=True,
    check=check_head_options,
    num_tree_drafts=_num_nodes,
    read_draft_model=_read_draft_model,
    plan_checkup=_plan_checkup,
)
