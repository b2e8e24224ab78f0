"""A JSON schema rewritten into a tree of what the grammar allows.

Every value of the tree fits the schema. There may be fewer: properties come in the schema's order,
an object has no properties that the schema does not speak of (unless it says so), and a text with a
length or a pattern holds no character that JSON writes as an escape.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import replace

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.choices import Choices
from openspec.grammar.schemas.constraints import (
    ALL_TYPES,
    TYPES,
    Budget,
    Parts,
    Plain,
    Unenforceable,
    Unsatisfiable,
)
from openspec.grammar.schemas.json_tree import (
    AnyOf,
    Anything,
    Array,
    JsonTree,
    Matching,
    Node,
    Object,
    Others,
    Property,
    Ref,
    Text,
    Texts,
    UniqueArray,
    ending,
)
from openspec.grammar.schemas.names import ANY_NAME, names_of, regions
from openspec.grammar.schemas.numbers import number_node
from openspec.grammar.schemas.values import SpelledNumber, json_text, key_of

MAX_DEPTH = 64
MAX_UNIQUE = 8
"""Values of items that differ: a rule for each set of them."""

_LEAVES = (Anything, Texts, Matching, Text, UniqueArray, Ref)
_ALL_KINDS = ALL_TYPES - {"integer"}


def enforceable(schema: JsonValue, budget: Budget | None = None) -> JsonTree:
    """The schema as a tree; `budget` is what is left for all schemas of a request.

    Raises:
        Unenforceable: with the place and the reason.
    """
    rewriter = _Rewriter(schema, budget or Budget())
    try:
        tree = ending(rewriter.whole())
    except Unsatisfiable:
        raise Unenforceable("", f"no value fits this schema{rewriter.among}") from None
    if tree is None:
        raise Unenforceable("", "no value fits this schema: one would hold itself for ever")
    return tree


class _Rewriter:
    def __init__(self, root: JsonValue, budget: Budget) -> None:
        self._choices = Choices(root, budget)
        self._budget = budget
        self._names: dict[Hashable, str] = {}
        self._nodes: dict[str, Node | None] = {}
        """What was rewritten, by its name; None where nothing fits."""
        self._used = set[str]()
        self.among = ""
        """Which values alone were looked at, where others might fit."""

    def whole(self) -> JsonTree:
        root = self._node((self._choices.root,), 0)
        # Where nothing fits, what refers to it from within is never met or ends in nothing.
        defs = {n: node or AnyOf(()) for n, node in self._nodes.items() if n in self._used}
        return JsonTree(root, defs)

    # ---- What stands in several places is whole in the first, and a reference in the others.

    def _known(self, key: Hashable) -> Node | None:
        """What a key stands for, if it is known or being made: then it may hold itself."""
        name = self._names.get(key)
        if name is None:
            self._names[key] = f"n{len(self._names)}"
            return None
        if name in self._nodes:
            node = self._nodes[name]
            if node is None:
                raise Unsatisfiable
            if isinstance(node, _LEAVES):
                return node
        self._used.add(name)
        return Ref(name)

    def _keep(self, key: Hashable, node: Node | None) -> Node:
        self._nodes[self._names[key]] = node
        if node is None:
            raise Unsatisfiable
        return node

    def _node(self, parts: Parts, depth: int) -> Node:
        """What fits all the parts."""
        pointer = max((part.pointer for part in parts), key=len, default="")
        if depth > MAX_DEPTH:
            raise Unenforceable(pointer, f"nested deeper than {MAX_DEPTH}")
        self._budget.take(30, pointer)
        key = tuple(sorted({part.pointer for part in parts}))
        if (node := self._known(key)) is not None:
            return node
        nodes = []
        for plain in self._choices.of_all(parts):
            try:
                nodes.append(self._choice(plain, depth))
            except Unsatisfiable:
                continue
        return self._keep(key, _any_of(nodes))

    def _choice(self, plain: Plain, depth: int) -> Node:
        """What fits constraints."""
        if (node := self._known(plain)) is not None:
            return node
        nodes: list[Node] = []
        kinds = set[str]()
        if plain.enum is not None:
            self._budget.take(2 * len(plain.enum), plain.pointer)
            values = [value for value in plain.enum.values() if self._choices.admits(plain, value)]
            if values:
                nodes = [Texts(tuple(dict.fromkeys(map(json_text, values))))]
        else:
            kinds = self._kinds(plain)
        if not plain.implied and kinds >= _ALL_KINDS:
            nodes, kinds = [Anything()], set()
        for kind in TYPES:
            if kind not in kinds:
                continue
            try:
                if kind == "object":
                    nodes.append(self._object(plain, depth))
                elif kind == "array":
                    nodes.append(self._array(plain, depth))
                else:
                    nodes.append(self._scalar(kind, plain))
            except Unsatisfiable:
                continue
        if not nodes and plain.enum is None and plain.types is None:
            self.among = " among the types that its keywords speak of; name its type"
        return self._keep(plain, _any_of(nodes))

    def _kinds(self, plain: Plain) -> set[str]:
        """The types of answers, without values that fit another option of a `oneOf` as well."""
        kinds = set(plain.possible_types)
        if "number" in kinds:
            kinds.discard("integer")
        disjoint = self._choices.disjoint
        for one_of, number in plain.one_of:
            for other, rival in disjoint.rivals(one_of, number, plain):
                if disjoint.never_fits(plain, rival):
                    continue
                both = (
                    {"null", "boolean"} & (rival.types or ALL_TYPES)
                    if rival.enum is None
                    else set()
                )
                kinds -= both
                rest = replace(plain, types=frozenset(kinds))
                if kinds and (not both or not disjoint.never_fits(rest, rival)):
                    raise Unenforceable(
                        one_of.place,
                        f"a value may fit both option {number} and option {other}; write anyOf, or "
                        "give each option a required property with a const of its own",
                    )
        return kinds

    def _scalar(self, kind: str, plain: Plain) -> Node:
        if kind == "string":
            return self._choices.texts.node(plain)
        if kind in ("integer", "number"):
            return number_node(plain, kind, self._budget)
        return Texts(("true", "false") if kind == "boolean" else ("null",))

    # ---- Arrays

    def _array(self, plain: Plain, depth: int) -> Node:
        most = plain.max_items
        first: list[Node] = []
        for parts in plain.prefix[:most]:
            try:
                first.append(self._node(parts, depth + 1))
            except Unsatisfiable:
                most = len(first)
                break
        rest: Node | None = None
        if most is None or most > len(first):
            try:
                rest = self._node(plain.items, depth + 1)
            except Unsatisfiable:
                most = len(first)
        if most is not None and most < plain.min_items:
            raise Unsatisfiable
        if plain.is_unique and (most is None or most > 1):
            return self._unique(plain, first, rest, most)
        return Array(tuple(first), rest, plain.min_items, None if rest is None else most)

    def _unique(
        self, plain: Plain, first: list[Node], rest: Node | None, most: int | None
    ) -> UniqueArray:
        values: dict[Hashable, str] = {}
        if not first and isinstance(rest, Texts):
            for text in rest.texts:
                value = json.loads(text, parse_float=SpelledNumber)
                values.setdefault(key_of(value), text)
        if not 0 < len(values) <= MAX_UNIQUE:
            raise Unenforceable(
                f"{plain.pointer or '#'}/uniqueItems",
                f"uniqueItems cannot be enforced where items have more than {MAX_UNIQUE} values, "
                "or schemas by their place; leave it out",
            )
        high = len(values) if most is None else min(most, len(values))
        if high < plain.min_items:
            raise Unsatisfiable
        return UniqueArray(tuple(values.values()), plain.min_items, high)

    # ---- Objects

    def _object(self, plain: Plain, depth: int) -> Node:
        properties: list[Property] = []
        for name in {**plain.properties, **plain.required}:
            is_required = name in plain.required
            try:
                if plain.names and not self._choices.fits(plain.names, name):
                    raise Unsatisfiable
                value = self._node(self._choices.value_parts(plain, name), depth + 1)
            except Unsatisfiable:
                if is_required:
                    raise
                continue
            properties.append(Property(name, value, is_required))
        others = self._others(plain, depth)
        is_open = plain.speaks_of_names and not any(o.schema.schema is False for o in plain.others)
        if not others and is_open and plain.min_properties > len(properties):
            self.among = " among objects of the properties that it names; say additionalProperties"
        return _counted(plain, properties, others)

    def _others(self, plain: Plain, depth: int) -> list[Others]:
        """Properties without a name in the schema."""
        if plain.max_properties is not None and plain.max_properties <= len(plain.required):
            return []
        names = None
        if plain.names:
            try:
                node = self._node((ANY_NAME, *plain.names), depth + 1)
            except Unsatisfiable:
                return []
            names = names_of(node, self._choices, plain.names[0].pointer)
        found: dict[Node, Others] = {}
        for region in regions(plain, self._choices, names):
            try:
                value = self._node(region.parts, depth + 1)
            except Unsatisfiable:
                continue
            known = found.get(value)
            among = region.names
            if known is not None and known.names is not None and among is not None:
                among = known.names | among
            found[value] = Others(among, value)
        return [one for one in found.values() if one.names is None or not one.names.is_empty]


def _counted(plain: Plain, properties: list[Property], others: list[Others]) -> Object:
    """An object of so many properties."""
    required = [one for one in properties if one.is_required]
    fewest, most = plain.min_properties, plain.max_properties
    if most is not None and most <= len(required):
        if most < max(len(required), fewest):
            raise Unsatisfiable
        return Object(tuple(required))
    if others and fewest > len(required) + 1:
        if fewest > len(properties):
            raise Unenforceable(
                f"{plain.pointer or '#'}/minProperties",
                "more than one cannot be enforced of properties that the schema does not name",
            )
        others = []
    if most is not None and most < fewest:
        raise Unsatisfiable
    if not others:
        if fewest > len(properties):
            raise Unsatisfiable
        most = None if most is None or most >= len(properties) else most
    low = fewest if fewest > len(required) else 0
    return Object(tuple(properties), tuple(others), low, most)


def _any_of(nodes: Iterable[Node]) -> Node | None:
    """One of several, of equal ones one, with all listed texts at once; None of none."""
    found: dict[Node, None] = {}
    texts: dict[str, None] = {}
    for node in nodes:
        for option in node.options if isinstance(node, AnyOf) else (node,):
            if isinstance(option, Texts):
                texts |= dict.fromkeys(option.texts)
            else:
                found[option] = None
    if Anything() in found:
        return Anything()
    if Text() in found:
        texts = {text: None for text in texts if not text.startswith('"')}
    options = ([Texts(tuple(texts))] if texts else []) + list(found)
    if not options:
        return None
    return options[0] if len(options) == 1 else AnyOf(tuple(options))
