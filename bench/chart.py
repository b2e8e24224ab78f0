"""A line chart as SVG with a background of its own, so that it is legible on light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 52, 586, 56, 278
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499")
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  .grid { stroke: #d0d7de }
  .one { stroke: #57606a; stroke-dasharray: 5 4 }
  text { font: 13px sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px }
  .quiet { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d }
    .grid { stroke: #30363d }
    .one { stroke: #8b949e }
    text { fill: #e6edf3 }
    .quiet { fill: #8b949e }
  }"""


@dataclass(frozen=True)
class Series:
    """A line: points by what stands on the horizontal axis."""

    label: str
    points: dict[int, float]


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{name}>{escape(words)}</text>'


def label_places(wanted: Sequence[float], gap: float = 18) -> list[float]:
    """Heights next to the wanted ones, `gap` apart at least."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    for above, below in pairwise(order):
        places[below] = max(places[below], places[above] + gap)
    return places


def line_chart(title: str, axis: str, series: Sequence[Series]) -> str:
    """Ratios over an axis of evenly spaced steps; 1x is a dashed line."""
    columns = sorted({x for line in series for x in line.points})
    top = max(int(max(line.points.values())) + 1 for line in series)
    across = {
        x: LEFT + 24 + i * (RIGHT - LEFT - 34) / (len(columns) - 1) for i, x in enumerate(columns)
    }

    def height(ratio: float) -> float:
        return BOTTOM - ratio / top * (BOTTOM - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(LEFT - 28, 30, title, kind="title"),
    ]
    for ratio in range(top + 1):
        y, kind = height(ratio), "one" if ratio == 1 else "grid"
        parts.append(f'<path class="{kind}" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{ratio}x", "end", "quiet"))
    parts.append(text(LEFT + 8, height(1) + 17, "plain decoding", kind="quiet"))
    for x in columns:
        parts.append(text(across[x], BOTTOM + 20, str(x), "middle", "quiet"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, axis, "middle", "quiet"))
    ends = [height(line.points[max(line.points)]) for line in series]
    for line, colour, y in zip(series, COLOURS, label_places(ends), strict=False):
        points = [(across[x], height(ratio)) for x, ratio in sorted(line.points.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        parts.append(f'<circle cx="{RIGHT + 16}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        parts.append(text(RIGHT + 26, y + 4, line.label))
    return "\n".join([*parts, "</svg>"]) + "\n"
