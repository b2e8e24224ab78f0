"""What the doctor says of a machine with GPUs, and ranks that it cannot run."""

from __future__ import annotations

import pytest

from openspec import _C
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.tools.machine import examine_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]


def test_each_gpu_and_its_links() -> None:
    names = _C.cuda_device_names()
    lines = list(examine_machine(EngineConfig(device="cuda")))
    assert lines[: len(names)] == [f"GPU {place}: {name}" for place, name in enumerate(names)]
    num_rows = len(names) + 1 if len(names) > 1 else 0
    assert len(lines) == len(names) + num_rows + 1 and lines[-1].startswith("memory: weights")


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="not run on cuda yet"):
        list(examine_machine(EngineConfig(device="cuda", tensor_parallel_size=2)))
