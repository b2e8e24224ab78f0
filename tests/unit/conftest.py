"""What all unit tests share."""

from __future__ import annotations

import hypothesis
import pytest

from tests.gates import harness

# How long examples take says nothing on a machine that does other things too.
hypothesis.settings.register_profile(
    "openspec", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("openspec")


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine takes that is told no number: the other workers need the rest."""
    monkeypatch.setattr("openspec.engine.plan.available_cpus", lambda: harness.NUM_THREADS)
