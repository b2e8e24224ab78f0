"""Values of a tree, drawn at random, and whether a text is one: an oracle without a grammar."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.schemas.json_tree import (
    AnyOf,
    Anything,
    Array,
    JsonTree,
    Matching,
    Node,
    Object,
    Ref,
    Text,
    Texts,
    UniqueArray,
)
from openspec.grammar.schemas.values import SpelledNumber, json_text, key_of

MOST_DEPTH = 6


def read(text: str) -> object:
    """JSON with its numbers as they are spelled."""
    return json.loads(text, parse_float=SpelledNumber, parse_int=_whole)


def _whole(text: str) -> object:
    return int(text) if text != "-0" else SpelledNumber(text)


def text_of(automaton: Automaton, rng: random.Random) -> str:
    """One of an automaton's texts; after a while it takes the nearest end."""
    rows, classes, ends = automaton._rows, automaton._classes, automaton._ends
    left = dict.fromkeys(ends, 0)
    while len(left) < len(rows):
        for state, row in enumerate(rows):
            near = [left[to] for to in row.values() if to in left]
            if state not in left and near:
                left[state] = min(near) + 1
    out, state = "", 0
    while not (state in ends and (not rows[state] or len(out) > 12 or rng.random() < 0.3)):
        ways = sorted(rows[state].items())
        if len(out) > 12:
            ways = [min(ways, key=lambda way: left[way[1]])]
        one, state = rng.choice(ways)
        low, high = rng.choice(classes[one])
        out += chr(rng.randint(low, min(high, low + 200)))
    return out


class Drawer:
    """Texts of a tree."""

    def __init__(self, tree: JsonTree, rng: random.Random) -> None:
        self.tree, self.rng = tree, rng

    def text(self) -> str | None:
        """A value of the tree; None where it did not end."""
        try:
            return self._drawn(self.tree.root, 0)
        except RecursionError:
            return None

    def _drawn(self, node: Node, depth: int) -> str:
        rng, is_deep = self.rng, depth > MOST_DEPTH
        if isinstance(node, Ref):
            return self._drawn(self.tree.defs[node.name], depth + 1)
        if isinstance(node, AnyOf):
            return self._drawn(rng.choice(node.options), depth)
        if isinstance(node, Anything):
            return rng.choice(['"x"', "1", "-2.5", "null", "true", "[]", '{"a":[1]}', '""', "{}"])
        if isinstance(node, Texts):
            return rng.choice(node.texts)
        if isinstance(node, Matching):
            text = text_of(node.automaton, rng)
            return f'"{text}"' if node.is_quoted else text
        if isinstance(node, Text):
            high = node.low + 3 if node.high is None else node.high
            size = rng.choice([node.low, min(high, node.low + 2), high if high < 300 else node.low])
            return json.dumps("".join(rng.choice("aé 0😀") for _ in range(size)))
        if isinstance(node, UniqueArray):
            size = rng.randint(node.low, node.high)
            return f"[{','.join(rng.sample(node.texts, size))}]"
        if isinstance(node, Array):
            most = len(node.first) + 3 * (node.rest is not None) if node.high is None else node.high
            most = max(node.low, 0 if is_deep else min(most, node.low + 3))
            items = [
                node.first[i] if i < len(node.first) else node.rest
                for i in range(rng.randint(node.low, most))
            ]
            return f"[{','.join(self._drawn(item, depth + 1) for item in items)}]"
        return self._object(node, depth)

    def _object(self, node: Object, depth: int) -> str:
        rng = self.rng
        chosen = [p for p in node.properties if p.is_required]
        optional = [p for p in node.properties if not p.is_required]
        high = len(node.properties) + 2 if node.high is None else node.high
        least = max(0, min(node.low - len(chosen), len(optional)))
        most = min(len(optional), high - len(chosen)) if depth <= MOST_DEPTH else least
        chosen += rng.sample(optional, rng.randint(min(least, most), most))
        chosen.sort(key=node.properties.index)
        pairs = [(json_text(p.name), self._drawn(p.value, depth + 1)) for p in chosen]
        room = high - len(chosen)
        need = max(0, node.low - len(chosen))
        for _ in range(rng.randint(need, max(need, min(room, 2))) if node.others else 0):
            others = rng.choice(node.others)
            name = "any" if others.names is None else text_of(others.names, rng)
            pairs.append((f'"{name}"', self._drawn(others.value, depth + 1)))
        return "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}"


def belongs(tree: JsonTree, text: str) -> bool:
    """Whether a JSON text, but for its white space, is one of the tree's."""
    return _is(tree, tree.root, read(text))


def _is(tree: JsonTree, node: Node, value: object) -> bool:
    if isinstance(node, Ref):
        return _is(tree, tree.defs[node.name], value)
    if isinstance(node, AnyOf):
        return any(_is(tree, option, value) for option in node.options)
    if isinstance(node, Anything):
        return True
    if isinstance(node, Texts):
        return json_text(value) in node.texts
    if isinstance(node, Matching):
        if node.is_quoted:
            return isinstance(value, str) and node.automaton.accepts(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and node.automaton.accepts(json_text(value))
    if isinstance(node, Text):
        high = len(value) if node.high is None and isinstance(value, str) else node.high
        return isinstance(value, str) and node.low <= len(value) <= high
    if isinstance(node, UniqueArray):
        if not isinstance(value, list) or not node.low <= len(value) <= node.high:
            return False
        texts = [json_text(one) for one in value]
        return len(set(texts)) == len(texts) and set(texts) <= set(node.texts)
    if isinstance(node, Array):
        if not isinstance(value, list) or len(value) < node.low:
            return False
        if node.high is not None and len(value) > node.high:
            return False
        items = [node.first[i] if i < len(node.first) else node.rest for i in range(len(value))]
        return all(i is not None and _is(tree, i, v) for i, v in zip(items, value, strict=True))
    return isinstance(value, Mapping) and _is_object(tree, node, value)


def _is_object(tree: JsonTree, node: Object, value: Mapping[str, object]) -> bool:
    high = len(value) if node.high is None else node.high
    if not node.low <= len(value) <= high:
        return False
    named = {one.name: one for one in node.properties}
    order = [name for name in value if name in named]
    if order != [name for name in named if name in value] or list(value)[: len(order)] != order:
        return False
    if any(one.is_required and one.name not in value for one in node.properties):
        return False
    return all(
        _is(tree, named[name].value, one)
        if name in named
        else any(
            (o.names is None or o.names.accepts(name)) and _is(tree, o.value, one)
            for o in node.others
        )
        for name, one in value.items()
    )


def same_value(one: str, two: str) -> bool:
    """Whether two JSON texts say the same."""
    return key_of(read(one)) == key_of(read(two))
