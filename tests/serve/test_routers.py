"""Routers from the package index in front of real servers; see tests/routers/README.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "routers" / "run"


@pytest.mark.full
@pytest.mark.parametrize("name", ["smg", "vllm-router", "dynamo-indexer", "ray"])
def test_router(name: str) -> None:
    done = subprocess.run(
        [sys.executable, RUN, name], capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
