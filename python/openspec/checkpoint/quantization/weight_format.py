"""The format of a target's weights: its tensors decide, and its lists have to agree."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openspec.checkpoint.quantization.declared import (
    BLOCK,
    BLOCKS,
    CHANNEL,
    CODES,
    INSTEAD,
    TENSOR,
    Declared,
    declared_methods,
)
from openspec.checkpoint.tensor_info import TensorInfo, name_some
from openspec.errors import ConfigError
from openspec.specs.layers import DELTA_HEAD_DIM, DeltaNetSpec, ExpertsSpec, MixerSpec, MlpSpec
from openspec.specs.target import TargetSpec, TensorScale

logger = logging.getLogger(__name__)

MADE = {"fp8": CHANNEL, "fp8_per_tensor": TENSOR, "fp8_per_block": BLOCKS}
"""What --quantization makes of bfloat16 weights -> the form of their scales."""
MATRICES = re.compile(
    r"model\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|"
    r"mlp\.(experts\.\d+\.)?(gate|up|down)_proj)\.weight"
)
"""The matrices of decoder layers; not the small ones of gates."""
HEAD = "lm_head.weight"
_SCALES = re.compile(r"(.*)\.(weight_scale|weight_scale_inv)")
_OF_ACTIVATIONS = re.compile(r".*\.(input_scale|input_scale_ub)")
_OF_CACHE = re.compile(r".*\.(output_scale|[qkv]_scale|kv_scale|prob_output_scale)")
"""Scales of K and V, and of what meets them."""
_SCALE_DTYPES = ("BF16", "F16", "F32")
_REFUSED_DTYPES = {"F8_E5M2": "e5m2 weights", "F8_E8M0": "E8M0 scales", "I8": "INT8 weights"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a target's matrices are stored in the engine."""

    name: str = "bfloat16"
    """For people: bfloat16, or what of FP8."""
    quantized: Mapping[str, TensorScale] = field(default_factory=dict)
    """For the compiled core."""
    is_made: bool = False
    """Whether the codes and scales are made of bfloat16 weights at load."""
    unused: frozenset[str] = frozenset()
    """Tensors of the files that have no effect here."""


def scale_shape(form: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Of the scales of a matrix [N, K] in compressed-tensors' form."""
    if form == BLOCKS:
        return (math.ceil(shape[0] / BLOCK), math.ceil(shape[1] / BLOCK))
    return (shape[0], 1) if form == CHANNEL else (1,)


def weight_format(tensors: Mapping[str, TensorInfo], declared: Declared) -> WeightFormat:
    """The format of a checkpoint's `tensors`, of which lists say something.

    `tensors` stand under the engine's names; what they are called in the files is their own.

    Raises:
        ConfigError: tensors and lists do not fit each other, or a format is not read.
    """
    for info in tensors.values():
        if info.dtype in _REFUSED_DTYPES:
            raise ConfigError(
                f"{info.path}: {info.name}: {_REFUSED_DTYPES[info.dtype]} ({info.dtype}) are not "
                f"read; {INSTEAD}"
            )
    quantized = {
        name: _scale_of(name, info, tensors, declared)
        for name, info in tensors.items()
        if info.dtype == CODES
    }
    _check_lists(tensors, declared, quantized)
    unused = []
    for pattern, is_declared, note in (
        (
            _OF_ACTIVATIONS,
            declared.has_static_activations,
            "static activation scales are not used: only weights are FP8 here",
        ),
        (
            _OF_CACHE,
            declared.has_cache_scales,
            "scales of K and V are not used: the KV cache has the activations' type",
        ),
    ):
        found = [info.name for info in tensors.values() if pattern.fullmatch(info.name)]
        if found or is_declared:
            logger.info("%s: %s", declared.source, note)
        unused += found
    forms = sorted({scale.form for scale in quantized.values()})
    return WeightFormat(
        name=f"FP8 with scales of each {' and '.join(forms)} ({declared.dialect})",
        quantized=quantized,
        unused=frozenset(unused),
    )


def made_format(spec: TargetSpec, wanted: str) -> WeightFormat:
    """What `wanted`, a key of MADE, makes of the bfloat16 weights of a target."""
    form, hidden = MADE[wanted], spec.hidden_size
    quantized = {}
    for i, layer in enumerate(spec.layers):
        inner = layer.mlp.intermediate_size
        shapes = _mixer_shapes(layer.mixer, hidden)
        for mlp in _mlp_names(layer.mlp):
            shapes |= {f"{mlp}.{half}_proj": (inner, hidden) for half in ("gate", "up")}
            shapes[f"{mlp}.down_proj"] = (hidden, inner)
        for name, shape in shapes.items():
            tensor = f"model.layers.{i}.{name}.weight"
            quantized[tensor] = TensorScale(
                name=f"{tensor}_scale", shape=scale_shape(form, shape), form=form
            )
    return WeightFormat(
        name=f"FP8 with scales of each {form} (made of bfloat16 at load)",
        quantized=quantized,
        is_made=True,
    )


def _mixer_shapes(mixer: MixerSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """The matrices of a mixer in the files, below the layer's name."""
    if isinstance(mixer, DeltaNetSpec):
        values = mixer.num_value_heads * DELTA_HEAD_DIM
        channels = 2 * mixer.num_key_heads * DELTA_HEAD_DIM + values
        shapes = {"in_proj_qkv": (channels, hidden), "in_proj_z": (values, hidden)}
        shapes["out_proj"] = (hidden, values)
        return {f"linear_attn.{name}": shape for name, shape in shapes.items()}
    q, kv = (heads * mixer.head_dim for heads in (mixer.num_q_heads, mixer.num_kv_heads))
    shapes = {"q_proj": ((2 if mixer.has_gate else 1) * q, hidden), "o_proj": (hidden, q)}
    shapes |= {"k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_names(mlp: MlpSpec) -> list[str]:
    """The MLPs of a layer in the files, below its name."""
    if isinstance(mlp, ExpertsSpec):
        return [f"mlp.experts.{i}" for i in range(mlp.num_experts)]
    return ["mlp"]


def check_wanted(declared: Declared | None, wanted: str | None) -> None:
    """Refuses a --quantization that is not what the lists say, or makes nothing of bfloat16.

    Raises:
        ConfigError: with what to do instead.
    """
    if wanted is None:
        return
    if declared is None and wanted not in MADE:
        raise ConfigError(
            f"--quantization {wanted}: the checkpoint is not quantised; {' or '.join(MADE)} makes "
            "FP8 of it, or drop it"
        )
    if declared is not None and wanted != declared.method:
        raise ConfigError(
            f"--quantization {wanted}: {declared.source} says {declared.method}; drop it"
        )


def _scale_of(
    name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], declared: Declared
) -> TensorScale:
    module = name.removesuffix(".weight")
    if not (MATRICES.fullmatch(name) or name == HEAD) or len(info.shape) != 2:
        raise ConfigError(
            f"{info.path}: {info.name} {list(info.shape)} is {CODES}, which only matrices of "
            f"decoder layers and the LM head may be; {INSTEAD}"
        )
    scale = tensors.get(f"{module}.{declared.scale_suffix}")
    if scale is None:
        raise ConfigError(
            f"{info.path}: {info.name} is {CODES} and has no {module}.{declared.scale_suffix}; "
            "without its scale it means nothing, so get the checkpoint anew"
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise ConfigError(
            f"{scale.path}: {scale.name}: expected dtype {' or '.join(_SCALE_DTYPES)}, found "
            f"{scale.dtype}; {INSTEAD}"
        )
    for form in (TENSOR, CHANNEL, BLOCKS):
        # A dimension of 1 may be left out, or stand beside.
        wanted = [size for size in scale_shape(form, info.shape) if size != 1]
        if form in declared.forms and [size for size in scale.shape if size != 1] == wanted:
            return TensorScale(
                name=f"{module}.{declared.scale_suffix}", shape=scale.shape, form=form
            )
    shapes = " or ".join(
        f"{list(scale_shape(form, info.shape))} ({form})" for form in sorted(declared.forms)
    )
    raise ConfigError(
        f"{scale.path}: {scale.name}: expected shape {shapes} for {info.name} {list(info.shape)} "
        f"as {declared.source} says, found {list(scale.shape)}; get the checkpoint anew"
    )


def _check_lists(
    tensors: Mapping[str, TensorInfo], declared: Declared, quantized: Mapping[str, TensorScale]
) -> None:
    """Refuses scales of nothing, and tensors that a list says to be what they are not."""
    known = {scale.name for scale in quantized.values()}
    alone = sorted(name for name in tensors if _SCALES.fullmatch(name) and name not in known)
    if alone:
        raise ConfigError(
            f"{declared.source}: scales without a tensor of {CODES}: {name_some(alone)}; get the "
            "checkpoint anew"
        )
    if not quantized:
        raise ConfigError(
            f"{declared.source} says {declared.dialect}, but no tensor is {CODES}; get the "
            "checkpoint anew, or remove the key"
        )
    for name, info in tensors.items():
        module, is_listed = info.name.removesuffix(".weight"), False
        if name in quantized or MATRICES.fullmatch(name):
            is_listed = declared.ignores(module)
        if name in quantized and is_listed:
            raise ConfigError(
                f"{info.path}: {info.name} is {CODES}, but {declared.source} lists it as not "
                "quantised; get the checkpoint anew"
            )
        if name not in quantized and MATRICES.fullmatch(name) and not is_listed:
            raise ConfigError(
                f"{info.path}: {info.name} is {info.dtype}, but {declared.source} does not list it "
                "as not quantised; get the checkpoint anew"
            )


QUANTIZATIONS = tuple(dict.fromkeys((*MADE, *declared_methods())))
"""Values of --quantization."""
