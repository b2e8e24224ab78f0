"""`python -m openspec.adapt watch`: does a server's head still draft as far as it was taken for?

    python -m openspec.adapt watch --server URL

Asks the server for its counters, now and then. That costs its engine nothing: they are counted
anyway. A line is printed when drafts come less far than `run` measured before the head was taken.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openspec.adapt.cycle.server import ServerConfig, counters_of, live_length, since
from openspec.errors import ConfigError
from openspec.messages import SpecCounters
from openspec.settings.setting import number

logger = logging.getLogger(__name__)

DRIFTED = 0.95
"""The alarm is given where steps make less than that of the tokens that were expected."""
ENOUGH_STEPS = 2000
"""Steps with drafts, without which lengths are mere chance."""
EXPECTED = "expected.json"
"""Beside a head that `run` made: how many tokens a step is expected to make."""
DRAFTS, LENGTH = "num_speculative_tokens", "length"


@dataclass(frozen=True)
class WatchConfig(ServerConfig):
    """Settings of the watch."""

    interval_s: float = number(60.0, 0.01, 86400.0)
    """Seconds between two questions."""
    num_alarms: int | None = number(None, 1, 1 << 30)
    """End with status 1 after so many alarms; default: go on."""


@dataclass(slots=True)
class Drift:
    """What was expected of one head, and what has been counted since it was last judged."""

    version: int
    num_drafts: int
    expected: float
    before: SpecCounters

    def judged(self, now: SpecCounters) -> str | None:
        """The alarm, if there is reason for one; nothing while too little has been counted."""
        seen = since(self.before, now)
        if seen.num_drafts < ENOUGH_STEPS:
            return None
        self.before = now
        length = live_length(seen, self.num_drafts)
        if length >= DRIFTED * self.expected:
            return None
        return (
            f"version {self.version}: {length:.2f} tokens a step with {self.num_drafts} drafts, "
            f"{self.expected:.2f} when it was taken: the traffic has changed, or the model has; "
            "python -m openspec.adapt run"
        )


def expectation(said: dict[str, Any]) -> Drift:
    """Of the server's head, as `run` has written it down.

    Raises:
        ConfigError: it has not.
    """
    folder = Path(str(said.get("folder")))
    try:
        written = json.loads((folder / EXPECTED).read_text("utf-8"))
        numbers = (int(written[DRAFTS]), float(written[LENGTH]))
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{folder}: no {EXPECTED}, which `run` writes: nothing is known of what this head is "
            "expected to do; adapt it, or run `decide`"
        ) from None
    return Drift(int(said["version"]), *numbers, counters_of(said))


def watch(own: WatchConfig, sleep: Callable[[float], None] = time.sleep) -> int:
    """Watches until it is interrupted, or there were enough alarms; returns their number.

    Raises:
        ConfigError: the server does not answer, or nothing is known of its head.
    """
    server = own.opened()
    if server is None:
        raise ConfigError("--server is needed")
    drift, num_alarms = expectation(server.drafter()), 0
    while num_alarms != own.num_alarms:
        sleep(own.interval_s)
        said = server.drafter()
        if int(said["version"]) != drift.version:
            drift = expectation(said)
        elif alarm := drift.judged(counters_of(said)):
            num_alarms += 1
            logger.warning("%s", alarm)
    return num_alarms
