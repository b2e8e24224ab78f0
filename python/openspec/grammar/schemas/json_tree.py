"""JSON that a grammar allows, as a tree: what a schema is rewritten to, and rules are written from.

Nodes are immutable and compare by value: equal ones are one rule of the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
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


Node: TypeAlias = Anything | Texts | Matching | Text | Array | UniqueArray | Object | AnyOf | Ref


@dataclass(frozen=True, slots=True)
class JsonTree:
    """A value and the definitions that it refers to."""

    root: Node
    defs: Mapping[str, Node]


def ending(tree: JsonTree) -> JsonTree | None:
    """The tree without what never ends: values that must hold another one of their own kind.

    None where nothing is left.
    """
    good: set[str] = set()
    num_before = -1
    while num_before < len(good):
        num_before = len(good)
        for name, node in tree.defs.items():
            if name not in good and _ends(node, good):
                good.add(name)
    if not _ends(tree.root, good):
        return None
    if len(good) == len(tree.defs):
        return tree
    defs = {name: _pruned(tree.defs[name], good) for name in tree.defs if name in good}
    return JsonTree(_pruned(tree.root, good), defs)


def _ends(node: Node, good: Set[str]) -> bool:
    """Whether some value of a node ends, where references to `good` do."""
    if isinstance(node, Ref):
        return node.name in good
    if isinstance(node, AnyOf):
        return any(_ends(option, good) for option in node.options)
    if isinstance(node, Array):
        needed = node.first[: node.low]
        has_rest = node.low <= len(node.first) or (node.rest is not None and _ends(node.rest, good))
        return has_rest and all(_ends(item, good) for item in needed)
    if not isinstance(node, Object):
        return True
    able = [one for one in node.properties if _ends(one.value, good)]
    if any(one.is_required and one not in able for one in node.properties):
        return False
    return len(able) >= node.low or any(_ends(one.value, good) for one in node.others)


def _pruned(node: Node, good: Set[str]) -> Node:
    """A node that ends, without the parts that do not."""
    if isinstance(node, AnyOf):
        options = tuple(_pruned(one, good) for one in node.options if _ends(one, good))
        return options[0] if len(options) == 1 else AnyOf(options)
    if isinstance(node, Array):
        first: list[Node] = []
        for item in node.first:
            if not _ends(item, good):
                return Array(tuple(first), None, node.low)
            first.append(_pruned(item, good))
        has_rest = node.rest is not None and _ends(node.rest, good)
        rest = _pruned(node.rest, good) if node.rest is not None and has_rest else None
        return Array(tuple(first), rest, node.low, node.high if has_rest else None)
    if isinstance(node, Object):
        return replace(
            node,
            properties=tuple(
                replace(one, value=_pruned(one.value, good))
                for one in node.properties
                if _ends(one.value, good)
            ),
            others=tuple(
                replace(one, value=_pruned(one.value, good))
                for one in node.others
                if _ends(one.value, good)
            ),
        )
    return node
