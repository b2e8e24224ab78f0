"""Weights without a checkpoint: random numbers in a model's shape, to time it without its files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from openspec.checkpoint.quantization.made import load_made

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from openspec import _C
    from openspec.specs.target import TensorScale

NUM_WORDS = 8_388_593
"""Numbers that are drawn. A prime, so that the rows of a tensor differ."""
GAIN = 1.2
"""Of a matrix: what a layer adds is of the size of what it reads."""


class DummyWeights:
    """Tensors as bf16. A number depends on its tensor's name, shape and its place alone."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self._uniform = random.random(NUM_WORDS, dtype=np.float32)
        self._scaled: dict[tuple[float, float], NDArray[np.uint16]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> memoryview:
        """The bytes of one tensor, row by row."""
        words = self._drawn(*_range_of(name, shape))
        begin = zlib.crc32(name.encode()) % NUM_WORDS
        whole = np.empty(math.prod(shape), np.uint16)
        for at in range(-begin, len(whole), NUM_WORDS):
            part = whole[max(at, 0) : at + NUM_WORDS]
            part[:] = words[max(-at, 0) :][: len(part)]
        return whole.data.cast("B")

    def _drawn(self, low: float, high: float) -> NDArray[np.uint16]:
        if (low, high) not in self._scaled:
            values = self._uniform * np.float32(high - low) + np.float32(low)
            self._scaled[low, high] = (values.view(np.uint32) >> 16).astype(np.uint16)
        return self._scaled[low, high]


def _range_of(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Between which numbers the tensor's lie, so that each layer changes the logits."""
    if name.endswith("norm.weight"):
        return 0.5, 1.5
    most = math.sqrt(3.0) * (GAIN / math.sqrt(shape[-1]) if len(shape) > 1 else 0.1)
    return -most, most


def load_dummy_weights(runner: _C.Runner, quantized: Mapping[str, TensorScale]) -> int:
    """Gives the runner every tensor of its target; returns their bytes before any become FP8.

    `quantized` is the target's: codes and scales are made of the same numbers.
    """
    weights, num_bytes = DummyWeights(), 0
    scales = {scale.name for scale in quantized.values()}
    for name, shape in runner.expected_tensors():
        if name in scales:
            continue
        data = weights.tensor(name, tuple(shape))
        if name in quantized:
            load_made(runner.load_tensor, name, data, "BF16", shape, quantized[name], name)
        else:
            runner.load_tensor(name, data, "BF16")
        num_bytes += data.nbytes
    return num_bytes
