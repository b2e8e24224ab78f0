"""What the parts of a start take."""

from __future__ import annotations

import time

import pytest

from openspec.engine.start_phases import Phases


def test_parts_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    phases = Phases(age_s=0.5)
    now = 100.25
    phases.end("imports")
    now = 102.0
    phases.end("weights")
    now = 103.0  # nothing ended since
    assert str(phases) == "imports 0.75, weights 1.75: 2.50 s" and phases.seconds == 2.5
