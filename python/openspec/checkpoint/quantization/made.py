"""FP8 made of other weights: the codes and scales of a matrix, the same on every machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from openspec.checkpoint.float16 import FLOAT16
from openspec.checkpoint.quantization.declared import CODES
from openspec.errors import ConfigError

if TYPE_CHECKING:
    from openspec.specs.target import TensorScale

MAX_THREADS = 16


def load_made(
    load: Callable[[str, memoryview, str], None],
    name: str,
    data: memoryview,
    dtype: str,
    shape: Sequence[int],
    scale: TensorScale,
    where: str,
) -> None:
    """Gives `load` the codes and the scales of a matrix, with their names and types."""
    codes, scales = quantized(data, dtype, shape, scale.form, where)
    load(name, memoryview(codes), CODES)
    load(scale.name, memoryview(scales), "F32")


def quantized(
    data: memoryview, dtype: str, shape: Sequence[int], form: str, where: str
) -> tuple[bytes, bytes]:
    """The e4m3 codes [N, K] and the float32 scales of a matrix, as `scale_shape` shapes them.

    `data` are its numbers as safetensors has them, `dtype` BF16, F16 or F32. A scale is the largest
    size of its weights / 448; a code is the nearest to weight / scale, of two as near the even one,
    all in float32.

    Raises:
        ConfigError: `data` holds NaN or infinity.
    """
    from openspec import _C

    if dtype == FLOAT16:
        import numpy

        data = numpy.frombuffer(data, numpy.float16).astype(numpy.float32).data.cast("B")
        dtype = "F32"
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    try:
        return _C.quantized(data, dtype, shape[0], shape[1], form, num_threads)
    except ValueError as error:
        raise ConfigError(f"{where} {error}; get the checkpoint anew") from None
