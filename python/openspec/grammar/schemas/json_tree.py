"""JSON that a grammar allows, as a tree: what a schema is rewritten to, and rules are written from.

Nodes are immutable and compare by value: equal ones are one rule of the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from openspec.grammar.patterns.automaton import Automaton


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON value."""


@dataclass(frozen=True, slots=True)
class Texts:
    """One of several JSON texts, written exactly so."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """A JSON text that an automaton accepts; with `is_quoted`, what stands between quotes."""

    automaton: Automaton
    is_quoted: bool


@dataclass(frozen=True, slots=True)
class Text:
    """A JSON string of `low` to `high` characters (None: any number).

    Without bounds it may hold JSON's escapes; with them it holds no character that JSON escapes.
    """

    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Array:
    """Items in order; `rest` are those after `first` (None: there are none)."""

    first: tuple[Node, ...]
    rest: Node | None
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class UniqueArray:
    """Some of several JSON texts, each at most once, in any order."""

    texts: tuple[str, ...]
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Property:
    """A named property of an object."""

    name: str
    value: Node
    is_required: bool


@dataclass(frozen=True, slots=True)
class Others:
    """Properties that are not named; `names` is what may stand between a name's quotes."""

    names: Automaton | None
    """None: any text, escapes included."""
    value: Node


@dataclass(frozen=True, slots=True)
class Object:
    """Named properties in order, then any of `others`; between `low` and `high` in all.

    The names of properties and of all `others` are disjoint, and `low` is at most one above the
    required ones where there are others.
    """

    properties: tuple[Property, ...]
    others: tuple[Others, ...] = ()
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """A definition of the tree."""

    name: str


Node: TypeAlias = (
    Anything | Texts | Matching | Text | Array | UniqueArray | Object | AnyOf | Ref
)


@dataclass(frozen=True, slots=True)
class JsonTree:
    """A value and the definitions that it refers to."""

    root: Node
    defs: Mapping[str, Node]
