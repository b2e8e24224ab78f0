"""FP8 made of other weights: the codes and scales of a matrix, the same on every machine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from openspec.checkpoint.quantization.declared import BLOCK, BLOCKS, CHANNEL
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

LARGEST = 448.0
"""Of e4m3."""
ROWS_AT_ONCE = 32 * BLOCK


def quantize(
    data: memoryview, dtype: str, shape: Sequence[int], form: str, where: str
) -> tuple[memoryview, memoryview]:
    """Codes and float32 scales of a matrix of BF16 or F32, as bytes; `where` names it in messages.

    Raises:
        ConfigError: it holds NaN or infinity.
    """
    import torch

    given = torch.frombuffer(data, dtype=torch.bfloat16 if dtype == "BF16" else torch.float32)
    codes, scales = quantized(given.reshape(tuple(shape)), form, where)
    return _bytes(codes), _bytes(scales)


def quantized(weight: torch.Tensor, form: str, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [N, K] and the float32 scales of `weight` [N, K], as `scale_shape` shapes them.

    A scale is the largest size of its weights / 448; a code is the nearest to weight / scale, of
    two as near the even one, all in float32.

    Raises:
        ConfigError: `weight` holds NaN or infinity.
    """
    import torch

    num_rows, width = weight.shape
    chunks = [weight[i : i + ROWS_AT_ONCE] for i in range(0, num_rows, ROWS_AT_ONCE)]
    scales = torch.cat([_largest(chunk.float(), form) for chunk in chunks]) / LARGEST
    if form not in (CHANNEL, BLOCKS):
        scales = scales.amax().reshape(1)
    if not torch.isfinite(scales).all():
        raise ConfigError(f"{where} holds NaN or infinity; get the checkpoint anew")
    scales[scales == 0.0] = 1.0
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, chunk in enumerate(chunks):
        begin, end = i * ROWS_AT_ONCE, i * ROWS_AT_ONCE + len(chunk)
        factor = scales if form not in (CHANNEL, BLOCKS) else scales[begin:end]
        if form == BLOCKS:
            factor = scales[begin // BLOCK : -(-end // BLOCK)].repeat_interleave(BLOCK, 0)
            factor = factor[: len(chunk)].repeat_interleave(BLOCK, 1)[:, :width]
        codes[begin:end] = (chunk.float() / factor).clamp_(-LARGEST, LARGEST)
    return codes, scales


def _largest(rows: torch.Tensor, form: str) -> torch.Tensor:
    """The largest size of a weight, for each scale that the rows have."""
    import torch

    if form == CHANNEL:
        return rows.abs().amax(1, keepdim=True)
    if form != BLOCKS:
        return rows.abs().amax().reshape(1)
    height, width = (-(-size // BLOCK) for size in rows.shape)
    padded = torch.zeros(height * BLOCK, width * BLOCK)
    padded[: rows.shape[0], : rows.shape[1]] = rows
    return padded.reshape(height, BLOCK, width, BLOCK).abs().amax((1, 3))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory, which lives as long as the view."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B").toreadonly()
