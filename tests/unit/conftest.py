"""What all unit tests share."""

from __future__ import annotations

import hypothesis

# How long examples take says nothing on a machine that does other things too.
hypothesis.settings.register_profile(
    "openspec", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("openspec")
