"""What a pattern is parsed into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from openspec.grammar.patterns.characters import Ranges, complement

ENDLESS = 1 << 40
"""A number of repetitions or characters that has no end."""


class PatternError(ValueError):
    """Why a pattern cannot be enforced."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Repeat:
    """`node` between `low` and `high` times."""

    node: Node
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several sequences."""

    options: tuple[tuple[Node, ...], ...]


Node: TypeAlias = Chars | Repeat | Choice


ANY = Chars(complement(()))
"""Any character."""
