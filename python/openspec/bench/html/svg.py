"""Charts as SVG, by hand: lines, bars and spreads, legible without script, in light and in dark.

A chart stands in a page that has `STYLE`, or alone with `standalone`. Marks carry what they show as
a `<title>`, which a browser shows on hovering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from openspec.bench.palette import POSITIONS, SERIES, tint_of
from openspec.bench.printable import printable

_LIGHT = {"ground": "#ffffff", "ink": "#24292f", "quiet": "#57606a", "line": "#d8dee4"}
_DARK = {"ground": "#161b22", "ink": "#e6edf3", "quiet": "#9198a1", "line": "#30363d"}
_DARK_SERIES = ("#9198a1", "#58a6ff", "#ff9b50", "#3fb98f", "#d68fd6", "#d4a72c")


def _variables(names: Mapping[str, str], series: Sequence[str]) -> str:
    values = {**names, **{f"s{at}": colour for at, colour in enumerate(series)}}
    return "; ".join(f"--{name}: {value}" for name, value in values.items())


STYLE = f"""
:root {{ {_variables(_LIGHT, SERIES)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, _DARK_SERIES)} }} }}
.chart text {{ font: 12px system-ui, "Segoe UI", sans-serif; fill: var(--ink);
  font-variant-numeric: tabular-nums }}
.chart .title {{ font-size: 14px; font-weight: 600 }}
.chart .quiet {{ fill: var(--quiet) }}
.chart .grid {{ stroke: var(--line); fill: none }}
.chart .one {{ stroke: var(--quiet); stroke-dasharray: 4 4; fill: none }}
.chart .curve {{ fill: none; stroke-width: 2; stroke-linejoin: round }}
""" + "".join(
    f".chart .s{at} {{ stroke: var(--s{at}) }} .chart .f{at} {{ fill: var(--s{at}) }}\n"
    for at in range(len(SERIES))
)


@dataclass(frozen=True)
class Value:
    """A number, and where it comes from: `place` names it in the JSON file."""

    number: float
    place: str = ""

    @property
    def attribute(self) -> str:
        """`place` as an attribute, for tests and for readers of the page's source."""
        return f' data-v="{self.place}"' if self.place else ""


@dataclass(frozen=True)
class Series:
    """A line: values by what stands on the horizontal axis."""

    label: str
    points: Mapping[int, Value]
    ranges: Mapping[int, tuple[Value, Value]] = field(default_factory=dict)
    colour: int = 1


def words(text: str) -> str:
    """Escaped, and without characters that steer."""
    return escape(printable(text))


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    """A line of text; a number as it is, words through `words`."""
    name = f' class="{kind}"' if kind else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{side}{name}>{words(content)}</text>'


def ticks(top: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to the first that reaches `top`."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n * most >= top)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def label_places(wanted: Sequence[float], gap: float = 17) -> list[float]:
    """Heights next to the wanted ones, `gap` apart at least."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    for above, below in pairwise(order):
        places[below] = max(places[below], places[above] + gap)
    return places


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{words(label)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


_SIDES = ("width", "height")


def _size(chart: str) -> tuple[float, float]:
    head = chart.partition(">")[0]
    width, height = (float(head.split(f' {side}="')[1].split('"')[0]) for side in _SIDES)
    return width, height


def beside(label: str, charts: Sequence[str], gap: float = 28) -> str:
    """Charts in a row as one."""
    parts, x, height = [], 0.0, 0.0
    for chart in charts:
        width, own_height = _size(chart)
        parts.append(chart.replace("<svg ", f'<svg x="{x:g}" ', 1))
        x, height = x + width + gap, max(height, own_height)
    return _svg(x - gap, height, label, parts)


def standalone(chart: str, margin: float = 16) -> str:
    """A chart as a file of its own, on a card that is legible on light and dark pages."""
    head, _, rest = chart.partition(">\n")
    width, height = _size(chart)
    outer_width, outer_height = width + 2 * margin, height + 2 * margin
    label = head.split('aria-label="')[1].split('"')[0]
    card = (
        f'<rect x="0.5" y="0.5" width="{outer_width - 1:g}" height="{outer_height - 1:g}" rx="8" '
        'fill="var(--ground)" stroke="var(--line)"/>'
    )
    return (
        '<svg class="chart" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="{-margin:g} {-margin:g} {outer_width:g} {outer_height:g}" '
        f'width="{outer_width:g}" height="{outer_height:g}" role="img">\n'
        f"<title>{label}</title>\n<style>{STYLE}</style>\n"
        f'<g transform="translate({-margin:g} {-margin:g})">{card}</g>\n{rest}\n'
    )


@dataclass(frozen=True)
class Axes:
    """What a line chart has around its lines."""

    title: str
    across: str
    unit: str = ""
    digits: int = 2
    """Of the numbers on hovering."""
    is_log: bool = False
    """Whether the horizontal axis is logarithmic; otherwise its steps are evenly spaced."""
    one: str = ""
    """What the dashed line at 1 is called; empty: there is none."""


def line_chart(
    axes: Axes, series: Sequence[Series], width: float = 760, height: float = 320
) -> str:
    """Lines with their names at their ends. The vertical axis begins at 0."""
    left, top, bottom = 52.0, 44.0, height - 46
    longest = max((len(line.label) for line in series), default=0)
    right = width - min(240.0, 40 + 6.8 * longest)
    columns = sorted({x for line in series for x in line.points})
    highest = max(
        [v.number for line in series for v in line.points.values()]
        + [high.number for line in series for _, high in line.ranges.values()],
        default=1.0,
    )
    marks = ticks(max(highest, 1.0) if axes.one else highest)

    def x_of(column: int) -> float:
        if axes.is_log:
            span = math.log2(max(columns[-1], columns[0] + 1) / columns[0])
            return left + 14 + (right - left - 28) * math.log2(column / columns[0]) / span
        place = columns.index(column) / max(1, len(columns) - 1)
        return left + 14 + (right - left - 28) * (place if len(columns) > 1 else 0.5)

    def y_of(value: float) -> float:
        return bottom - value / marks[-1] * (bottom - top)

    parts = [text(0, 16, axes.title, kind="title")]
    for mark in marks:
        parts.append(f'<path class="grid" d="M{left:g} {y_of(mark):.1f}H{right:g}"/>')
        parts.append(text(left - 8, y_of(mark) + 4, f"{mark:g}{axes.unit}", "end", "quiet"))
    if axes.one:
        parts.append(f'<path class="one" d="M{left:g} {y_of(1):.1f}H{right:g}"/>')
        parts.append(text(left + 6, y_of(1) + 15, axes.one, kind="quiet"))
    shown = _powers(columns) if axes.is_log else columns
    parts += [text(x_of(x), bottom + 18, str(x), "middle", "quiet") for x in shown]
    parts.append(text((left + right) / 2, bottom + 38, axes.across, "middle", "quiet"))
    ends = [y_of(line.points[max(line.points)].number) for line in series]
    for line, label_y in zip(series, label_places(ends), strict=True):
        points = [(x_of(x), y_of(value.number)) for x, value in sorted(line.points.items())]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        kind = line.colour % len(SERIES)
        for column, (low, high) in sorted(line.ranges.items()):
            if high.number > low.number:
                d = f"M{x_of(column):.1f} {y_of(low.number):.1f}V{y_of(high.number):.1f}"
                parts.append(f'<path class="s{kind}" opacity=".45" d="{d}"/>')
        parts.append(f'<path class="curve s{kind}" d="M{path}"/>')
        for column, value in sorted(line.points.items()):
            hover = f"{line.label}, {column}: {value.number:.{axes.digits}f}{axes.unit}"
            parts.append(
                f'<circle class="f{kind}"{value.attribute} cx="{x_of(column):.1f}" '
                f'cy="{y_of(value.number):.1f}" r="3.5"><title>{words(hover)}</title></circle>'
            )
        end_x, end_y = points[-1]
        if abs(label_y - end_y) > 1 or right + 4 > end_x + 6:
            d = f"M{end_x + 6:.1f} {end_y:.1f}L{right + 6:.1f} {label_y:.1f}"
            parts.append(f'<path class="s{kind}" opacity=".35" d="{d}"/>')
        parts.append(f'<circle class="f{kind}" cx="{right + 12:.1f}" cy="{label_y:.1f}" r="4"/>')
        parts.append(text(right + 22, label_y + 4, line.label))
    return _svg(width, height, axes.title, parts)


def _powers(columns: Sequence[int]) -> list[int]:
    first, last = columns[0], columns[-1]
    return [1 << n for n in range(last.bit_length()) if first <= 1 << n <= last]


def position_bars(title: str, shares: Sequence[Value], width: float = 230) -> str:
    """The share of drafts that were accepted at each position, each bar on its position's tint."""
    height, top, bottom = 190.0, 44.0, 162.0
    slot = min(46.0, (width - 8) / max(1, len(shares)))
    bar = slot * 0.78
    parts = [text(0, 14, title, kind="title")]
    parts += [
        f'<path class="grid" d="M0 {bottom - share * (bottom - top):.1f}H{width:g}"/>'
        for share in (0, 0.5, 1)
    ]
    for at, share in enumerate(shares):
        x, y = 4 + at * slot, bottom - share.number * (bottom - top)
        hover = f"position {at + 1}: {share.number:.1%}"
        parts.append(
            f'<rect{share.attribute} x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" '
            f'height="{bottom - y:.1f}" fill="{tint_of(at + 1).colour}" stroke="var(--quiet)" '
            f'stroke-width=".6"><title>{words(hover)}</title></rect>'
        )
        if slot >= 26:
            parts.append(text(x + bar / 2, y - 5, f"{share.number:.0%}", "middle"))
        if slot >= 13 or at % 2 == 0:
            parts.append(text(x + bar / 2, bottom + 15, str(at + 1), "middle", "quiet"))
    return _svg(width, height, f"{title}: accepted by position", parts)


@dataclass(frozen=True)
class Spread:
    """One row of a chart of distributions."""

    label: str
    percentiles: Mapping[str, Value]
    """By "0", "5", "25", "50", "75", "95", "99", "100"; at least "50" and "99"."""
    colour: int = 1
    begins_group: bool = False


def spread_chart(title: str, rows: Sequence[Spread], unit: str = "ms", width: float = 470) -> str:
    """Distributions under each other: 5th to 95th percentile, quartiles, median, 99th."""
    left = 26 + 6.6 * max(len(row.label) for row in rows)
    right, step = width - 96, 17.0
    groups = sum(row.begins_group for row in rows)
    height = 66 + len(rows) * step + groups * 7
    marks = ticks(max(row.percentiles["99"].number for row in rows), most=5)

    def x_of(value: Value) -> float:
        return left + min(1.03, value.number / marks[-1]) * (right - left)

    bottom = height - 24
    parts = [text(0, 14, title, kind="title"), text(width, 34, "median / 99th", "end", "quiet")]
    for mark in marks:
        x = left + mark / marks[-1] * (right - left)
        parts.append(f'<path class="grid" d="M{x:.1f} 42V{bottom:.1f}"/>')
        shown = f"{mark:g}" if mark < marks[-1] else f"{mark:g} {unit}"
        parts.append(text(x, bottom + 16, shown, "middle", "quiet"))
    y = 42.0 - step / 2
    for row in rows:
        y += step + 7 * row.begins_group
        parts.append(text(left - 10, y + 4, row.label, "end"))
        parts += _spread(row, y, x_of)
        middle, late = row.percentiles["50"], row.percentiles["99"]
        digits = 1 if middle.number >= 10 else 2
        shown = f"{middle.number:.{digits}f} / {late.number:.{digits}f}"
        parts.append(text(width, y + 4, shown, "end"))
    return _svg(width, height, title, parts)


def _spread(row: Spread, y: float, x_of: Callable[[Value], float]) -> list[str]:
    at = {name: x_of(value) for name, value in row.percentiles.items()}
    kind, found = row.colour % len(SERIES), row.percentiles
    hover = ", ".join(
        f"{_NAMES.get(name, name + 'th percentile')} {value.number:.2f}"
        for name, value in found.items()
    )
    parts = [f"<g><title>{words(f'{row.label}: {hover}')}</title>"]
    low, high = at.get("5", at["50"]), at.get("95", at["99"])
    parts.append(f'<path class="s{kind}" opacity=".5" d="M{low:.1f} {y:.1f}H{high:.1f}"/>')
    if "25" in at and "75" in at:
        box = max(1.5, at["75"] - at["25"])
        parts.append(
            f'<rect class="f{kind}" opacity=".35" x="{at["25"]:.1f}" y="{y - 4.5:.1f}" '
            f'width="{box:.1f}" height="9" rx="1.5"/>'
        )
    late, middle = found["99"].attribute, found["50"].attribute
    parts.append(f'<path class="s{kind}"{late} d="M{at["99"]:.1f} {y - 4:.1f}v8"/>')
    parts.append(f'<circle class="f{kind}"{middle} cx="{at["50"]:.1f}" cy="{y:.1f}" r="3.2"/></g>')
    return parts


_NAMES = {"0": "least", "50": "median", "100": "most"}


def tint_legend() -> str:
    """The tints of positions, in words."""
    return " ".join(
        f'<span class="tint" style="background:{tint.colour}">{words(tint.label)}</span>'
        for tint in POSITIONS
    )
