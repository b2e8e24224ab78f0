"""RoPE of a config.json: its keys in both dialects, and the frequencies that they give.

Plain, linear, YaRN and Llama 3.1's; float32 arithmetic step by step as in transformers.
"""

from __future__ import annotations

import logging
import math
import struct
from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonKeys

logger = logging.getLogger(__name__)

MAX_POSITIONS = 1 << 24
SCALED_KEYS = frozenset({"factor", "original_max_position_embeddings"})
ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "yarn": SCALED_KEYS
    | {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    "llama3": SCALED_KEYS | {"low_freq_factor", "high_freq_factor"},
}
"""Kind -> what its object may hold beside the base."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn. `kind` is "default", "linear", "yarn" or "llama3"."""

    kind: str
    theta: float
    inv_freq: tuple[float, ...]  # [head_dim / 2], float32 values, scaling applied
    scale: float
    """Factor on cos and sin (YaRN's attention factor)."""
    length: int | None = None
    """Positions that it is made for, if config.json says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnParams:
    """YaRN's settings under their config.json names. Source: arXiv 2309.00071, transformers."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Params:
    """The settings of Llama 3.1's scaling under their config.json names. Source: transformers."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


def read_rope(
    keys: JsonKeys,
    head_dim: int,
    default_theta: float | None = None,
    rotated: float | None = None,
) -> RopeConfig:
    """What config.json says of RoPE for heads of `head_dim`, an even number.

    Both dialects: rope_theta with rope_scaling, and rope_parameters with everything in it.
    `default_theta`: the base where there is none; None: there has to be one. `rotated`: the part of
    a head that turns where partial_rotary_factor does not say; None: all of it has to, and
    positions are those of text alone.

    Raises:
        ConfigError: another kind of RoPE, or a value that cannot be.
    """
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    value = keys.get(name) or {}
    if not isinstance(value, dict):
        keys.refuse(name, "an object or null")
    if any(isinstance(item, dict) for item in value.values()):
        keys.refuse(name, "one setting for all layers, not one for each layer type")
    rope = JsonKeys(value, f"{keys.source}: {name}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rotated is not None and kind == "mrope":
        kind = "default"  # of text all three positions are the same
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        key = "rope_type" if rope.get("rope_type") else "type"
        rope.refuse(key, f"one of {', '.join(ROPE_KEYS)}; remove it or convert it to YaRN")
    theta = _read_theta(keys, rope, default_theta)
    known = ROPE_KEYS[kind] | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if rotated is None:
        for source in (keys, rope):
            if source.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
                source.refuse("partial_rotary_factor", "1.0: openspec turns whole heads")
    else:
        head_dim = _rotary_dim(keys, rope, head_dim, rotated)
        known |= {"mrope_section", "mrope_interleaved"}
    unknown = sorted(set(value) - known)
    if unknown:
        logger.warning("%s: ignored with rope_type %s: %s", rope.source, kind, ", ".join(unknown))
    if kind == "linear":
        return linear_rope(theta, head_dim, rope.number("factor", 1.0, 1e6), _max_positions(keys))
    if kind == "yarn":
        return yarn_rope(theta, head_dim, _read_yarn(keys, rope))
    if kind == "llama3":
        return llama3_rope(theta, head_dim, _read_llama3(keys, rope), _max_positions(keys))
    return default_rope(theta, head_dim, _max_positions(keys))


def _rotary_dim(keys: JsonKeys, rope: JsonKeys, head_dim: int, rotated: float) -> int:
    name = "partial_rotary_factor"
    place = rope if rope.get(name) is not None else keys
    turning = int(head_dim * place.number(name, 0.0, 1.0, rotated))
    if turning < 2 or turning % 2:
        place.refuse(name, f"a part of heads of {head_dim} that is an even number of dimensions")
    return turning


def _max_positions(keys: JsonKeys) -> int | None:
    name = "max_position_embeddings"
    return None if keys.get(name) is None else keys.integer(name, 1, MAX_POSITIONS)


def _read_theta(keys: JsonKeys, rope: JsonKeys, default_theta: float | None) -> float:
    # Who adds rope_scaling to a newer file, as Qwen3's card says, leaves the base where it stood.
    newer = keys.object("rope_parameters") or rope
    places = [place for place in (rope, keys, newer) if place.get("rope_theta") is not None]
    if places:
        return places[0].number("rope_theta", 1.0 + 1e-6, 1e30)
    if default_theta is None:
        keys.refuse("rope_theta", "the RoPE base, at top level or in rope_parameters")
    return default_theta


def _original_positions(keys: JsonKeys, rope: JsonKeys) -> int:
    name = "original_max_position_embeddings"
    # As transformers: a value at top level wins over the one in the object.
    for source in (keys, rope):
        if source.get(name) is not None:
            return source.integer(name, 1, MAX_POSITIONS)
    return keys.integer("max_position_embeddings", 1, MAX_POSITIONS)


def _read_yarn(keys: JsonKeys, rope: JsonKeys) -> YarnParams:
    original = _original_positions(keys, rope)
    if "factor" in rope.values and rope.get("factor") is None:
        factor = keys.integer("max_position_embeddings", 1, MAX_POSITIONS) / original
    else:
        factor = rope.number("factor", 1.0, 1e6)
    yarn = YarnParams(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.optional_number("attention_factor", 1e-6, 1e6),
        mscale=rope.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=rope.optional_number("mscale_all_dim", 0.0, 1e6),
        beta_fast=rope.number("beta_fast", 0.0, 1e6, 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 0.0, 1e6, 1.0) or 1.0,
        truncate=rope.boolean("truncate", True),
    )
    if yarn.beta_fast < yarn.beta_slow:
        rope.refuse("beta_fast", f"a number not below beta_slow ({yarn.beta_slow})")
    if not math.isfinite(yarn.factor) or yarn.factor <= 0.0:
        rope.refuse("factor", "a positive number")
    return yarn


def _read_llama3(keys: JsonKeys, rope: JsonKeys) -> Llama3Params:
    llama3 = Llama3Params(
        factor=rope.number("factor", 1.0, 1e6),
        original_max_position_embeddings=_original_positions(keys, rope),
        low_freq_factor=rope.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-6, 1e6),
    )
    if llama3.high_freq_factor <= llama3.low_freq_factor:
        rope.refuse("high_freq_factor", f"more than low_freq_factor ({llama3.low_freq_factor:g})")
    return llama3


def default_rope(theta: float, head_dim: int, length: int | None = None) -> RopeConfig:
    """Unscaled: theta ** (-2j / head_dim)."""
    inv_freq = tuple(_f32(1.0 / freq) for freq in _pos_freqs(theta, head_dim))
    return RopeConfig("default", theta, inv_freq, 1.0, length)


def linear_rope(
    theta: float, head_dim: int, factor: float, trained_length: int | None = None
) -> RopeConfig:
    """Position interpolation: every frequency divided by `factor`."""
    plain = default_rope(theta, head_dim).inv_freq
    scaled = tuple(_f32(freq / _f32(factor)) for freq in plain)
    length = None if trained_length is None else min(int(trained_length * factor), MAX_POSITIONS)
    return RopeConfig("linear", theta, scaled, 1.0, length)


def llama3_rope(
    theta: float, head_dim: int, llama3: Llama3Params, length: int | None = None
) -> RopeConfig:
    """High frequencies as they are, low ones divided, a mixture of both between.

    `length` is max_position_embeddings, which here counts the positions after scaling.
    """
    original = float(llama3.original_max_position_embeddings)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    low_wavelength, high_wavelength = _f32(original / low), _f32(original / high)
    factor = _f32(llama3.factor)
    scaled = []
    for freq in default_rope(theta, head_dim).inv_freq:
        # A number over a tensor is the tensor's reciprocal times the number there.
        wavelength = _f32(_f32(1.0 / freq) * _f32(2 * math.pi))
        if wavelength > low_wavelength:
            scaled.append(_f32(freq / factor))
        elif wavelength < high_wavelength:
            scaled.append(freq)
        else:
            rotations = _f32(_f32(1.0 / wavelength) * original)
            keep = _f32(_f32(rotations - _f32(low)) / _f32(high - low))
            divided = _f32(_f32(_f32(1.0 - keep) * freq) / factor)
            scaled.append(_f32(divided + _f32(keep * freq)))
    return RopeConfig("llama3", theta, tuple(scaled), 1.0, length)


def yarn_rope(theta: float, head_dim: int, yarn: YarnParams) -> RopeConfig:
    """High frequencies as they are, low ones interpolated, a linear ramp between."""
    low, high = _correction_range(theta, head_dim, yarn)
    if low == high:
        high += 0.001  # as transformers: keeps the ramp finite
    inv_freq = []
    for index, freq in enumerate(_pos_freqs(theta, head_dim)):
        extrapolated = _f32(1.0 / freq)
        interpolated = _f32(1.0 / _f32(_f32(yarn.factor) * freq))
        ramp = _f32(_f32(index - _f32(low)) / _f32(high - low))
        keep = _f32(1.0 - min(max(ramp, 0.0), 1.0))
        inv_freq.append(_f32(_f32(interpolated * _f32(1.0 - keep)) + _f32(extrapolated * keep)))
    length = min(int(yarn.original_max_position_embeddings * yarn.factor), MAX_POSITIONS)
    return RopeConfig("yarn", theta, tuple(inv_freq), yarn_attention_factor(yarn), max(length, 1))


def yarn_attention_factor(yarn: YarnParams) -> float:
    """The factor on cos and sin: given, or 0.1 ln(factor) + 1, or the ratio of the two mscales."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _correction_range(theta: float, head_dim: int, yarn: YarnParams) -> tuple[float, float]:
    def correction_dim(num_rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(wavelengths)) / (2 * math.log(theta))

    low, high = correction_dim(yarn.beta_fast), correction_dim(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _pos_freqs(theta: float, head_dim: int) -> list[float]:
    base = _f32(theta)
    return [_f32(base ** _f32(index / head_dim)) for index in range(0, head_dim, 2)]


def _f32(value: float) -> float:
    """`value` rounded to float32, where the reference computes in float32 too."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
