"""DFlash and its family: a block of drafts in one pass over the target's hidden states.

Published heads come in several formats ("dialects") that differ in keys, in how they number the
target's layers, and in which rows of a block draft. All of that ends here: the engine gets one
geometry, one set of tensor names, one numbering and one layout.
"""

from __future__ import annotations

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
    captured_layers,
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

AUTO = "auto"
FIRST, DROP = "first", "drop"
CAUSAL, FULL = "causal", "full"
DRAFT_ANCHOR = "draft_anchor"
DRAFT_ATTENTION = "draft_attention"
DRAFT_TREE_SIZE = "draft_tree_size"

MAX_BLOCK = 64
MAX_TREE_SIZE = 256
LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
OUTER_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight")
MARKOV_TENSORS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")
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


@dataclass(frozen=True, slots=True)
class _Dialect:
    """What a checkpoint's config.json says, whatever the format."""

    name: str
    keys: JsonKeys
    """Top level."""
    layer: JsonKeys
    """Where the layers' geometry stands."""
    block: JsonKeys
    """Where the block's shape stands."""
    layer_ids: LayerIds | None
    anchor_drafts: bool
    """Whether the row of the last known token drafts, too ("anchor-first")."""
    is_causal: bool
    markov_rank: int

    def num_drafts(self, options: Options) -> int:
        """Of a block as trained."""
        rows = self.block.integer("block_size", 2, MAX_BLOCK)
        return rows if _anchor_drafts(self, options) else rows - 1


def _anchor_drafts(dialect: _Dialect, options: Options) -> bool:
    wanted = options[DRAFT_ANCHOR]
    return dialect.anchor_drafts if wanted == AUTO else wanted == FIRST


def _is_causal(dialect: _Dialect, options: Options) -> bool:
    wanted = options[DRAFT_ATTENTION]
    return dialect.is_causal if wanted == AUTO else wanted == CAUSAL


def _read_dialect(keys: JsonKeys) -> _Dialect:
    """Recognises the format by its keys.

    | format | told by | layer ids | does the last known token's row draft? |
    |---|---|---|---|
    | speculators | speculators_model_type | entering | sample_from_anchor; else DSpark's does |
    | DeepSpec | target_layer_ids at top level | outputs | with num_anchors, which it always has |
    | z-lab, SpecForge | dflash_config | outputs | with num_anchors or a Markov head |
    | JetSpec | dflash_config: causal_head | outputs | no; block rows are causal |

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
    # A key may stand at either place; the inner one counts.
    block = keys
    if inner is not None:
        block = JsonKeys({**keys.values, **inner.values}, f"{keys.source}: dflash_config")
    _check_block(block)
    ids = block.integers("target_layer_ids")
    markov_rank = block.integer("markov_rank", 0, 1 << 16, 0)
    has_anchors = block.get("num_anchors") is not None or markov_rank > 0
    is_causal = block.boolean("causal_head", block.boolean("is_causal", False))
    name = "DeepSpec" if inner is None else "JetSpec" if is_causal else "z-lab"
    return _Dialect(
        name=name,
        keys=keys,
        layer=keys,
        block=block,
        layer_ids=None
        if ids is None
        else LayerIds(ids, "output", f"{block.source}: target_layer_ids"),
        anchor_drafts=block.boolean(
            "sample_from_anchor", block.boolean("shift_label", has_anchors)
        ),
        is_causal=is_causal,
        markov_rank=markov_rank,
    )


def _speculators(keys: JsonKeys) -> _Dialect:
    kind = keys.get("speculators_model_type")
    if kind not in ("dflash", "dspark"):
        keys.refuse(
            "speculators_model_type",
            '"dflash" or "dspark"',
            "other methods' heads, such as DFlash2's, are not supported",
        )
    _check_block(keys)
    layer = keys.object("transformer_layer_config")
    if layer is None:
        keys.refuse("transformer_layer_config", "an object with the layers' geometry")
    ids = keys.integers("aux_hidden_state_layer_ids")
    return _Dialect(
        name="speculators",
        keys=keys,
        layer=layer,
        block=keys,
        layer_ids=None
        if ids is None
        else LayerIds(ids, "entering", f"{keys.source}: aux_hidden_state_layer_ids"),
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


def _check_layers(layer: JsonKeys) -> None:
    check_computation(layer)
    types = layer.get("layer_types")
    if types is not None and not (
        isinstance(types, list) and all(kind == "full_attention" for kind in types)
    ):
        layer.refuse(
            "layer_types",
            '"full_attention" for every layer',
            "a sliding window is not supported; give a head without one",
        )


def _layer_ids(
    dialect: _Dialect, checkpoint: DraftCheckpoint, target: ModelConfig, user: LayerIds | None
) -> LayerIds:
    if user is not None:
        return user
    if dialect.layer_ids is None:
        count = dialect.layer.integer("num_hidden_layers", 1, MAX_BLOCK)
        ids: tuple[int, ...] = (target.num_layers // 2,)
        if count > 1:
            step = (target.num_layers - 4) / (count - 1)
            ids = tuple(round(1 + step * i) for i in range(count))
        return LayerIds(ids, "output", f"default for {target.num_layers} layers")
    ids = dialect.layer_ids.ids
    shape = checkpoint.tensor("fc.weight").shape
    # speculators names the last state as well, which only its training reads.
    has_last = dialect.layer_ids.numbering == "entering" and ids[-1] == target.num_layers
    if has_last and shape[1:] == ((len(ids) - 1) * target.hidden_size,):
        return LayerIds(ids[:-1], "entering", dialect.layer_ids.origin)
    return dialect.layer_ids


def _describe(
    checkpoint: DraftCheckpoint, options: Options, target: ModelConfig, has_markov: bool
) -> DraftModel:
    dialect = _read_dialect(checkpoint.keys)
    keys, layer, block = dialect.keys, dialect.layer, dialect.block
    _check_layers(layer)
    check_target(keys, layer, target)
    if has_markov and dialect.markov_rank == 0:
        block.refuse("markov_rank", "above 0", "without a Markov head it is for --method dflash")
    if not has_markov and dialect.markov_rank > 0:
        block.refuse("markov_rank", "0 or none", "with a Markov head it is for --method dspark")

    layer_ids = _layer_ids(
        dialect, checkpoint, target, layers_of_user(str(options[CAPTURE_LAYERS]))
    )
    layers = captured_layers(layer_ids, target.num_layers)
    check_captures(checkpoint.tensor("fc.weight"), target.hidden_size, layers, layer_ids.origin)

    num_layers = layer.integer("num_hidden_layers", 1, MAX_BLOCK)
    num_q_heads = layer.integer("num_attention_heads", 1, 4096)
    num_kv_heads = layer.integer("num_key_value_heads", 1, 4096, num_q_heads)
    if num_q_heads % num_kv_heads:
        layer.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
    q_shape = checkpoint.tensor("layers.0.self_attn.q_proj.weight").shape
    q_rows = q_shape[0] if q_shape else 0

    ignored = _ignored_tensors(checkpoint, target.folder, dialect)
    has_head = HEAD in checkpoint.tensors and HEAD not in ignored
    head_rows = checkpoint.tensor(HEAD).shape[0] if has_head else target.vocab_size
    draft_vocab = head_rows
    if has_head:
        draft_vocab = keys.integer("draft_vocab_size", 1, target.vocab_size, head_rows)
    check_token_map(checkpoint, draft_vocab, target.vocab_size)
    has_confidence = dialect.markov_rank > 0 and CONFIDENCE_TENSORS[0] in checkpoint.tensors
    model_options: dict[str, OptionValue] = {
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        # Not hidden_size / heads, which is another number for 4B.
        "head_dim": layer.integer("head_dim", 1, 4096, max(q_rows // num_q_heads, 1)),
        "intermediate_size": layer.integer("intermediate_size", 1, 1 << 20),
        "draft_vocab_size": draft_vocab,
        "rope_theta": rope_theta(layer),
        "rms_norm_eps": layer.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        "block_size": block.integer("block_size", 2, MAX_BLOCK),
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
        details=_details(checkpoint, dialect, options, model_options, layers, layer_ids, target),
    )


def _shown_block(dialect: _Dialect, options: Options) -> str:
    rows = dialect.block.integer("block_size", 2, MAX_BLOCK)
    layout = "anchor-first" if _anchor_drafts(dialect, options) else "anchor-drop"
    return f"blocks of {rows} rows, {layout}, {dialect.num_drafts(options)} drafts"


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
        f"layers.{i}.{name}" for i in range(int(options["num_layers"])) for name in LAYER_TENSORS
    ]
    names += OUTER_TENSORS
    names += [EMBEDDING] * bool(options["has_embedding"]) + [HEAD] * bool(options["has_head"])
    names += [TOKEN_MAP] * bool(options["has_token_map"])
    names += MARKOV_TENSORS if options["markov_rank"] else ()
    names += CONFIDENCE_TENSORS if options["has_confidence"] else ()
    return names


def _ignored_tensors(
    checkpoint: DraftCheckpoint, target_folder: Path, dialect: _Dialect
) -> dict[str, str]:
    ignored = {TOKEN_MASK: f"it follows from {TOKEN_MAP}"}
    for name in checkpoint.tensors:
        if name.startswith("verifier_"):
            ignored[name] = "only training needs it"
        elif name.endswith("rotary_emb.inv_freq"):
            ignored[name] = "it follows from rope_theta"
        elif name in CONFIDENCE_TENSORS and dialect.markov_rank == 0:
            ignored[name] = "confidences are only used beside a Markov head"
    return ignored | copies_of_target(
        checkpoint,
        {EMBEDDING: (TARGET_EMBEDDING,), HEAD: (HEAD, TARGET_EMBEDDING)},
        target_folder,
    )


def _details(
    checkpoint: DraftCheckpoint,
    dialect: _Dialect,
    options: Options,
    model: Options,
    layers: tuple[int, ...],
    layer_ids: LayerIds,
    target: ModelConfig,
) -> tuple[str, ...]:
    fc = checkpoint.tensor("fc.weight")
    lines = [
        f"format: {dialect.name}",
        f"layers: outputs of {listed(layers)} = entering {entering(layers)} (from "
        f"{layer_ids.origin})",
        f"fc: {list(fc.shape)}, {len(layers)} states of {target.hidden_size}",
        f"block: {_shown_block(dialect, options)}, "
        f"{'causal' if model['is_causal'] else 'every row sees all'}, mask token "
        f"{model['mask_token']}",
        f"attention: {model['num_layers']} layers, {model['num_q_heads']} query heads, "
        f"{model['num_kv_heads']} KV heads of {model['head_dim']}, RoPE base "
        f"{model['rope_theta']:g}",
        f"embedding: {_whose(model['has_embedding'])}; head: {_whose(model['has_head'])}, "
        f"{model['draft_vocab_size']} of {target.vocab_size} tokens",
    ]
    if dialect.markov_rank > 0:
        confidence = "with" if model["has_confidence"] else "without"
        lines.append(f"Markov head: rank {dialect.markov_rank}, {confidence} confidences")
    lines.append(check_same_tokenizer(checkpoint.folder, target.folder))
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


def _whose(is_own: OptionValue) -> str:
    return "own" if is_own else "the target's"


def _num_drafts_of(folder: Path, options: Options) -> int:
    with opened_draft_checkpoint(folder) as checkpoint:
        return _read_dialect(checkpoint.keys).num_drafts(options)


def _read_draft_model(
    config: EngineConfig, target: ModelConfig, spec: DrafterSpec, has_markov: bool
) -> DraftModel:
    """The head in `config.draft_model_path`, checked against the target."""
    folder = config.draft_model_path
    assert folder is not None  # DrafterSpec.validate has seen to it
    options = spec.complete_options(config.method_options)
    with opened_draft_checkpoint(folder) as checkpoint:
        model = _describe(checkpoint, options, target, has_markov)
        most = _read_dialect(checkpoint.keys).num_drafts(options)
    if config.num_drafts > most:
        raise ConfigError(
            f"num_speculative_tokens must be at most {most}, the drafts of a block that {folder} "
            f"was trained on, got {config.num_drafts}"
        )
    return model


def _plan_checkup(
    config: EngineConfig, target: ModelConfig, spec: DrafterSpec, has_markov: bool
) -> Checkup:
    model = _read_draft_model(config, target, spec, has_markov).options
    layers = tuple(int(part) for part in str(model[CAPTURE_LAYERS]).split(","))
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
    anchor = DROP if model["anchor_drafts"] else FIRST
    given = config.num_speculative_tokens
    if anchor == FIRST or given is None or given < int(model["block_size"]):
        variants.append(
            Variant(
                label=f"anchor-{anchor} blocks",
                options={DRAFT_ANCHOR: anchor},
                advice=f"the head was trained with the other rows drafting: use --draft-anchor "
                f"{anchor} or mend config.json (num_anchors, sample_from_anchor)",
            )
        )
    attention = FULL if model["is_causal"] else CAUSAL
    variants.append(
        Variant(
            label=f"{attention} attention within blocks",
            options={DRAFT_ATTENTION: attention},
            advice=f"the head was trained so: use --draft-attention {attention} or mend "
            "config.json (causal_head)",
        )
    )
    return Checkup(
        usual=(0.72,),
        source="DFlash heads for Qwen3 4B and 8B on chats; on mathematics 0.85 to 0.88",
        least_first=0.30,
        variants=tuple(variants),
        causes=(
            "the head was trained for another target of the same size (base against instruct, "
            "2504 against 2507), or for its quantised form",
            "the head expects other layers; its card or training configuration names them "
            "(--capture-layers takes outputs, counted from 0)",
            "the head was trained on normed states; it has to read the residual stream as it is",
            "the context was trained with the layers' input norm; here only block rows pass it",
            "mask_token_id is not the token that the head was trained with",
            "thinking mode: heads trained without it accept half as much with it",
            "another chat template than in training; texts far from its data",
        ),
    )


def _num_draft_rows(depth: int, options: Options) -> int:
    """Drafts of a step: K, or the nodes of a tree of depth K."""
    top_k, wanted = int(options[DRAFT_TOP_K]), int(options[DRAFT_TREE_SIZE])
    if top_k == 1 or depth == 0:
        return depth
    num_nodes, level = 0, 1
    for _ in range(depth):
        level = min(level * top_k, MAX_TREE_SIZE)
        num_nodes += level
    return min(wanted or max(depth, 15), num_nodes, MAX_TREE_SIZE)


def _check_tree(config: EngineConfig, spec: DrafterSpec) -> None:
    options = spec.complete_options(config.method_options)
    if options[DRAFT_TOP_K] == 1 and options[DRAFT_TREE_SIZE] != 0:
        raise ConfigError("--draft-tree-size is for trees: set --draft-top-k above 1 (such as 8)")
    if options[DRAFT_TOP_K] != 1 and 0 < config.num_drafts > config.num_draft_rows:
        raise ConfigError(
            f"--draft-tree-size {options[DRAFT_TREE_SIZE]} is less than the tree's depth; raise it "
            f"or lower --num-speculative-tokens ({config.num_drafts})"
        )


_OPTIONS = (
    CAPTURE_LAYERS_OPTION,
    DRAFT_NOISE_OPTION,
    DRAFT_WINDOW_OPTION,
    DrafterOption(
        name=DRAFT_ANCHOR,
        default=AUTO,
        choices=(AUTO, FIRST, DROP),
        help="Whether the row of the last known token drafts as well (first) or not (drop). auto: "
        "what the head's config.json says.",
    ),
    DrafterOption(
        name=DRAFT_ATTENTION,
        default=AUTO,
        choices=(AUTO, FULL, CAUSAL),
        help="Whether the rows of a block see those behind them (full) or not (causal). auto: "
        "what the head's config.json says.",
    ),
    DrafterOption(
        name=DRAFT_TOP_K,
        default=1,
        minimum=1,
        maximum=64,
        help="Above 1 a tree is drafted from the best so many tokens of every position.",
    ),
    DrafterOption(
        name=DRAFT_TREE_SIZE,
        default=0,
        minimum=0,
        maximum=MAX_TREE_SIZE,
        help="Drafts of a tree, the most likely ones. Default: K, at least 15.",
    ),
)


def make_spec(name: str, summary: str, num_drafts: int, has_markov: bool) -> DrafterSpec:
    """A method of the family; `num_drafts` where no checkpoint says it."""

    def read(config: EngineConfig, target: ModelConfig) -> DraftModel:
        return _read_draft_model(config, target, spec, has_markov)

    def plan(config: EngineConfig, target: ModelConfig) -> Checkup:
        return _plan_checkup(config, target, spec, has_markov)

    def check(config: EngineConfig, _: ModelConfig) -> None:
        check_rejection(config, spec.complete_options(config.method_options))
        _check_tree(config, spec)

    spec = DrafterSpec(
        name=name,
        summary=summary,
        default_num_speculative_tokens=num_drafts,
        max_num_speculative_tokens=MAX_BLOCK,
        options=_OPTIONS,
        num_drafts_of=_num_drafts_of,
        supports_rejection=True,
        check=check,
        num_draft_rows=_num_draft_rows,
        read_draft_model=read,
        plan_checkup=plan,
    )
    return spec


SPEC = make_spec(
    "dflash",
    "a head of several layers reads the target's hidden states and drafts a block at once",
    num_drafts=15,
    has_markov=False,
)
