"""Ranks have all that their steps need before they serve: what CUDA is asked for is counted.

A kernel that is loaded, or memory that is taken, may wait for kernels that run, and one of those
may wait for another rank's step, which then is never enqueued.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from openspec import _C
from openspec.engine.devices import MODULE_LOADING
from tests.gpu.call_log import KINDS, LOADED, Call, count, cupti, follow_steps

NUM_RANKS = 2
ROOT = Path(__file__).parents[2]

on_gpus = pytest.mark.skipif(
    not _C.has_cuda() or len(_C.cuda_device_names()) < NUM_RANKS or cupti() is None,
    reason=f"takes {NUM_RANKS} CUDA devices and CUPTI",
)
each_drafter = pytest.mark.parametrize("drafter", ["eagle3 copies tree", "dflash"])


@cache
def counted(drafter: str) -> dict[str, Any]:
    """Of an engine and its requests, see `call_log.serve`."""
    with TemporaryDirectory(prefix="openspec-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.call_log", folder, drafter, str(NUM_RANKS)],
            env={**os.environ, MODULE_LOADING: "EAGER"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def found(drafter: str) -> dict[str, Any]:
    counts = counted(drafter)
    print(json.dumps(counts, indent=1))
    return counts


@pytest.mark.gpu
@on_gpus
@each_drafter
def test_nothing_is_loaded_while_requests_are_served(found: dict[str, Any]) -> None:
    # All that must not be is counted: of each there is some at the start, and one load after.
    assert all(found["starting"][kind] for kind in KINDS), found["starting"]
    assert found["after"]["loads"] == {LOADED: 1}, found["results after"]
    assert sum(found["after"]["takes memory"].values()) == 1, found["results after"]
    assert found["serving"]["loads"] == {}


@pytest.mark.gpu
@on_gpus
@each_drafter
def test_nothing_is_taken_within_a_step(found: dict[str, Any]) -> None:
    """Between steps graphs of a grammar's are recorded, and longer lists of a request get room."""
    assert found["steps"]["are whole"] and found["steps"]["calls"] > 1000, found["steps"]
    assert found["within steps"] == {kind: {} for kind in KINDS}


@pytest.mark.gpu
@on_gpus
@each_drafter
def test_all_kernels_were_launched_before(found: dict[str, Any]) -> None:
    assert min(found["kernels"]) > 10
    assert found["launched first"] == []


def a_step(*, inside: str = "cudaLaunchKernel", between: str = "cudaLaunchKernel") -> list[Call]:
    """Of two ranks, one after the other; the host waits for the events 3 and 4."""
    return [
        Call("cudaEventRecord", context=1, event=1),
        Call("cudaLaunchKernel", context=1, kernel="norm"),
        Call("cudaEventRecord", context=1, event=3),
        Call(inside, context=2),
        Call("cudaEventRecord", context=2, event=2),
        Call("cudaEventRecord", context=2, event=4),
        Call(between, context=1),
        Call("cudaEventSynchronize", context=1, event=3),
        Call("cudaEventSynchronize", context=2, event=4),
    ]


def test_calls_within_steps_are_told() -> None:
    calls = [*a_step(), *a_step(inside="cudaMalloc", between="cudaFree"), *a_step(between=LOADED)]
    none: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    found = count(calls, 0, len(calls), 2)
    within = {"takes memory": {"cudaMalloc": 1}}
    assert found["within steps"] == none | within
    assert found["serving"] == none | within | {
        "loads": {LOADED: 1},
        "frees memory": {"cudaFree": 1},
    }
    assert found["steps"] == {"calls": 15, "begun": [3, 3], "are whole": True}
    assert found["launched first"] == ["norm"]
    later = count([*a_step(), *calls], len(a_step()), len(a_step()) + len(calls), 2)
    assert later["launched first"] == [] and later["serving"] == found["serving"]
    # A rank does not end what it begins, or begins what others do not; or no step is told.
    for some in (calls[:-4] + calls[-3:], calls[:-5], []):
        assert not follow_steps(some, 2).are_whole
