"""FP8 made of other weights: the codes and scales of a matrix, the same on every machine."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from openspec.checkpoint.quantization.declared import BLOCK, BLOCKS, CHANNEL, TENSOR
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""Of e4m3."""


def quantize(weight: torch.Tensor, form: str, where: str) -> tuple[memoryview, memoryview]:
    """As `quantized`, the bytes of both."""
    codes, scales = quantized(weight, form, where)
    return _bytes(codes), _bytes(scales)


def quantized(weight: torch.Tensor, form: str, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [N, K] and the float32 scales of `weight` [N, K], as `scale_shape` shapes them.

    A scale is the largest size of its weights / 448; a code is the nearest to weight / scale, of
    two as near the even one, all in float32. Few rows at a time: they stay in the cache.

    Raises:
        ConfigError: `weight` holds NaN or infinity.
    """
    import torch

    num_rows, width = weight.shape
    chunks = [weight[i : i + BLOCK] for i in range(0, num_rows, BLOCK)]
    scales = torch.cat([_largest(chunk, form) for chunk in chunks]) / LARGEST
    if form == TENSOR:
        scales = scales.amax().reshape(1)
    if not torch.isfinite(scales).all():
        raise ConfigError(f"{where} holds NaN or infinity; get the checkpoint anew")
    scales[scales == 0.0] = 1.0
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, chunk in enumerate(chunks):
        rows = slice(i * BLOCK, i * BLOCK + len(chunk))
        factor = scales[rows] if form == CHANNEL else scales
        if form == BLOCKS:
            factor = scales[i].repeat_interleave(BLOCK)[:width]
        codes[rows] = chunk.to(torch.float32, copy=True).div_(factor).clamp_(-LARGEST, LARGEST)
    return codes, scales


def _largest(rows: torch.Tensor, form: str) -> torch.Tensor:
    """The largest size of a weight, for each scale that as many rows as a block has have."""
    import torch

    sizes = rows.abs().float()
    if form == CHANNEL:
        return sizes.amax(1, keepdim=True)
    if form == TENSOR:
        return sizes.amax().reshape(1)
    width = rows.shape[1]
    padded = torch.nn.functional.pad(sizes.amax(0), (0, -width % BLOCK))
    return padded.reshape(1, -1, BLOCK).amax(2)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory, which lives as long as the view."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B").toreadonly()
