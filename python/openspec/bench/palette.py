"""Colours that say where a token came from: one palette for the terminal, reports and the page.

Each tint is a background under dark text. All are of xterm's 256 colours, so terminals show them as
they are. Any two of them, and each and white, differ by at least 20 (CIE76) for normal sight and
for the three kinds of colour blindness; a test computes that.
"""

from __future__ import annotations

from dataclasses import dataclass

INK = "#1c1c1c"
"""The text on a tint, on dark pages too."""
INK_XTERM = 234


@dataclass(frozen=True)
class Tint:
    """A background, and what a token on it was."""

    label: str
    colour: str
    xterm: int
    """The number of `colour` among a terminal's 256."""


POSITIONS = (
    Tint("1", "#afd7ff", 153),
    Tint("2", "#5fafaf", 73),
    Tint("3", "#87ffaf", 121),
    Tint("4-7", "#ffd75f", 221),
    Tint("8+", "#ff875f", 209),
)
"""Accepted drafts by their position in the draft, counted from 1."""
GRAMMAR = Tint("from a grammar", "#d787ff", 177)
"""The target's own tokens have no tint."""

SERIES = ("#57606a", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b")
"""Lines of charts: plain decoding first, then methods or runs."""


def tint_of(position: int) -> Tint:
    """The tint of an accepted draft at a position, counted from 1."""
    return POSITIONS[position - 1 if position <= 3 else 3 if position <= 7 else 4]
