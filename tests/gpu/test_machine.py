"""What the doctor says of a machine with GPUs, and ranks that it cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from openspec import _C
from openspec.config import EngineConfig
from openspec.engine.devices import MODULE_LOADING
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


def test_what_an_exchange_takes() -> None:
    config = EngineConfig(device="cuda", tensor_parallel_size=2)
    if len(_C.cuda_device_names()) < 2:
        with pytest.raises(ConfigError, match="takes 2 GPUs"):
            list(examine_machine(config))
        return
    told = re.search(
        r"exchange: (\S+) us for .* with the sums of 2 GPUs, (\S+) us without",
        [*examine_machine(config)][-1],
    )
    assert told is not None
    assert all(1 < float(microseconds) < 100 for microseconds in told.groups())


@pytest.mark.parametrize("mode", ["LAZY", "EAGER"])
def test_ranks_need_all_kernels_loaded_before(mode: str) -> None:
    """Or one that is launched for the first time would wait for one that waits for its rank."""
    code = "from openspec import _C; assert _C.has_cuda(); shared, _ = _C.time_exchange(1)"
    environ = {**os.environ, MODULE_LOADING: mode}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    said = f"set {MODULE_LOADING}=EAGER in its environment"
    assert (done.returncode == 0, said in done.stderr) == (mode == "EAGER", mode == "LAZY")
