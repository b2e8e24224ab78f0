"""Length of the sentences in README.md and docs: `python tests/prose.py` prints a line per page.

Code, tables, headings and comments are left out. A sentence ends at `.`, `!` or `?`, at an empty
line and where a list item begins; `;` and `:` end none. Dated notes are records, and not counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 40
MEAN_WORDS = 20.0

_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_END = re.compile(r"[.!?][\"')\]*_]*(?:\s+|$)")


def pages() -> list[Path]:
    """README.md and every page of docs but the notes."""
    notes = ROOT / "docs" / "notes"
    return [
        ROOT / "README.md",
        *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent != notes),
    ]


def paragraphs(text: str) -> Iterator[str]:
    """Runs of prose: paragraphs, and list items by themselves."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2`*~*\s*$", "\n", text, flags=re.M | re.S)
    kept: list[str] = []
    in_list = False
    for line in [*text.splitlines(), ""]:
        is_item = _LIST_ITEM.match(line) is not None
        is_code = re.match(r"(?: {4}|\t)", line) is not None and not in_list and not kept
        ends = not line.strip() or re.match(r"\s*(?:\||#{1,6} )", line) is not None
        if (is_item or ends or is_code) and kept:
            yield " ".join(kept)
            kept = []
        if ends or is_code:
            in_list = in_list and (not line.strip() or line.startswith(" "))
            continue
        in_list = is_item or (in_list and line.startswith(" "))
        kept.append(_LIST_ITEM.sub("", line, count=1).strip() if is_item else line.strip(" >"))


def plain(prose: str) -> str:
    """Without markup: links as their words, code as one word."""
    prose = re.sub(r"`[^`]*`", "code", prose)
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    return re.sub(r"<[^>]*>|[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", prose)


def sentences(text: str) -> list[str]:
    """The sentences of a page, without markup."""
    return [
        sentence.strip()
        for prose in paragraphs(text)
        for sentence in _END.split(plain(prose))
        if num_words(sentence)
    ]


def num_words(sentence: str) -> int:
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def mean_words(text: str) -> float:
    """Words of a sentence on average; 0 without sentences."""
    counts = [num_words(sentence) for sentence in sentences(text)]
    return sum(counts) / len(counts) if counts else 0.0


def too_long(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if num_words(sentence) > MOST_WORDS]


def main() -> None:
    """Prints mean, longest and number of sentences per page; exit status 1 beyond the limits."""
    failed = False
    for path in pages():
        text = path.read_text()
        counts = [num_words(sentence) for sentence in sentences(text)] or [0]
        print(
            f"{mean_words(text):5.1f} mean {max(counts):3d} longest {len(counts):4d} sentences  "
            f"{path.relative_to(ROOT)}"
        )
        for sentence in too_long(text):
            print(f"      {num_words(sentence)} words: {sentence}")
        failed = failed or mean_words(text) > MEAN_WORDS or max(counts) > MOST_WORDS
    sys.exit(failed)


if __name__ == "__main__":
    main()
