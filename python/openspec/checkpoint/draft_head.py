"""Draft heads that read hidden states of the target: what their checkpoints have in common.

They differ in keys, tensor names and in how they number the target's layers; which format is which
is the business of the method (`drafters/`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from openspec.checkpoint.draft_model import (
    OTHER_TARGET,
    DraftCheckpoint,
    check_same_tokenizer,
    is_same_tensor,
)
from openspec.checkpoint.quantization.declared import refuse_quantized
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.targets.dense import check_layers
from openspec.checkpoint.targets.rope import read_rope
from openspec.checkpoint.targets.sliding_layers import SlidingLayers
from openspec.checkpoint.token_map import TOKEN_MAP, TOKEN_MASK, check_token_map, is_rising
from openspec.checkpoint.weights import DraftModel
from openspec.errors import ConfigError
from openspec.specs.head import HeadSpec
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec

logger = logging.getLogger(__name__)

Numbering = Literal["entering", "output"]

CAPTURE_LAYERS = "capture_layers"
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
TARGET_EMBEDDING = "model.embed_tokens.weight"
LAYER_TENSORS = (
    "input_layernorm.weight",
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
DEFAULT_ROPE_THETA = 10_000.0  # of transformers' layer classes; not the target's base


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Layer ids as a checkpoint or user wrote them."""

    ids: tuple[int, ...]
    numbering: Numbering
    origin: str
    """Where they stand, for messages."""

    def outputs(self) -> tuple[int, ...]:
        """The layers by their outputs; see `captured_layers`."""
        return tuple(i - self.shift for i in self.ids)

    @property
    def shift(self) -> int:
        """By how much an id exceeds that of the layer whose output it means."""
        return 1 if self.numbering == "entering" else 0


def layer_ids_at(keys: JsonKeys, name: str, numbering: Numbering) -> LayerIds | None:
    """The ids under a key; None if there are none, which leaves the default."""
    ids = None if keys.get(name) == [] else keys.integers(name)
    return None if ids is None else LayerIds(ids, numbering, f"{keys.source}: {name}")


def agreed_layer_ids(inner: LayerIds | None, outer: LayerIds | None) -> LayerIds | None:
    """The ids that stand in one of two places, or the same layers in both.

    Raises:
        ConfigError: different ones.
    """
    if inner and outer and inner.outputs() != outer.outputs():
        said = [f"{one.origin} says {list(one.ids)} ({one.numbering})" for one in (inner, outer)]
        raise ConfigError(f"{', '.join(said)}, which are different layers; keep the right one")
    return inner or outer


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a checkpoint's config.json says, whatever the format."""

    name: str
    keys: JsonKeys
    """Top level."""
    layer: JsonKeys
    """Where the layers' geometry stands."""
    layer_ids: LayerIds | None


def speculators_layer(keys: JsonKeys) -> JsonKeys:
    """Where the speculators format has the layers' geometry."""
    layer = keys.object("transformer_layer_config")
    if layer is None:
        keys.refuse("transformer_layer_config", "an object with the layers' geometry")
    return layer


def captured_layers(layer_ids: LayerIds, num_layers: int) -> tuple[int, ...]:
    """The target's layers, from 0, whose outputs the head reads, in rising order.

    An output is the residual stream after a layer, before the next layer's norm. Code bases count
    in two ways: "output of layer i", and "state that enters layer i", which is the output of layer
    i - 1 (so that entering L, the number of layers, is the output of the last one). For a head that
    reads the outputs of layers 1, 17 and 32 of a target with 36 layers:

    | where the ids stand | written by | numbering | example |
    |---|---|---|---|
    | nowhere; [2, L//2, L-3] holds | SafeAILab, AngelSlim, vLLM, SGLang | entering | 2, 18, 33 |
    | aux_hidden_state_layer_ids inside a method's object | SpecForge, SGLang | output | 1, 17, 32 |
    | aux_hidden_state_layer_ids at top level | speculators, vLLM | entering | 2, 18, 33 |
    | target_layer_ids, wherever it stands | z-lab, DeepSpec, SpecForge | output | 1, 17, 32 |
    | capture_layers | users of openspec | output | 1, 17, 32 |

    Raises:
        ConfigError: ids out of range or not rising, with the numbers.
    """
    shift, layers = layer_ids.shift, layer_ids.outputs()
    if not is_rising(layers) or layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError(
            f"{layer_ids.origin}: expected rising ids in [{shift}, {num_layers - 1 + shift}] "
            f'(numbering "{layer_ids.numbering}", the target has {num_layers} layers), '
            f"found {list(layer_ids.ids)}; set {CAPTURE_LAYERS}, or {OTHER_TARGET}"
        )
    return layers


def listed(layers: Iterable[int]) -> str:
    """Numbers for messages."""
    return ", ".join(map(str, layers))


def layers_of_user(text: str) -> LayerIds | None:
    """What capture_layers names; None: nothing."""
    if not text:
        return None
    if not re.fullmatch(r"\s*\d{1,6}(\s*,\s*\d{1,6})*\s*", text):
        raise ConfigError(f"{CAPTURE_LAYERS} must be a list such as 1,17,32; got {text!r}")
    return LayerIds(tuple(map(int, text.split(","))), "output", CAPTURE_LAYERS)


class DraftHead:
    """A head's checkpoint beside its target: the checks and the description that methods share."""

    def __init__(
        self,
        checkpoint: DraftCheckpoint,
        dialect: Dialect,
        layer_ids: LayerIds,
        target: ModelConfig,
    ) -> None:
        """Tensors that are copies of the target's are left out: the target's serve.

        Raises:
            ConfigError: it computes something else, or was made for another target.
        """
        refuse_quantized(dialect.layer)
        check_layers(dialect.layer)
        _check_target(dialect.keys, dialect.layer, target)
        self._checkpoint, self._dialect, self._target = checkpoint, dialect, target
        self._layer_ids = layer_ids
        self._attention = ""  # these two as `spec` finds them
        self._length: int | None = None
        self.layers = _read_captures(checkpoint, layer_ids, target)
        """The target's layers, from 0, whose outputs it reads."""
        _warn_of_last_layer(checkpoint, self.layers, target.num_layers)
        self.ignored = {TOKEN_MASK: f"it follows from {TOKEN_MAP}"}
        """Tensors that need not be loaded -> why."""
        originals = {
            EMBEDDING: TARGET_EMBEDDING,
            HEAD: TARGET_EMBEDDING if target.spec.tie_word_embeddings else HEAD,
        }
        for name in checkpoint.tensors:
            if name.startswith("verifier_"):
                self.ignored[name] = "only training needs it"
            elif name.endswith("rotary_emb.inv_freq"):
                self.ignored[name] = "it follows from rope_theta"
            elif name in originals and is_same_tensor(
                checkpoint, name, target.folder, originals[name]
            ):
                self.ignored[name] = "it is a copy of the target's"

    def has(self, name: str) -> bool:
        """Whether a tensor is there, to be loaded."""
        return name in self._checkpoint.tensors and name not in self.ignored

    def _whose(self, name: str) -> str:
        return "own" if self.has(name) else "the target's"

    def spec(
        self,
        prefix: str,
        draft_vocab: int,
        num_layers: int,
        sliding: SlidingLayers,
        has_qk_norm: bool = True,
    ) -> HeadSpec:
        """What every head has, for the compiled drafter; `prefix`: of a layer's tensors.

        Raises:
            ConfigError: keys and tensors contradict each other.
        """
        layer = self._dialect.layer
        num_q_heads = layer.integer("num_attention_heads", 1, 4096)
        num_kv_heads = layer.integer("num_key_value_heads", 1, 4096, num_q_heads)
        if num_q_heads % num_kv_heads:
            layer.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_q_heads})")
        q_shape = self._checkpoint.tensor(f"{prefix}self_attn.q_proj.weight").shape
        q_rows = q_shape[0] if q_shape else 0
        # Not hidden_size / heads, which is another number for 4B; old files have no such key.
        head_dim = layer.integer("head_dim", 1, 4096, max(q_rows // num_q_heads, 1))
        rope = read_rope(layer, head_dim, DEFAULT_ROPE_THETA)
        self._attention = (
            f"attention: {num_q_heads} query heads, {num_kv_heads} KV heads of {head_dim}, RoPE "
            f"base {rope.theta:g}, {'unscaled' if rope.kind == 'default' else rope.kind}"
        )
        self._length = rope.length
        if not self.has(HEAD) and draft_vocab != self._target.vocab_size:
            raise ConfigError(
                f"{self._checkpoint.folder}: missing tensor {HEAD}: the head knows {draft_vocab} "
                f"of the target's {self._target.vocab_size} tokens, so the target's {HEAD} cannot "
                "take its place; take the whole checkpoint"
            )
        check_token_map(self._checkpoint, draft_vocab, self._target.vocab_size)
        attention = AttentionSpec(
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            has_qk_norm=has_qk_norm,
            inv_freq=rope.inv_freq,
            rope_scale=rope.scale,
        )
        mlp = DenseMlpSpec(intermediate_size=layer.integer("intermediate_size", 1, 1 << 20))
        slides = replace(attention, window=sliding.window)
        return HeadSpec(
            layers=tuple(
                LayerSpec(mixer=slides if i in sliding.layers else attention, mlp=mlp)
                for i in range(num_layers)
            ),
            rms_norm_eps=layer.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
            capture_layers=self.layers,
            draft_vocab_size=draft_vocab,
            has_embedding=self.has(EMBEDDING),
            has_head=self.has(HEAD),
            has_token_map=self.has(TOKEN_MAP),
        )

    def model(
        self,
        kind: str,
        summary: str,
        spec: HeadSpec,
        tensor_names: Mapping[str, str],
        details: Iterable[str],
    ) -> DraftModel:
        """What the engine is told; `summary` and `details` say what the method makes of it.

        Raises:
            ConfigError: the head was made for another tokenizer.
        """
        checkpoint, target, layers = self._checkpoint, self._target, self.layers
        num_parameters = sum(
            math.prod(info.shape)
            for name, info in checkpoint.tensors.items()
            if name in tensor_names and name != TOKEN_MAP
        )
        lines = [
            f"format: {self._dialect.name}",
            f"layers: outputs of {listed(layers)} = entering {listed(i + 1 for i in layers)} (from "
            f"{self._layer_ids.origin})",
            f"fc: {list(checkpoint.tensor('fc.weight').shape)}, {len(layers)} states of "
            f"{target.hidden_size}",
            self._attention,
            f"embedding: {self._whose(EMBEDDING)}; head: {self._whose(HEAD)}, "
            f"{spec.draft_vocab_size} of {target.vocab_size} tokens"
            f"{f', mapped by {TOKEN_MAP}' if self.has(TOKEN_MAP) else ''}",
            *details,
            check_same_tokenizer(checkpoint.folder, target.folder),
        ]
        if self._length is not None and self._length < target.max_model_len:
            lines.append(
                f"positions: made for {self._length}, the target for {target.max_model_len}; "
                "acceptance falls beyond"
            )
        verifier = _trained_for(self._dialect.keys)
        if verifier is not None:
            lines.append(f"trained for: {verifier}")
        return DraftModel(
            folder=checkpoint.folder,
            description=f"{kind} head {checkpoint.folder.name}, format {self._dialect.name}, "
            f"{num_parameters / 1e6:.1f} M parameters, {summary}, reads the outputs of layers "
            f"{listed(layers)} of {target.num_layers}",
            head=spec,
            tensor_names=tensor_names,
            ignored_tensors=self.ignored,
            details=tuple(lines),
            trained_length=self._length,
        )


def _check_target(keys: JsonKeys, layer: JsonKeys, target: ModelConfig) -> None:
    """Crosses what both config.json files say about the target; `keys` is the head's top level."""
    for source, name, expected in (
        (layer, "hidden_size", target.hidden_size),
        (keys, "target_hidden_size", target.hidden_size),
        (layer, "vocab_size", target.vocab_size),
        (keys, "num_target_layers", target.num_layers),
    ):
        is_optional = name.startswith(("target", "num"))
        if is_optional and source.get(name) is None:
            continue
        if source.integer(name, 1, 1 << 24) != expected:
            source.refuse(name, f"{expected}, as the target has", OTHER_TARGET)


def _read_captures(
    checkpoint: DraftCheckpoint, layer_ids: LayerIds, target: ModelConfig
) -> tuple[int, ...]:
    """`captured_layers`, as many as the checkpoint's `fc` reads."""
    layers = captured_layers(layer_ids, target.num_layers)
    fc, size = checkpoint.tensor("fc.weight"), target.hidden_size
    if len(fc.shape) != 2 or fc.shape[0] != size or fc.shape[1] % size:
        raise ConfigError(
            f"{fc.path}: {fc.name}: expected shape [{size}, n * {size}], "
            f"{size} being the target's hidden_size, found {list(fc.shape)}; {OTHER_TARGET}"
        )
    found = fc.shape[1] // size
    if found != len(layers):
        raise ConfigError(
            f"{fc.path}: {fc.name}: expected shape [{size}, {len(layers) * size}] "
            f"for {len(layers)} captured layers ({listed(layers)}, from {layer_ids.origin}), found "
            f"{list(fc.shape)}, that is {found}; name all {found} with {CAPTURE_LAYERS}"
        )
    return layers


def _warn_of_last_layer(
    checkpoint: DraftCheckpoint, layers: tuple[int, ...], num_layers: int
) -> None:
    """The authors' code takes the last of transformers' hidden states, which is normed already."""
    if layers[-1] == num_layers - 1:
        logger.warning(
            "%s: reads the output of layer %d, the target's last one, as it leaves that layer; a "
            "head trained on transformers' hidden_states saw it after the final norm",
            checkpoint.folder,
            layers[-1],
        )


def _trained_for(keys: JsonKeys) -> str | None:
    """The target that the checkpoint names."""
    speculators = keys.object("speculators_config")
    verifier = speculators.object("verifier") if speculators is not None else None
    name = verifier.get("name_or_path") if verifier is not None else None
    name = name or keys.get("target_model_name_or_path")
    return f"{name:.120}" if isinstance(name, str) and name.isprintable() else None
