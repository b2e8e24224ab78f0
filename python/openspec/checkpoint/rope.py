"""RoPE frequencies: plain, linear, YaRN; float32 arithmetic step by step as in transformers."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn. `kind` is "default", "linear" or "yarn"."""

    kind: str
    theta: float
    inv_freq: tuple[float, ...]  # [head_dim / 2], float32 values, scaling applied
    scale: float
    """Factor on cos and sin (YaRN's attention factor)."""


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


def default_rope(theta: float, head_dim: int) -> RopeConfig:
    """Unscaled: theta ** (-2j / head_dim)."""
    inv_freq = tuple(_f32(1.0 / freq) for freq in _pos_freqs(theta, head_dim))
    return RopeConfig("default", theta, inv_freq, 1.0)


def linear_rope(theta: float, head_dim: int, factor: float) -> RopeConfig:
    """Position interpolation: every frequency divided by `factor`."""
    plain = default_rope(theta, head_dim).inv_freq
    return RopeConfig("linear", theta, tuple(_f32(freq / _f32(factor)) for freq in plain), 1.0)


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
    return RopeConfig("yarn", theta, tuple(inv_freq), yarn_attention_factor(yarn))


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
