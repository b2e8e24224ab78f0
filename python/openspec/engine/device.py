"""What the engine's defaults owe to the device; all that Python knows about devices is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openspec.errors import ConfigError

DeviceName = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """A kind of device."""

    name: DeviceName
    dtypes: tuple[str, ...]
    """Types of activations and KV that it computes in, the default first."""
    default_num_rows: int
    """Rows of a step: enough to keep the device busy, few enough for those who decode meanwhile."""
    min_logits_rows: int
    """Rows of logits that there is always room for: on CUDA, those of the largest recorded step."""
    max_logits_bytes: int
    """Logits beyond this are computed in several parts."""
    default_kv_share: float
    """Of the engine's memory beside weights and scratch, what KV pages take by default ..."""
    default_kv_bytes: int | None
    """... and a limit to it."""
    memory_flag: str
    """The flag that gives KV pages more or less of the device's memory."""

    def choose_dtype(self, wanted: str) -> str:
        """The type to compute in; `wanted` may be "auto".

        Raises:
            ConfigError: if the device does not compute in it.
        """
        if wanted == "auto":
            return self.dtypes[0]
        if wanted not in self.dtypes:
            raise ConfigError(
                f"dtype {wanted} is not supported on {self.name}, which computes in "
                f"{' or '.join(self.dtypes)}; leave out --dtype or choose another --device"
            )
        return wanted

    def choose_num_rows(self, wanted: int | None, num_needed: int) -> int:
        """Rows of a step: as wanted, else the default, or what is needed if that is more."""
        return max(self.default_num_rows, num_needed) if wanted is None else wanted

    def choose_num_logits_rows(self, num_decoding: int, vocab_size: int) -> int:
        """Rows of logits at a time, for steps in which at most so many rows decode."""
        most = self.max_logits_bytes // (4 * vocab_size)
        return max(self.min_logits_rows, min(num_decoding, most))


CPU = DeviceTraits(
    name="cpu",
    dtypes=("float32", "bfloat16"),
    default_num_rows=512,
    min_logits_rows=32,
    max_logits_bytes=128 << 20,
    default_kv_share=0.25,  # the machine has other uses for its memory
    default_kv_bytes=1 << 30,
    memory_flag="--kv-cache-memory",
)
CUDA = DeviceTraits(
    name="cuda",
    dtypes=("bfloat16",),
    default_num_rows=2048,
    min_logits_rows=256,
    max_logits_bytes=256 << 20,
    default_kv_share=1.0,
    default_kv_bytes=None,
    memory_flag="--gpu-memory-utilization",
)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], why_no_cuda: str) -> DeviceTraits:
    """The device to run on. `why_no_cuda`: what keeps the engine from running there, or nothing.

    Raises:
        ConfigError: if CUDA is wanted and cannot be used, with what is missing.
    """
    if wanted == "cpu" or (wanted == "auto" and why_no_cuda):
        return CPU
    if why_no_cuda:
        raise ConfigError(
            f"--device cuda: {why_no_cuda}; it takes a build with CMAKE_ARGS=-DOPENSPEC_CUDA=ON "
            "and a GPU of compute capability 8.0 or newer that nvidia-smi lists and "
            "CUDA_VISIBLE_DEVICES does not hide; or use --device cpu"
        )
    return CUDA
