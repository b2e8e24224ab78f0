"""How often hypothesis tries a property."""

from __future__ import annotations

from hypothesis import settings

from tests.gates import harness


def examples(number: int) -> settings:
    """So many examples with --full, and a quarter of them per commit."""
    return settings(max_examples=number if harness.IS_FULL else number // 4)
