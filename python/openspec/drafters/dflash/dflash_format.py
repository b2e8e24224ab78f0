"""Published formats of block heads: which one a config.json is, and how its blocks draft.

Heads differ in keys, in the numbering of layers and in which rows of a block draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from openspec.checkpoint.draft_head import (
    Dialect,
    LayerIds,
    agreed_layer_ids,
    layer_ids_at,
    listed,
    speculators_layer,
)
from openspec.checkpoint.draft_model import DraftCheckpoint
from openspec.checkpoint.strict_json import JsonKeys, JsonValue
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.sliding_layers import (
    MAX_WINDOW,
    SlidingLayers,
    named_layers,
    read_sliding_layers,
)
from openspec.drafters.dflash.dflash2_format import BlockParts, read_parts
from openspec.drafters.spec import Options
from openspec.errors import ConfigError

AUTO = "auto"
FIRST, DROP = "first", "drop"
CAUSAL, FULL = "causal", "full"
DRAFT_ANCHOR, DRAFT_ATTENTION = "draft_anchor", "draft_attention"
MAX_BLOCK = 64
SPECULATORS_BLOCK = 8  # that format's default
CAUSAL_KEYS = ("causal_head", "is_causal", "causal")
SLIDING_NON_CAUSAL = "sliding_window_non_causal"
UNSUPPORTED = {
    "dspark_backbone_conv_enabled": "the convolution of the backbone",
    "draft_adapter_rank": "the adapter before the head",
    "draft_shift": "a shifted block",
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
    """A format of a head, and how its blocks draft, by the checkpoint and the options."""

    block: JsonKeys
    """Where the rest about the block stands."""
    block_size: int
    """Rows of a block, as trained."""
    anchor_drafts: bool
    """Whether the row of the last known token drafts, too ("anchor-first")."""
    sliding: SlidingLayers
    is_causal: bool
    """Whether rows of a block do not see later ones, in layers that see all the context."""
    sliding_is_causal: bool
    """Whether rows of a block do not see later ones, in layers that slide."""
    causality: str
    """Which key or rule says what is causal, for messages."""
    markov_rank: int
    parts: BlockParts

    @property
    def num_drafts(self) -> int:
        """Drafts of a block as the head was trained."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    def shown_block(self) -> str:
        """Rows and drafts of a block, in words for messages."""
        layout = f"anchor-{FIRST if self.anchor_drafts else DROP}"
        return f"blocks of {self.block_size} rows, {layout}, {self.num_drafts} drafts"

    @property
    def window_follows_rows(self) -> bool:
        """Whether a window ends with each row of a block, not with the context.

        So z-lab's own code has it, where layers are causal. speculators trains all rows with the
        window of the first, as they run here where rows see each other.
        """
        return self.name != "speculators" and bool(self.sliding.window) and self.sliding_is_causal

    @property
    def num_layers(self) -> int:
        """Layers of the head."""
        return self.layer.integer("num_hidden_layers", 1, MAX_BLOCK)

    def shown_attention(self) -> str:
        """Who sees what in a block, in words for messages."""
        words = ("all rows of a block see each other", "rows of a block do not see later ones")
        sliding = self.sliding
        if not sliding.window:
            note = f"; {sliding.dropped}" if sliding.dropped else ""
            shown = f"every layer sees all of the context, {words[self.is_causal]}"
            return f"{shown} ({self.causality}{note})"
        plural, verb = ("", "sees") if len(sliding.layers) == 1 else ("s", "see")
        who = f"layer{plural} {listed(sliding.layers)} {verb}"
        shown = f"{who} the last {sliding.window} tokens of the context, "
        shown += words[self.sliding_is_causal]
        if len(sliding.layers) < self.num_layers:
            shown += f"; the others see all of it, {words[self.is_causal]}"
        return f"{shown} ({self.causality})"


def read_dialect(keys: JsonKeys, options: Options) -> BlockDialect:
    """Recognises the format by its keys.

    | format | told by | layer ids | does the last known token's row draft? |
    |---|---|---|---|
    | speculators | speculators_model_type | entering | sample_from_anchor; else DSpark's does |
    | DeepSpec | target_layer_ids at top level | outputs | with num_anchors, which it always has |
    | z-lab, SpecForge | dflash_config | outputs | with num_anchors or a Markov head |
    | JetSpec | dflash_config: causal_head | outputs | no; block rows are causal |

    vLLM and SGLang read `causal` in dflash_config, z-lab `is_causal`. What slides, and what is
    causal where none of these keys is there: `_read_sliding`, `_read_causality`. DFlash2's heads
    stand in z-lab's and speculators' formats; their keys say what they have (`read_parts`).

    Raises:
        ConfigError: none of those known, or a variant whose computation is another one.
    """
    kind, inner = keys.get("speculators_model_type"), keys.object("dflash_config")
    if kind not in (None, "dflash", "dflash2", "dspark"):
        named = "XPress's" if kind == "xpress" else "other methods'"
        remedy = f"{named} heads are not supported here"
        keys.refuse("speculators_model_type", '"dflash", "dflash2" or "dspark"', remedy)
    if kind is None and inner is None and keys.get("target_layer_ids") is None:
        raise ConfigError(
            f"{keys.source}: expected a DFlash draft model: dflash_config (z-lab, SpecForge, "
            "JetSpec), target_layer_ids with num_anchors (DeepSpec) or speculators_model_type "
            f'"dflash", "dflash2" or "dspark"; found architectures {keys.get("architectures")!r}; '
            "give the folder of such a draft model, not of a target or of another method's"
        )
    own = inner or JsonKeys({}, f"{keys.source}: dflash_config")
    if kind is not None:
        layer, block, default_size = speculators_layer(keys), keys, SPECULATORS_BLOCK
        layer_ids = layer_ids_at(keys, "aux_hidden_state_layer_ids", "entering")
    else:
        layer, block, default_size = keys, _BlockKeys(keys, own), None
        layer_ids = agreed_layer_ids(
            layer_ids_at(own, "target_layer_ids", "output"),
            layer_ids_at(keys, "target_layer_ids", "output"),
        )
    _check_computation(block)
    markov_rank = block.integer("markov_rank", 0, 1 << 16, 0)
    has_anchors = block.get("num_anchors") is not None or markov_rank > 0
    anchor_drafts = block.boolean(
        "sample_from_anchor",
        block.boolean("shift_label", has_anchors if kind is None else kind == "dspark"),
    )
    sliding = _read_sliding(layer, own)
    causality = _read_causality(block, kind, bool(sliding.layers), str(options[DRAFT_ATTENTION]))
    has_causal_head = inner is not None and block.boolean("causal_head", False)
    name = "DeepSpec" if inner is None else "JetSpec" if has_causal_head else "z-lab"
    anchor, parts = options[DRAFT_ANCHOR], read_parts(block, kind == "dflash2")
    return BlockDialect(
        name=f"{name if kind is None else 'speculators'}{parts.shown_kind}",
        keys=keys,
        layer=layer,
        layer_ids=layer_ids,
        block=block,
        block_size=block.integer("block_size", 2, MAX_BLOCK, default_size),
        anchor_drafts=anchor_drafts if anchor == AUTO else anchor == FIRST,
        sliding=sliding,
        is_causal=causality.whole,
        sliding_is_causal=causality.sliding,
        causality=causality.origin,
        markov_rank=markov_rank,
        parts=parts,
    )


@dataclass(frozen=True, slots=True)
class _Causality:
    """Whether rows of a block do not see later ones."""

    whole: bool
    """In layers that see all of the context."""
    sliding: bool
    origin: str


def _read_causality(
    block: JsonKeys, kind: JsonValue, has_sliding: bool, attention: str
) -> _Causality:
    """What the user says, else a key about all layers, else one about those that slide.

    Where there is none, layers that slide are causal and the others are not: so speculators trains
    and vLLM and SGLang read z-lab's heads. speculators' own default for DFlash2 is that none is.
    """
    if attention != AUTO:
        return _Causality(attention == CAUSAL, attention == CAUSAL, f"by {DRAFT_ATTENTION}")
    for name in CAUSAL_KEYS:
        if block.get(name) is not None:
            value = block.boolean(name, False)
            return _Causality(value, value, f"by {name}")
    if not has_sliding:
        return _Causality(False, False, "the format's rule, no key says so")
    if block.get(SLIDING_NON_CAUSAL) is not None:
        is_full = block.boolean(SLIDING_NON_CAUSAL, False)
        return _Causality(False, not is_full, f"by {SLIDING_NON_CAUSAL}")
    if kind == "dflash2":
        return _Causality(False, False, "speculators' default for DFlash2, no key says so")
    return _Causality(False, True, "by layer type, no key says so")


def _read_sliding(layer: JsonKeys, inner: JsonKeys) -> SlidingLayers:
    """Reads which layers slide from the layers' keys, or from a window in dflash_config.

    A window in dflash_config needs no use_sliding_window.

    With use_swa and swa_window_size all layers slide, unless layer_types names those that do.
    """
    num_layers = layer.integer("num_hidden_layers", 1, MAX_BLOCK)
    if inner.boolean("use_swa", False):
        window = inner.integer("swa_window_size", 1, MAX_WINDOW)
        return SlidingLayers(window, named_layers(layer, num_layers) or tuple(range(num_layers)))
    if inner.get("sliding_window") not in (None, False, 0):
        window = inner.integer("sliding_window", 1, MAX_WINDOW)
        layers = named_layers(layer, num_layers)
        if inner.boolean("use_sliding_window", True):
            if not layers:
                remedy = "layer_types at top level has to say which layers slide"
                inner.refuse("sliding_window", "null", remedy)
            return SlidingLayers(window, layers)
    return read_sliding_layers(layer, num_layers)


def _check_computation(block: JsonKeys) -> None:
    """Refuses what would make the computation of a block another one."""
    for name, what in UNSUPPORTED.items():
        if block.get(name) not in (None, False, 0):
            block.refuse(name, "no such key", f"{what} is not supported; give a head without it")
    if block.get("projector_type") not in (None, "dflash", "dspark"):
        is_domino = block.get("projector_type") == "domino"
        remedy = f"{'Domino' if is_domino else 'other'} heads are not supported"
        block.refuse("projector_type", '"dflash" or "dspark"', remedy)
    if block.get("markov_head_type") not in (None, "", "vanilla"):
        remedy = "a bias that depends on more than the token before it is not supported"
        block.refuse("markov_head_type", '"vanilla"', remedy)
    if block.number("input_embedding_scale", 0.0, 1e9, 1.0) != 1.0:
        block.refuse("input_embedding_scale", "1", "scaled embeddings are not supported")


def default_capture_layers(num_layers: int, num_head_layers: int) -> tuple[int, ...]:
    """The outputs that a head of so many layers reads which names none: spread over the target."""
    if num_head_layers == 1:
        return (num_layers // 2,)
    step = (num_layers - 4) / (num_head_layers - 1)
    return tuple(round(1 + step * i) for i in range(num_head_layers))


def named_layer_ids(
    dialect: BlockDialect, checkpoint: DraftCheckpoint, target: ModelConfig
) -> LayerIds:
    """The layers that the head reads, in its format's numbering."""
    num_layers = target.num_layers
    if dialect.layer_ids is None:
        count = dialect.layer.integer("num_hidden_layers", 1, MAX_BLOCK)
        ids = default_capture_layers(num_layers, count)
        return LayerIds(ids, "output", f"the default for {num_layers} layers")
    ids = dialect.layer_ids.ids
    shape = checkpoint.tensor("fc.weight").shape
    # speculators names the last state as well, which only its training reads.
    has_last = dialect.layer_ids.numbering == "entering" and ids[-1] == num_layers
    if has_last and shape[1:] == ((len(ids) - 1) * target.hidden_size,):
        return LayerIds(ids[:-1], "entering", dialect.layer_ids.origin)
    return dialect.layer_ids
