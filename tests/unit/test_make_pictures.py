"""The picture of the demo: every token on its tint, in a file of its own."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from bench.make_pictures import CELL, lines_of, terminal

from openspec.bench.palette import POSITIONS
from openspec.tools.demo import OWN, Demonstration

SVG = "{http://www.w3.org/2000/svg}"


def test_pieces_line_by_line() -> None:
    pieces = [("a", OWN), ("b\n\tc", 1), ("\nd", 2)]
    assert lines_of(pieces) == [[("a", OWN), ("b", 1)], [("    c", 1), ("", 2)], [("d", 2)]]


def test_the_picture_of_the_demo() -> None:
    pieces = [("def ", OWN), ("<f>(", 1), ("x\x1b):", 9), ("\n    return x", 2)]
    picture = terminal(Demonstration("ask", pieces, is_identical=True, figures=["12 tokens"]))
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "<f>(" in texts and "x\ufffd):" in texts
    tinted = [e for e in root.iter(f"{SVG}rect") if (e.get("fill") or "").startswith("#")]
    colours = [element.get("fill") for element in tinted]
    legend = [tint.colour for tint in POSITIONS]
    assert colours == [legend[0], legend[4], legend[1], *legend]
    # A token is as wide as its characters: where one ends, the next begins.
    assert tinted[0].get("x") == f"{4 * CELL:g}" and tinted[1].get("x") == f"{8 * CELL:g}"
    assert not re.search(r"url\(|href|<script", picture)
