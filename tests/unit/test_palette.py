"""The colours are told apart by everyone, and are what a terminal shows."""

from __future__ import annotations

from itertools import combinations

import pytest

from openspec.bench.palette import GRAMMAR, INK, INK_XTERM, POSITIONS, tint_of

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XTERM_LEVELS = (0, 95, 135, 175, 215, 255)


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(colour: str, sight: str) -> tuple[float, float, float]:
    seen = [
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear(colour), strict=True))))
        for row in SIGHT[sight]
    ]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (
            sum(m * c for m, c in zip(row, seen, strict=True)) / w
            for row, w in zip(to_xyz, white, strict=True)
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_told_apart_by_everyone(sight: str) -> None:
    colours = [*(tint.colour for tint in (*POSITIONS, GRAMMAR)), "#ffffff"]
    for one, other in combinations(colours, 2):
        pairs = zip(lab(one, sight), lab(other, sight), strict=True)
        assert sum((a - b) ** 2 for a, b in pairs) ** 0.5 >= 20, (one, other)


def test_text_on_a_tint_is_legible() -> None:
    for tint in (*POSITIONS, GRAMMAR):  # WCAG 2, level AA
        assert (luminance(tint.colour) + 0.05) / (luminance(INK) + 0.05) >= 4.5


def test_terminals_show_the_same_colours() -> None:
    for tint in (*POSITIONS, GRAMMAR):
        red, rest = divmod(tint.xterm - 16, 36)
        shown = [XTERM_LEVELS[level] for level in (red, *divmod(rest, 6))]
        assert tint.colour == "#" + "".join(f"{level:02x}" for level in shown)
    grey = 8 + 10 * (INK_XTERM - 232)
    assert f"#{grey:02x}{grey:02x}{grey:02x}" == INK


def test_positions() -> None:
    labels = [tint_of(position).label for position in range(1, 17)]
    assert labels == ["1", "2", "3", *["4-7"] * 4, *["8+"] * 9]
