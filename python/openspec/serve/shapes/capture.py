"""Bodies of requests about what is kept of answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from openspec.serve.shapes.chat import Model


class CaptureSettings(Model):
    """POST /v1/capture. What is left out stays as it is."""

    enabled: bool | None = None
    """Whether texts of requests that come from now on are kept."""
    until_s: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Seconds from now on in which they are; with `enabled` true or left out."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the requests."""
