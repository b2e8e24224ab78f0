"""The pictures of README and docs: the demo's terminal, and the charts of recorded results.

python -m bench.make_pictures            # all; asks the embedded model
python -m bench.make_pictures --charts   # those of bench/results alone
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from bench import make_tables

from openspec.bench.html.svg import standalone, words
from openspec.bench.palette import INK, POSITIONS, tint_of
from openspec.bench.printable import printable
from openspec.tools.demo import OWN, Demonstration, demonstrate

DEMO = "docs/images/demo.svg"
CELL, LINE = 8.0, 20.0
"""Width of a character and height of a line, in pixels."""
FONT = "13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"

Piece = tuple[str, int]


def lines_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces line by line."""
    lines: list[list[Piece]] = [[]]
    for text, position in pieces:
        first, *rest = printable(text).expandtabs(4).split("\n")
        lines[-1].append((first, position))
        lines += [[(part, position)] for part in rest]
    return lines


def drawn(line: Sequence[Piece], y: float) -> Iterator[str]:
    """A line of a terminal. Each piece is as wide as its characters, in any font."""
    x = 0.0
    for text, position in line:
        width = CELL * len(text)
        if not text:
            continue
        tint = None if position == OWN else tint_of(position).colour
        if tint:
            yield (
                f'<rect x="{x:g}" y="{y - 14:g}" width="{width:g}" height="{LINE - 1:g}" '
                f'fill="{tint}"/>'
            )
        if text.strip():
            start = x + CELL * (len(text) - len(text.lstrip()))
            ink = f' style="fill:{INK}"' if tint else ""
            yield (
                f'<text x="{start:g}" y="{y:g}" textLength="{CELL * len(text.strip()):g}" '
                f'lengthAdjust="spacingAndGlyphs"{ink}>{words(text.strip())}</text>'
            )
        x += width


def terminal(shown: Demonstration) -> str:
    """The demo as it looks in a terminal, without the speed, which is the machine's."""
    tints = [(f" {tint.label} ", at) for tint, at in zip(POSITIONS, (1, 2, 3, 4, 8), strict=True)]
    legend: list[Piece] = [("Accepted drafts, by position: ", OWN)]
    legend += [piece for tint in tints for piece in (tint, (" ", OWN))]
    lines = [
        [("$ python -m openspec.demo", OWN)],
        [],
        *lines_of(shown.pieces),
        [],
        legend,
    ]
    width = CELL * max(sum(len(text) for text, _ in line) for line in lines)
    height = LINE * len(lines)
    parts = [part for at, line in enumerate(lines) for part in drawn(line, LINE * at + 14)]
    label = "The demo in a terminal: every token on the colour of its position in the draft"
    return standalone(
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{words(label)}">\n'
        f"<style>.chart text {{ font: {FONT} }}</style>\n" + "\n".join(parts) + "\n</svg>"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--charts", action="store_true", help="leave the demo's picture")
    args = parser.parse_args()
    pictures = {name: chart() for name, chart in make_tables.CHARTS.items()}
    if not args.charts:
        shown = demonstrate()
        if not shown.is_identical:
            raise SystemExit("the drafted text is not plain decoding's; no picture of it")
        pictures[DEMO] = terminal(shown)
    for name, picture in pictures.items():
        (make_tables.ROOT / name).write_text(picture)
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
