"""DFlash and its family: a block of drafts in one pass over the target's hidden states.

Published heads differ in keys, in the numbering of layers and in which rows of a block draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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
    DraftHead,
    LayerIds,
    agreed_layer_ids,
    layer_ids_at,
    layers_of_user,
    speculators_layer,
)
from openspec.checkpoint.draft_model import DraftCheckpoint, open_draft_checkpoint, read_draft_keys
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.weights import DraftModel
from openspec.drafters.spec import (
    DRAFT_TOP_K,
    DRAFT_TREE_SIZE,
    HEAD_CAUSES,
    Checkup,
    DrafterOption,
    DrafterSpec,
    DraftSetup,
    Options,
    OptionValue,
    Variant,
    check_head_options,
    head_options,
    layer_variants,
)
from openspec.errors import ConfigError

AUTO = "auto"
FIRST, DROP = "first", "drop"
CAUSAL, FULL = "causal", "full"
DRAFT_ANCHOR, DRAFT_ATTENTION = "draft_anchor", "draft_attention"
MAX_BLOCK = 64
MAX_TREE_SIZE = 256
SPECULATORS_BLOCK = 8  # that format's default
MAX_MARKOV_RANK = 256
OUTER_TENSORS = ("fc.weight", "hidden_norm.weight", "norm.weight")
MARKOV_TENSORS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE_TENSORS = ("confidence_head.proj.weight", "confidence_head.proj.bias")
NO_WINDOW = "a sliding window is not supported; give a head without one"
NO_VOCABULARY = "a Markov head with a vocabulary of its own is not supported; give another head"
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
    """And how a block drafts, by the checkpoint and the options."""

    block: JsonKeys
    """Where the rest about the block stands."""
    block_size: int
    """Its rows, as trained."""
    anchor_drafts: bool
    """Whether the row of the last known token drafts, too ("anchor-first")."""
    is_causal: bool
    markov_rank: int

    @property
    def num_drafts(self) -> int:
        """Drafts of a block as the head was trained."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    def shown_block(self) -> str:
        """For messages."""
        layout = f"anchor-{FIRST if self.anchor_drafts else DROP}"
        return f"blocks of {self.block_size} rows, {layout}, {self.num_drafts} drafts"


def _read_dialect(keys: JsonKeys, options: Options) -> _Dialect:
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
    kind, inner = keys.get("speculators_model_type"), keys.object("dflash_config")
    if kind not in (None, "dflash", "dspark"):
        remedy = "other methods' heads, such as DFlash2's, are not supported"
        keys.refuse("speculators_model_type", '"dflash" or "dspark"', remedy)
    if kind is None and inner is None and keys.get("target_layer_ids") is None:
        raise ConfigError(
            f"{keys.source}: expected a DFlash draft model: dflash_config (z-lab, SpecForge, "
            "JetSpec), target_layer_ids with num_anchors (DeepSpec) or speculators_model_type "
            f'"dflash" or "dspark"; found architectures {keys.get("architectures")!r}; give the '
            "folder of such a draft model, not of a target or of another method's"
        )
    own = inner or JsonKeys({}, f"{keys.source}: dflash_config")
    if kind is not None:
        layer, block, default_size = speculators_layer(keys), keys, SPECULATORS_BLOCK
        layer_ids = layer_ids_at(keys, "aux_hidden_state_layer_ids", "entering")
    else:
        layer, block, default_size = keys, _BlockKeys(keys, own), None
        _check_window(own, is_used=True)
        layer_ids = agreed_layer_ids(
            layer_ids_at(own, "target_layer_ids", "output"),
            layer_ids_at(keys, "target_layer_ids", "output"),
        )
    _check_computation(block, layer)
    markov_rank = block.integer("markov_rank", 0, 1 << 16, 0)
    has_anchors = block.get("num_anchors") is not None or markov_rank > 0
    anchor_drafts = block.boolean(
        "sample_from_anchor",
        block.boolean("shift_label", has_anchors if kind is None else kind == "dspark"),
    )
    is_causal = block.boolean(
        "causal_head", block.boolean("is_causal", block.boolean("causal", False))
    )
    name = "DeepSpec" if inner is None else "JetSpec" if is_causal else "z-lab"
    anchor, attention = options[DRAFT_ANCHOR], options[DRAFT_ATTENTION]
    return _Dialect(
        name=name if kind is None else "speculators",
        keys=keys,
        layer=layer,
        layer_ids=layer_ids,
        block=block,
        block_size=block.integer("block_size", 2, MAX_BLOCK, default_size),
        anchor_drafts=anchor_drafts if anchor == AUTO else anchor == FIRST,
        is_causal=is_causal if attention == AUTO else attention == CAUSAL,
        markov_rank=markov_rank,
    )


def _check_computation(block: JsonKeys, layer: JsonKeys) -> None:
    """Refuses what would make the computation of a block, or of its layers, another one."""
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
    types = layer.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        layer.refuse("layer_types", '"full_attention" for every layer', NO_WINDOW)
    for keys in (block, layer):
        _check_window(keys, is_used=False)


def _check_window(keys: JsonKeys, is_used: bool) -> None:
    """Refuses a sliding window; `is_used`: whether one counts where use_sliding_window is absent.

    As in Qwen3's config.json it does not at top level, where a size may stand all the same.
    """
    is_given = keys.get("sliding_window") not in (None, False, 0)
    if is_given and keys.boolean("use_sliding_window", is_used):
        keys.refuse("sliding_window", "null", NO_WINDOW)


def _layer_ids(dialect: _Dialect, checkpoint: DraftCheckpoint, target: ModelConfig) -> LayerIds:
    num_layers = target.num_layers
    if dialect.layer_ids is None:
        count = dialect.layer.integer("num_hidden_layers", 1, MAX_BLOCK)
        ids: tuple[int, ...] = (num_layers // 2,)
        if count > 1:
            ids = tuple(round(1 + (num_layers - 4) / (count - 1) * i) for i in range(count))
        return LayerIds(ids, "output", f"the default for {num_layers} layers")
    ids = dialect.layer_ids.ids
    shape = checkpoint.tensor("fc.weight").shape
    # speculators names the last state as well, which only its training reads.
    has_last = dialect.layer_ids.numbering == "entering" and ids[-1] == num_layers
    if has_last and shape[1:] == ((len(ids) - 1) * target.hidden_size,):
        return LayerIds(ids[:-1], "entering", dialect.layer_ids.origin)
    return dialect.layer_ids


def _read_draft_model(setup: DraftSetup, has_markov: bool) -> DraftModel:
    target, checkpoint = setup.target, open_draft_checkpoint(setup.draft_folder)
    dialect = _read_dialect(checkpoint.keys, setup.options)
    block, rank = dialect.block, dialect.markov_rank
    if has_markov and rank == 0:
        block.refuse("markov_rank", "above 0", "without a Markov head it is for --method dflash")
    if not has_markov and rank > 0:
        block.refuse("markov_rank", "0 or none", "with a Markov head it is for --method dspark")
    if rank % 8 or rank > MAX_MARKOV_RANK:
        expected = f"a multiple of 8, at most {MAX_MARKOV_RANK}"
        block.refuse("markov_rank", expected, "its kernels know no other; published heads have 256")

    user = layers_of_user(str(setup.options[CAPTURE_LAYERS]))
    layer_ids = user or _layer_ids(dialect, checkpoint, target)
    originals = {EMBEDDING: (TARGET_EMBEDDING,), HEAD: (HEAD, TARGET_EMBEDDING)}
    head = DraftHead(checkpoint, dialect, layer_ids, target, originals)
    if rank == 0:
        head.ignored.update(dict.fromkeys(CONFIDENCE_TENSORS, "only used beside a Markov head"))
    draft_vocab = target.vocab_size
    if head.has(HEAD):
        rows = checkpoint.tensor(HEAD).shape[0]
        draft_vocab = dialect.keys.integer("draft_vocab_size", 1, draft_vocab, rows)
    if rank > 0 and draft_vocab != target.vocab_size:
        dialect.keys.refuse("draft_vocab_size", f"the target's {target.vocab_size}", NO_VOCABULARY)
    has_confidence = head.has(CONFIDENCE_TENSORS[0])
    num_layers = dialect.layer.integer("num_hidden_layers", 1, MAX_BLOCK)
    model = {
        **head.geometry("layers.0.", draft_vocab),
        "num_layers": num_layers,
        "block_size": dialect.block_size,
        "mask_token": block.integer("mask_token_id", 0, target.vocab_size - 1),
        "anchor_drafts": dialect.anchor_drafts,
        "is_causal": dialect.is_causal,
        "has_head": head.has(HEAD),
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_sees_token": has_confidence
        and _confidence_sees_token(checkpoint, target.hidden_size, rank),
    }
    inner = (*LAYER_TENSORS, *QK_NORMS)
    names = [f"layers.{layer}.{name}" for layer in range(num_layers) for name in inner]
    names += [*OUTER_TENSORS, *filter(head.has, (EMBEDDING, HEAD, TOKEN_MAP))]
    names += [*(MARKOV_TENSORS if rank else ()), *(CONFIDENCE_TENSORS if has_confidence else ())]
    attention = "causal" if dialect.is_causal else "every row sees all"
    shown = f"{num_layers} layers, {dialect.shown_block()}"
    details = [f"block: {shown}, {attention}, mask token {model['mask_token']}"]
    if rank > 0:
        details.append(
            f"Markov head: rank {rank}, with{'' if has_confidence else 'out'} confidences"
        )
    if setup.draft_depth > dialect.num_drafts:
        raise ConfigError(
            f"num_speculative_tokens must be at most {dialect.num_drafts}, the drafts of a block "
            f"that {setup.folder} was trained on, got {setup.draft_depth}"
        )
    return head.model(
        "DSpark" if has_markov else "DFlash",
        shown,
        model,
        {name: name for name in names},
        details,
    )


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


def _plan_checkup(setup: DraftSetup, has_markov: bool) -> Checkup:
    draft_model = _read_draft_model(setup, has_markov)
    model = draft_model.options
    anchor = DROP if model["anchor_drafts"] else FIRST
    attention = FULL if model["is_causal"] else CAUSAL
    given, block_size = setup.num_speculative_tokens, int(model["block_size"])
    tree_size, also = int(setup.options[DRAFT_TREE_SIZE]), ""
    options: dict[str, OptionValue] = {DRAFT_ANCHOR: anchor}
    if anchor == FIRST and given is None and 0 < tree_size < block_size:
        options[DRAFT_TREE_SIZE] = block_size  # the default depth, which is one more so
    if anchor == DROP and given == block_size:
        options["num_speculative_tokens"] = block_size - 1  # all that such a block has
        also = f", and --num-speculative-tokens {block_size - 1}"
    return Checkup(
        usual=(0.72,),
        source="DFlash heads for Qwen3 4B and 8B on chats; on mathematics 0.85 to 0.88",
        least_first=0.30,
        variants=(
            *layer_variants(draft_model, setup.target),
            Variant(
                label=f"anchor-{anchor} blocks",
                options=options,
                advice="the head was trained with the other rows drafting: use --draft-anchor "
                f"{anchor} or mend config.json (num_anchors, sample_from_anchor){also}",
            ),
            Variant(
                label=f"{attention} attention within blocks",
                options={DRAFT_ATTENTION: attention},
                advice=f"the head was trained so: use --draft-attention {attention} or mend "
                "config.json (causal_head)",
            ),
        ),
        causes=(
            *HEAD_CAUSES,
            "the context was trained with the layers' input norm; here only block rows pass it",
            "mask_token_id is not the token that the head was trained with",
            "thinking mode: heads trained without it accept half as much with it",
            "another chat template than in training; texts far from its data",
        ),
    )


def _num_nodes(depth: int, options: Options) -> int:
    num_nodes, level = 0, 1
    for _ in range(depth):
        level = min(level * int(options[DRAFT_TOP_K]), MAX_TREE_SIZE)
        num_nodes += level
    wanted = int(options[DRAFT_TREE_SIZE]) or max(depth, 15)
    return min(wanted, num_nodes, MAX_TREE_SIZE)


_OPTIONS = (
    *head_options(
        max_top_k=64,
        top_k_help="Above 1 a tree is drafted from the best so many tokens of every position.",
        max_tree_size=MAX_TREE_SIZE,
        tree_size_help="K, at least 15",
    ),
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
)


def _num_drafts_of(folder: Path, options: Options) -> int:
    return _read_dialect(read_draft_keys(folder), options).num_drafts


def make_spec(name: str, summary: str, num_drafts: int, has_markov: bool) -> DrafterSpec:
    """A method of the family; `num_drafts` where no checkpoint says it."""
    return DrafterSpec(
        name=name,
        summary=summary,
        default_num_speculative_tokens=num_drafts,
        max_num_speculative_tokens=MAX_BLOCK,
        options=_OPTIONS,
        num_drafts_of=_num_drafts_of,
        supports_rejection=True,
        check=check_head_options,
        num_tree_drafts=_num_nodes,
        read_draft_model=lambda setup: _read_draft_model(setup, has_markov),
        plan_checkup=lambda setup: _plan_checkup(setup, has_markov),
    )


SPEC = make_spec(
    "dflash",
    "a head of several layers reads the target's hidden states and drafts a block at once",
    num_drafts=15,
    has_markov=False,
)
