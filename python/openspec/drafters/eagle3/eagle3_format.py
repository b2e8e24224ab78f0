"""EAGLE-3 and P-EAGLE checkpoints: their formats, and what their layers and norms are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from openspec.checkpoint.draft_head import (
    CAPTURE_LAYERS,
    EMBEDDING,
    HEAD,
    LAYER_TENSORS,
    QK_NORMS,
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
from openspec.checkpoint.targets.sliding_layers import SlidingLayers, read_sliding_layers
from openspec.checkpoint.token_map import TOKEN_MAP
from openspec.drafters.spec import DraftSetup
from openspec.errors import ConfigError
from openspec.specs.head import CaptureNorm, HeadSpec

SEQUENTIAL, PARALLEL = "eagle3", "peagle"
"""The methods that these checkpoints are for, and their names in the speculators format."""
DRAFT_FEEDBACK = "draft_feedback"
"""The option that says which of its outputs a head reads as the next draft's state."""
AUTO, NORMED, RAW = "auto", "normed", "raw"
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_HIDDEN = "mask_hidden"
INNER_LAYER = "midlayer."
"""The first layer's prefix in the names that the runner expects."""
LAYER_PREFIXES = (INNER_LAYER, "layers.0.")
HIDDEN_NORM, INPUT_NORM = "hidden_norm.weight", "input_layernorm.weight"
OUTER_TENSORS = ("fc.weight", "norm.weight")
LEGACY_SLICES = ("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight")
MAX_LAYERS = 64


def default_layers(num_layers: int) -> LayerIds:
    """The three layers that a head reads which names none."""
    ids = (2, num_layers // 2, num_layers - 3)
    return LayerIds(ids, "entering", f"the default for {num_layers} layers")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """What config.json says, whatever the format."""

    dialect: Dialect
    inner: JsonKeys
    """eagle_config, whose keys go before those beside it; empty where there is none."""

    def boolean(self, name: str) -> bool:
        """A key that may stand in either place."""
        return self.inner.boolean(name, self.dialect.keys.boolean(name, False))

    def refuse_both(self, name: str, other: str) -> None:
        """Refuses two keys that exclude each other."""
        place = self.inner if self.inner.get(name) is not None else self.dialect.keys
        place.refuse(name, f"false beside {other}", "they exclude each other; keep the right one")


@dataclass(frozen=True, slots=True)
class HeadParts:
    """A checkpoint, checked against its target as far as both methods agree."""

    checkpoint: DraftCheckpoint
    format: HeadFormat
    head: DraftHead
    spec: HeadSpec
    """For the compiled drafter."""
    tensor_names: Mapping[str, str]
    details: tuple[str, ...]
    summary: str


def read_format(checkpoint: DraftCheckpoint, method: str) -> HeadFormat:
    """Recognises the format by its keys.

    Raises:
        ConfigError: none of those known, or a head of the other method.
    """
    keys = checkpoint.keys
    kind = keys.get("speculators_model_type")
    inner = keys.object("eagle_config") or JsonKeys({}, f"{keys.source}: eagle_config")
    is_parallel = MASK_HIDDEN in checkpoint.tensors or keys.boolean("parallel_drafting", False)
    if kind in (SEQUENTIAL, PARALLEL):
        is_parallel = kind == PARALLEL
    elif kind is not None:
        keys.refuse("speculators_model_type", f'"{method}"')
    if is_parallel != (method == PARALLEL):
        raise ConfigError(
            f"{keys.source}: expected a head for --method {method}, found one "
            f"{'with' if is_parallel else 'without'} {MASK_HIDDEN}; use --method "
            f"{PARALLEL if is_parallel else SEQUENTIAL}"
        )
    if kind is not None:
        layer_ids = layer_ids_at(keys, LAYER_IDS_KEY, "entering")
        return HeadFormat(Dialect("speculators", keys, speculators_layer(keys), layer_ids), inner)
    if keys.get("target_layer_ids") is not None and keys.get("ttt_length") is not None:
        layer_ids = layer_ids_at(keys, "target_layer_ids", "output")
        return HeadFormat(Dialect("DeepSpec", keys, keys, layer_ids), inner)
    is_head = keys.get("draft_vocab_size") is not None or any(
        name.startswith(INNER_LAYER) or name == MASK_HIDDEN for name in checkpoint.tensors
    )
    if not is_head:
        raise ConfigError(
            f"{keys.source}: expected an EAGLE-3 head: draft_vocab_size (AngelSlim, SpecForge), "
            f'speculators_model_type "{method}" (speculators) or target_layer_ids with ttt_length '
            f"(DeepSpec); found architectures {keys.get('architectures')!r}; give the folder of "
            "such a head, not of a target or of another method's draft model"
        )
    if not inner.boolean("use_aux_hidden_state", True):
        inner.refuse("use_aux_hidden_state", "true", "without it this is no EAGLE-3 head")
    layer_ids = agreed_layer_ids(
        layer_ids_at(inner, LAYER_IDS_KEY, "output"), layer_ids_at(keys, LAYER_IDS_KEY, "entering")
    )
    return HeadFormat(Dialect("classic (AngelSlim, SpecForge)", keys, keys, layer_ids), inner)


def read_head(setup: DraftSetup, method: str) -> HeadParts:
    """Reads the headers of a draft folder, for either method.

    Raises:
        ConfigError: it is no such head, or not for this target, with the remedy.
    """
    target = setup.target
    checkpoint = open_draft_checkpoint(setup.draft_folder)
    format = read_format(checkpoint, method)
    dialect, first = format.dialect, _first_layer(checkpoint)
    num_layers = dialect.layer.integer("num_hidden_layers", 1, MAX_LAYERS, 1)
    layer_ids = (
        layers_of_user(str(setup.options[CAPTURE_LAYERS]))
        or dialect.layer_ids
        or default_layers(target.num_layers)
    )
    head = DraftHead(checkpoint, dialect, layer_ids, target)
    vocab = target.vocab_size
    draft_vocab = dialect.keys.integer("draft_vocab_size", 1, vocab, vocab)
    has_qk_norm = any(first + name in checkpoint.tensors for name in QK_NORMS)
    inner = (*LAYER_TENSORS, *(QK_NORMS if has_qk_norm else ()))
    names = {first + name: INNER_LAYER + name for name in (*inner, HIDDEN_NORM)}
    for i in range(1, num_layers):
        at = f"layers.{i}."
        _check_plain(checkpoint, dialect, at, target.hidden_size)
        names |= {at + name: at + name for name in inner if name != INPUT_NORM}
        names[at + _norm_of_layer(checkpoint, at)] = at + INPUT_NORM
    names |= {name: name for name in OUTER_TENSORS}
    names |= {name: name for name in (EMBEDDING, HEAD, TOKEN_MAP) if head.has(name)}
    norm_kind, norm_names = _capture_norms(format, checkpoint, len(head.layers))
    is_norm_first = dialect.keys.boolean("norm_before_residual", False)
    feedback = setup.options.get(DRAFT_FEEDBACK, AUTO)
    norm_output = format.boolean("norm_output") if feedback == AUTO else feedback == NORMED
    sliding = read_sliding_layers(dialect.layer, num_layers)
    shown_norms = {
        "none": "captured states as they are",
        "slices": "captured states each normed (fc_norm)",
        "whole": "captured states normed together (input_norm)",
    }
    spec = replace(
        head.spec(first, draft_vocab, num_layers, sliding, has_qk_norm),
        capture_norm=norm_kind,
        norm_before_residual=is_norm_first,
        norm_output=norm_output,
    )
    details = (
        f"layers of its own: {num_layers}, {_shown_sliding(sliding)}",
        f"norms: {'' if has_qk_norm else 'no '}q/k norm, residual "
        f"{'after' if is_norm_first else 'before'} hidden_norm, {shown_norms[norm_kind]}, outputs "
        f"fed back {'after the final norm' if norm_output else 'before the final norm'}",
    )
    summary = f"drafts {draft_vocab} of {vocab} tokens"
    return HeadParts(checkpoint, format, head, spec, names | norm_names, details, summary)


def _shown_sliding(sliding: SlidingLayers) -> str:
    if sliding.window:
        who = "layer" if len(sliding.layers) == 1 else "layers"
        return (
            f"of which {who} {listed(sliding.layers)} (from 0) slides over {sliding.window} tokens"
        )
    return f"which see the whole context{f'; {sliding.dropped}' if sliding.dropped else ''}"


def _first_layer(checkpoint: DraftCheckpoint) -> str:
    for prefix in LAYER_PREFIXES:
        if any(name.startswith(prefix) for name in checkpoint.tensors):
            return prefix
    raise ConfigError(
        f"{checkpoint.folder}: expected tensors {LAYER_PREFIXES[0]}* or {LAYER_PREFIXES[1]}* (the "
        "first layer of an EAGLE-3 head), found none of them"
    )


def _check_plain(checkpoint: DraftCheckpoint, dialect: Dialect, at: str, hidden_size: int) -> None:
    """Refuses layers after the first one that read the embedding too, as DeepSpec's do."""
    info = checkpoint.tensor(f"{at}self_attn.q_proj.weight")
    if info.shape[1:] == (2 * hidden_size,):
        dialect.layer.refuse(
            "num_hidden_layers",
            "1",
            f"{info.name} reads the embedding as the first layer does, which is not supported",
        )


def _norm_of_layer(checkpoint: DraftCheckpoint, prefix: str) -> str:
    """What a later layer calls its norm before attention.

    speculators and vLLM name it as Llama does, SGLang as the norm of the first layer's feature.
    """
    has: Callable[[str], bool] = lambda name: prefix + name in checkpoint.tensors  # noqa: E731
    if has(HIDDEN_NORM) and has(INPUT_NORM):
        raise ConfigError(
            f"{checkpoint.folder}: expected one of {prefix}{INPUT_NORM} (speculators, vLLM) and "
            f"{prefix}{HIDDEN_NORM} (SGLang), found both: remove that which training did not use"
        )
    return HIDDEN_NORM if has(HIDDEN_NORM) else INPUT_NORM


def _capture_norms(
    format: HeadFormat, checkpoint: DraftCheckpoint, num_captures: int
) -> tuple[CaptureNorm, dict[str, str]]:
    """How captured states are normed before fc, and the tensors of it."""
    is_whole = format.boolean("norm_before_fc")
    flag = "fc_norm" if format.boolean("fc_norm") else "use_aux_norm"
    if not format.boolean(flag):
        return ("whole", {"input_norm.weight": "input_norm.weight"}) if is_whole else ("none", {})
    if is_whole:
        format.refuse_both("norm_before_fc", flag)
    names = [f"fc_norm.{i}.weight" for i in range(num_captures)]
    is_legacy = LEGACY_SLICES[0] in checkpoint.tensors
    if is_legacy and num_captures != len(LEGACY_SLICES):
        raise ConfigError(
            f"{checkpoint.folder}: expected 3 captured layers for {', '.join(LEGACY_SLICES)}, "
            f"found {num_captures}; rename them {names[0]} and so on"
        )
    return "slices", dict(zip(LEGACY_SLICES if is_legacy else names, names, strict=True))
