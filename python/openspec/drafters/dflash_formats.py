"""DFlash heads: every published format, and what it says of the block.

Besides keys and numbering the formats differ in which rows of a block draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from openspec.checkpoint.config import ModelConfig
from openspec.checkpoint.draft_head import (
    CAPTURE_LAYERS,
    EMBEDDING,
    HEAD,
    LAYER_TENSORS,
    QK_NORMS,
    TARGET_EMBEDDING,
    TOKEN_MAP,
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
from openspec.checkpoint.draft_model import DraftCheckpoint
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.spec import (
    Options,
    OptionValue,
)
from openspec.errors import ConfigError

AUTO = "auto"
FIRST, DROP = "first", "drop"
CAUSAL, FULL = "causal", "full"
DRAFT_ANCHOR = "draft_anchor"
DRAFT_ATTENTION = "draft_attention"

MAX_BLOCK = 64
SPECULATORS_BLOCK = 8  # that format's default
MAX_MARKOV_RANK = 256
OUTER_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight")
MARKOV_TENSORS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")
NO_WINDOW = "a sliding window is not supported; give a head without one"
UNSUPPORTED = {
    "conv_kernel_size": "DFlash2's convolution",
    "conv_group_size": "DFlash2's convolution",
    "selector_rank": "DFlash2's selector of candidates",
    "selector_top_k": "DFlash2's selector of candidates",
    "dspark_backbone_conv_enabled": "the convolution of the backbone",
    "draft_adapter_rank": "the adapter before the head",
    "draft_shift": "a shifted block",
    "use_swa": "a sliding window",
}
"""Keys that make the head compute something else -> what."""


class _BlockKeys(JsonKeys):
    """Keys that stand in dflash_config or at top level; the inner one counts."""

    def __init__(self, outer: JsonKeys, inner: JsonKeys) -> None:
        given = {name: value for name, value in inner.values.items() if value is not None}
        super().__init__({**outer.values, **given}, outer.source)
        self._outer = outer
        self._inner = inner

    def refuse(self, name: str, expected: str, remedy: str = "") -> NoReturn:
        """Names the object that the key stands in."""
        place = self._outer if self._inner.get(name) is None else self._inner
        place.refuse(name, expected, remedy)


@dataclass(frozen=True, slots=True)
class _Dialect(Dialect):
    """And where it says how a block drafts."""

    block: JsonKeys
    """Where the rest about the block stands."""
    block_size: int
    """Its rows, as trained."""
    anchor_drafts: bool
    """Whether the row of the last known token drafts, too ("anchor-first")."""
    is_causal: bool
    markov_rank: int


def _anchor_drafts(dialect: _Dialect, options: Options) -> bool:
    wanted = options[DRAFT_ANCHOR]
    return dialect.anchor_drafts if wanted == AUTO else wanted == FIRST


def num_drafts_of(dialect: _Dialect, options: Options) -> int:
    """Drafts of a block as the head was trained."""
    rows = dialect.block_size
    return rows if _anchor_drafts(dialect, options) else rows - 1


def _is_causal(dialect: _Dialect, options: Options) -> bool:
    wanted = options[DRAFT_ATTENTION]
    return dialect.is_causal if wanted == AUTO else wanted == CAUSAL


def read_dialect(keys: JsonKeys) -> _Dialect:
    """Recognises the format by its keys.

    | format | told by | layer ids | does the last known token's row draft? |
    |---|---|---|---|
    | speculators | speculators_model_type | entering | sample_from_anchor; else DSpark's does |
    | DeepSpec | target_layer_ids at top level | outputs | with num_anchors, which it always has |
    | z-lab, SpecForge | dflash_config | outputs | with num_anchors or a Markov head |
    | JetSpec | dflash_config: causal_head | outputs | no; block rows are causal |

    vLLM and SGLang read `causal` in dflash_config, z-lab `is_causal`.

    Raises:
        ConfigError: none of those known, or a variant whose computation is another one.
    """
    if keys.get("speculators_model_type") is not None:
        return _speculators(keys)
    inner = keys.object("dflash_config")
    if inner is None and keys.get("target_layer_ids") is None:
        raise ConfigError(
            f"{keys.source}: expected a DFlash draft model: dflash_config (z-lab, SpecForge, "
            "JetSpec), target_layer_ids with num_anchors (DeepSpec) or speculators_model_type "
            f'"dflash" or "dspark"; found architectures {keys.get("architectures")!r}; give the '
            "folder of such a draft model, not of a target or of another method's"
        )
    own = inner or JsonKeys({}, f"{keys.source}: dflash_config")
    block = _BlockKeys(keys, own)
    _check_block(block)
    _check_window(own, is_used=True)
    markov_rank = block.integer("markov_rank", 0, 1 << 16, 0)
    has_anchors = block.get("num_anchors") is not None or markov_rank > 0
    is_causal = block.boolean(
        "causal_head", block.boolean("is_causal", block.boolean("causal", False))
    )
    name = "DeepSpec" if inner is None else "JetSpec" if is_causal else "z-lab"
    return _Dialect(
        name=name,
        keys=keys,
        layer=keys,
        layer_ids=_target_layer_ids(keys, own),
        block=block,
        block_size=block.integer("block_size", 2, MAX_BLOCK),
        anchor_drafts=block.boolean(
            "sample_from_anchor", block.boolean("shift_label", has_anchors)
        ),
        is_causal=is_causal,
        markov_rank=markov_rank,
    )


def _target_layer_ids(keys: JsonKeys, own: JsonKeys) -> LayerIds | None:
    inner = layer_ids_at(own, "target_layer_ids", "output")
    outer = layer_ids_at(keys, "target_layer_ids", "output")
    if inner and outer and inner.ids != outer.ids:
        raise ConfigError(
            f"{inner.origin} says {list(inner.ids)}, {outer.origin} {list(outer.ids)}, which are "
            "different layers; keep the one that is right"
        )
    return inner or outer


def _speculators(keys: JsonKeys) -> _Dialect:
    kind = keys.get("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        keys.refuse(
            "speculators_model_type",
            '"dflash" or "dspark"',
            "other methods' heads, such as DFlash2's, are not supported",
        )
    _check_block(keys)
    return _Dialect(
        name="speculators",
        keys=keys,
        layer=speculators_layer(keys),
        layer_ids=layer_ids_at(keys, "aux_hidden_state_layer_ids", "entering"),
        block=keys,
        block_size=keys.integer("block_size", 2, MAX_BLOCK, SPECULATORS_BLOCK),
        anchor_drafts=keys.boolean(
            "sample_from_anchor", keys.boolean("shift_label", kind == "dspark")
        ),
        is_causal=keys.boolean("is_causal", False),
        markov_rank=keys.integer("markov_rank", 0, 1 << 16, 0),
    )


def _check_block(block: JsonKeys) -> None:
    """Refuses what would make the block's computation another one."""
    for name, what in UNSUPPORTED.items():
        if block.get(name) not in (None, False, 0):
            block.refuse(name, "no such key", f"{what} is not supported; give a head without it")
    if block.get("projector_type") not in (None, "dflash", "dspark"):
        block.refuse("projector_type", '"dflash" or "dspark"', "other heads are not supported")
    if block.get("markov_head_type") not in (None, "vanilla"):
        block.refuse(
            "markov_head_type", '"vanilla"', "gated and recurrent Markov heads are not supported"
        )
    if block.number("input_embedding_scale", 0.0, 1e9, 1.0) != 1.0:
        block.refuse("input_embedding_scale", "1", "scaled embeddings are not supported")
    _check_window(block, is_used=False)


def _check_window(keys: JsonKeys, is_used: bool) -> None:
    """Refuses a sliding window; `is_used`: whether one counts where use_sliding_window is absent.

    As in Qwen3's config.json it does not at top level, where a size may stand all the same.
    """
    is_given = keys.get("sliding_window") not in (None, False, 0)
    if is_given and keys.boolean("use_sliding_window", is_used):
        keys.refuse("sliding_window", "null", NO_WINDOW)


def _check_layers(layer: JsonKeys) -> None:
    check_computation(layer)
    types = layer.get("layer_types")
    if types is not None and not (
        isinstance(types, list) and all(kind == "full_attention" for kind in types)
    ):
        layer.refuse("layer_types", '"full_attention" for every layer', NO_WINDOW)
    _check_window(layer, is_used=False)


def _layer_ids(
    dialect: _Dialect, checkpoint: DraftCheckpoint, target: ModelConfig, options: Options
) -> LayerIds:
    user = layers_of_user(str(options[CAPTURE_LAYERS]))
    if user is not None:
        return user
    if dialect.layer_ids is None:
        count = dialect.layer.integer("num_hidden_layers", 1, MAX_BLOCK)
        ids: tuple[int, ...] = (target.num_layers // 2,)
        if count > 1:
            step = (target.num_layers - 4) / (count - 1)
            ids = tuple(round(1 + step * i) for i in range(count))
        return LayerIds(ids, "output", f"the default for {target.num_layers} layers")
    ids = dialect.layer_ids.ids
    shape = checkpoint.tensor("fc.weight").shape
    # speculators names the last state as well, which only its training reads.
    has_last = dialect.layer_ids.numbering == "entering" and ids[-1] == target.num_layers
    if has_last and shape[1:] == ((len(ids) - 1) * target.hidden_size,):
        return LayerIds(ids[:-1], "entering", dialect.layer_ids.origin)
    return dialect.layer_ids


def describe(
    checkpoint: DraftCheckpoint, options: Options, target: ModelConfig, has_markov: bool
) -> DraftModel:
    """The head, checked against the target; it has a Markov head or not.

    Raises:
        ConfigError: it cannot be run, or not with this target.
    """
    dialect = read_dialect(checkpoint.keys)
    keys, layer, block = dialect.keys, dialect.layer, dialect.block
    _check_layers(layer)
    check_target(keys, layer, target)
    if has_markov and dialect.markov_rank == 0:
        block.refuse("markov_rank", "above 0", "without a Markov head it is for --method dflash")
    if not has_markov and dialect.markov_rank > 0:
        block.refuse("markov_rank", "0 or none", "with a Markov head it is for --method dspark")
    if dialect.markov_rank % 8 or dialect.markov_rank > MAX_MARKOV_RANK:
        expected = f"a multiple of 8, at most {MAX_MARKOV_RANK}"
        block.refuse("markov_rank", expected, "its kernels know no other; published heads have 256")

    layer_ids = _layer_ids(dialect, checkpoint, target, options)
    layers = read_captures(checkpoint, layer_ids, target)
    num_layers = layer.integer("num_hidden_layers", 1, MAX_BLOCK)
    geometry = layer_geometry(checkpoint, layer, "layers.0.")

    copies = {EMBEDDING: (TARGET_EMBEDDING,), HEAD: (HEAD, TARGET_EMBEDDING)}
    ignored = ignored_tensors(checkpoint, copies, target.folder)
    if dialect.markov_rank == 0:
        unused = "confidences are only used beside a Markov head"
        ignored.update(dict.fromkeys(CONFIDENCE_TENSORS, unused))
    has_head = HEAD in checkpoint.tensors and HEAD not in ignored
    head_rows = checkpoint.tensor(HEAD).shape[0] if has_head else target.vocab_size
    draft_vocab = head_rows
    if has_head:
        draft_vocab = keys.integer("draft_vocab_size", 1, target.vocab_size, head_rows)
    check_token_map(checkpoint, draft_vocab, target.vocab_size)
    has_confidence = dialect.markov_rank > 0 and CONFIDENCE_TENSORS[0] in checkpoint.tensors
    model_options: dict[str, OptionValue] = {
        **geometry,
        "num_layers": num_layers,
        "draft_vocab_size": draft_vocab,
        "block_size": dialect.block_size,
        "mask_token": block.integer("mask_token_id", 0, target.vocab_size - 1),
        CAPTURE_LAYERS: ",".join(map(str, layers)),
        "anchor_drafts": _anchor_drafts(dialect, options),
        "is_causal": _is_causal(dialect, options),
        "has_embedding": EMBEDDING in checkpoint.tensors and EMBEDDING not in ignored,
        "has_head": has_head,
        "has_token_map": TOKEN_MAP in checkpoint.tensors,
        "markov_rank": dialect.markov_rank,
        "has_confidence": has_confidence,
        "confidence_sees_token": has_confidence
        and _confidence_sees_token(checkpoint, target.hidden_size, dialect.markov_rank),
    }
    names = _tensor_names(model_options)
    return DraftModel(
        folder=checkpoint.folder,
        description=f"{'DSpark' if has_markov else 'DFlash'} head {checkpoint.folder.name}, format "
        f"{dialect.name}, {num_parameters(checkpoint, names) / 1e6:.1f} M parameters, "
        f"{num_layers} layers, {_shown_block(dialect, options)}, reads the outputs of layers "
        f"{listed(layers)} of {target.num_layers}",
        options=model_options,
        tensor_names={name: name for name in names},
        ignored_tensors=ignored,
        details=details(
            checkpoint,
            dialect,
            layers,
            layer_ids,
            target,
            _details(dialect, options, model_options, target),
        ),
    )


def _shown_block(dialect: _Dialect, options: Options) -> str:
    layout = "anchor-first" if _anchor_drafts(dialect, options) else "anchor-drop"
    num_drafts = num_drafts_of(dialect, options)
    return f"blocks of {dialect.block_size} rows, {layout}, {num_drafts} drafts"


def _confidence_sees_token(checkpoint: DraftCheckpoint, hidden_size: int, markov_rank: int) -> bool:
    info = checkpoint.tensor(CONFIDENCE_TENSORS[0])
    for width, sees_token in ((hidden_size, False), (hidden_size + markov_rank, True)):
        if info.shape == (1, width):
            return sees_token
    raise ConfigError(
        f"{info.path}: {info.name}: expected shape [1, {hidden_size}] or "
        f"[1, {hidden_size + markov_rank}] (with markov_rank {markov_rank}), "
        f"found {list(info.shape)}; config.json and weights belong to different heads"
    )


def _tensor_names(options: Options) -> list[str]:
    names = [
        f"layers.{i}.{name}"
        for i in range(int(options["num_layers"]))
        for name in (*LAYER_TENSORS, *QK_NORMS)
    ]
    names += OUTER_TENSORS
    names += [EMBEDDING] * bool(options["has_embedding"]) + [HEAD] * bool(options["has_head"])
    names += [TOKEN_MAP] * bool(options["has_token_map"])
    names += MARKOV_TENSORS if options["markov_rank"] else ()
    names += CONFIDENCE_TENSORS if options["has_confidence"] else ()
    return names


def _details(dialect: _Dialect, options: Options, model: Options, target: ModelConfig) -> list[str]:
    lines = [
        f"block: {_shown_block(dialect, options)}, "
        f"{'causal' if model['is_causal'] else 'every row sees all'}, mask token "
        f"{model['mask_token']}",
        f"attention: {model['num_layers']} layers, {model['num_q_heads']} query heads, "
        f"{model['num_kv_heads']} KV heads of {model['head_dim']}, RoPE base "
        f"{model['rope_theta']:g}",
        f"embedding: {whose(model['has_embedding'])}; head: {whose(model['has_head'])}, "
        f"{model['draft_vocab_size']} of {target.vocab_size} tokens",
    ]
    if dialect.markov_rank > 0:
        confidence = "with" if model["has_confidence"] else "without"
        lines.append(f"Markov head: rank {dialect.markov_rank}, {confidence} confidences")
    return lines
