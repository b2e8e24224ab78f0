"""What all Python tests share."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator

import pytest

from openspec.engine import memory
from tests.gates import harness, pairs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the engines of tests/gates run; cuda implies --full",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="every combination of the gates' parameters, on two threads each, and all examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    harness.DEVICE = config.getoption("--device")
    harness.IS_FULL = config.getoption("--full") or harness.DEVICE == "cuda"
    harness.NUM_THREADS = 2 if harness.IS_FULL else 1
    # What the shell sets is for its own servers.
    for name in [name for name in os.environ if name.startswith("OPENSPEC_")]:
        del os.environ[name]
    if harness.DEVICE == "cuda":
        # As engines of several ranks need it; CUDA reads it once, for all engines of the process.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    # What nohup, or a shell's &, has this process ignore, the servers under test would ignore, too.
    # A signal that is handled has its default in a child.
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if harness.IS_FULL:
        return
    items[:], left_out = pairs.split(items)
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def short_timing() -> Iterator[None]:
    """An engine times its steps for half a second before it starts, longer than most tests run it.

    What it finds decides when there are drafts, and the text must not depend on that.
    """
    if harness.IS_FULL:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "CPU", dataclasses.replace(memory.CPU, step_timing_s=0.02))
        yield
