"""Bodies of requests about what is kept of answers."""

from __future__ import annotations

from openspec.serve.shapes.chat import Model


class CaptureSettings(Model):
    """POST /v1/capture."""

    enabled: bool
    """Whether texts of requests that come from now on are kept."""
