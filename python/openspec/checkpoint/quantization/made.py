"""FP8 made of other weights: the codes and scales of a matrix, the same on every machine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING

from openspec.checkpoint.quantization.declared import BLOCK, BLOCKS, CHANNEL, CODES, TENSOR
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from openspec.specs.target import TensorScale

LARGEST = 448.0
"""Of e4m3."""
MAX_THREADS = 16


def load_made(
    load: Callable[[str, memoryview, str], None],
    name: str,
    weight: torch.Tensor,
    scale: TensorScale,
    where: str,
) -> None:
    """Gives `load` the codes and the scales of a matrix, with their names and types."""
    codes, scales = quantized(weight, scale.form, where)
    load(name, _bytes(codes), CODES)
    load(scale.name, _bytes(scales), "F32")


def as_bfloat16(data: memoryview, shape: Sequence[int]) -> torch.Tensor:
    """Writable bytes as a tensor."""
    import torch

    return torch.frombuffer(data, dtype=torch.bfloat16).reshape(tuple(shape))


def quantized(weight: torch.Tensor, form: str, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [N, K] and the float32 scales of `weight` [N, K], as `scale_shape` shapes them.

    A scale is the largest size of its weights / 448; a code is the nearest to weight / scale, of
    two as near the even one, all in float32. Few rows at a time: they stay in the cache.

    Raises:
        ConfigError: `weight` holds NaN or infinity.
    """
    import torch

    width = weight.shape[1]
    chunks = [weight[i : i + BLOCK] for i in range(0, len(weight), BLOCK)]
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    with _threads() as pool:
        scales = torch.cat(list(pool.map(_largest, chunks, repeat(form)))) / LARGEST
        if form == TENSOR:
            scales = scales.amax().reshape(1)
        if not torch.isfinite(scales).all():
            raise ConfigError(f"{where} holds NaN or infinity; get the checkpoint anew")
        scales[scales == 0.0] = 1.0

        def fill(i: int) -> None:
            rows = slice(i * BLOCK, i * BLOCK + len(chunks[i]))
            factor = scales[rows] if form == CHANNEL else scales
            if form == BLOCKS:
                factor = scales[i].repeat_interleave(BLOCK)[:width]
            numbers = chunks[i].to(torch.float32, copy=True)
            codes[rows] = numbers.div_(factor).clamp_(-LARGEST, LARGEST)

        list(pool.map(fill, range(len(chunks))))
    return codes, scales


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch takes one: its own wait for each other at every operation."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _largest(rows: torch.Tensor, form: str) -> torch.Tensor:
    """The largest size of a weight, for each scale that as many rows as a block has have."""
    import torch

    # Without the sign, numbers are in the order of their bits, NaN above all.
    bits = torch.int16 if rows.element_size() == 2 else torch.int32
    sizes = rows.view(bits) & torch.iinfo(bits).max
    if form == CHANNEL:
        largest = sizes.amax(1, keepdim=True)
    elif form == TENSOR:
        largest = sizes.amax().reshape(1)
    else:
        padded = torch.nn.functional.pad(sizes.amax(0), (0, -rows.shape[1] % BLOCK))
        largest = padded.reshape(1, -1, BLOCK).amax(2)
    return largest.view(rows.dtype).float()


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's own memory, which lives as long as the view."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B").toreadonly()
