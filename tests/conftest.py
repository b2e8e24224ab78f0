"""What all Python tests share."""

from __future__ import annotations

import pytest

from tests.gates import harness


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the engines of tests/gates run",
    )


def pytest_configure(config: pytest.Config) -> None:
    harness.DEVICE = config.getoption("--device")
