"""Published formats of block heads: which one a config.json is, and how its blocks draft.

Heads differ in keys, in the numbering of layers and in which rows of a block draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from openspec.checkpoint.config import ModelConfig
from openspec.checkpoint.draft_head import (
    Dialect,
    LayerIds,
    agreed_layer_ids,
    layer_ids_at,
    speculators_layer,
)
from openspec.checkpoint.draft_model import DraftCheckpoint
from openspec.checkpoint.strict_json import JsonKeys
from openspec.drafters.spec import Options
from openspec.errors import ConfigError

AUTO = "auto"
FIRST, DROP = "first", "drop"
CAUSAL, FULL = "causal", "full"
DRAFT_ANCHOR, DRAFT_ATTENTION = "draft_anchor", "draft_attention"
MAX_BLOCK = 64
SPECULATORS_BLOCK = 8  # that format's default
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
class BlockDialect(Dialect):
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


def read_dialect(keys: JsonKeys, options: Options) -> BlockDialect:
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
    return BlockDialect(
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


def named_layer_ids(
    dialect: BlockDialect, checkpoint: DraftCheckpoint, target: ModelConfig
) -> LayerIds:
    """The layers that the head reads, in its format's numbering."""
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
