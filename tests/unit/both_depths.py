"""Tests that run with and without steps ahead."""

from __future__ import annotations

import pytest

both_depths = pytest.mark.parametrize("num_steps_ahead", [0, 1])
"""For what must hold whether or not a step is in flight while the next one is planned."""
