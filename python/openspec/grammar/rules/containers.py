"""Objects, arrays and choices among them as rules.

A rule that ends an object or array has the closing bracket in it, so that masks know what follows.
Where a property may be left out, the rest of the object from there is a rule: an object has one or
two for each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Protocol, TypeAlias

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.schemas.json_tree import Array, Node, Object, UniqueArray

Parts: TypeAlias = list[str]
"""Elements of a sequence: texts in quotes, names of rules, choices in brackets."""

GAP, SPACE = "json_gap", "json_space"
"""Rules of white space: beside a bracket or behind a comma, and behind a colon."""
_BLOCK = 16
"""Properties that may be left out and are told apart by their names' characters: from each of them
the rest of its block and the blocks behind it are rules that are tried at once."""
_MAX_FACTORED = 64


class Writer(Protocol):
    """What writes the rules of a whole tree."""

    def value(self, node: Node) -> str:
        """A node as one element."""

    def rule(self, key: object, body: Callable[[], str]) -> str:
        """The name of the rule with a key; its body may refer to it."""

    def other_name(self, names: Automaton | None) -> str:
        """The name, in quotes, of a property without a name of its own."""


def literal(text: str) -> str:
    """A text as a grammar writes it."""
    return json.dumps(text, ensure_ascii=False)


_MORE = f'"," {GAP}'
_END_OF_ARRAY, _END_OF_OBJECT = f'{GAP} "]"', f'{GAP} "}}"'


# ---- Arrays


def array_body(node: Array, writer: Writer) -> str:
    """Items in order, then any number of others."""
    items = [writer.value(one) for one in node.first[: node.high]]
    low = max(0, node.low - len(items))
    high = None if node.high is None else node.high - len(items)
    rest = None if node.rest is None or high == 0 else writer.value(node.rest)
    if rest is not None and not items:
        items, low, high = [rest], max(0, low - 1), None if high is None else high - 1
    after = _END_OF_ARRAY if rest is None else _others_of_array(rest, low, high, writer)
    for at in reversed(range(1, len(items))):
        more, end = f"{_MORE} {items[at]} {after}", _END_OF_ARRAY
        after = more if at < node.low else writer.rule((node, at), partial(str, f"{end} | {more}"))
    if not items:
        return f'"[" {_END_OF_ARRAY}'
    whole = f"{items[0]} {after}"
    return f'"[" {GAP} {whole}' if node.low else f'"[" {GAP} ("]" | {whole})'


def _others_of_array(item: str, low: int, high: int | None, writer: Writer) -> str:
    """So many more items, and the end."""
    more = f"{_MORE} {item}"
    if high is not None:
        return f"({more}){{{low},{high}}} {_END_OF_ARRAY}" if high else _END_OF_ARRAY
    key = ("items", item)
    any_number = writer.rule(key, lambda: f"{_END_OF_ARRAY} | {more} {writer.rule(key, str)}")
    return f"({more}){{{low}}} {any_number}" if low else any_number


def unique_body(node: UniqueArray, writer: Writer) -> str:
    """Each set of items that stand there already is a rule."""
    texts = list(map(literal, dict.fromkeys(node.texts)))
    high = min(node.high, len(texts))

    def after(taken: frozenset[int]) -> str:
        options = [_END_OF_ARRAY] if len(taken) >= node.low else []
        if len(taken) < high:
            options.append(f"{_MORE} {writer.rule((node, taken), lambda: items(taken))}")
        return " | ".join(options)

    def items(taken: frozenset[int]) -> str:
        left = [one for one in range(len(texts)) if one not in taken]
        return " | ".join(f"{texts[one]} ({after(taken | {one})})" for one in left)

    if not high:
        return f'"[" {_END_OF_ARRAY}'
    whole = items(frozenset())
    return f'"[" {GAP} ({whole})' if node.low else f'"[" {GAP} ("]" | {whole})'


# ---- Objects


def object_parts(node: Object, writer: Writer) -> Parts:
    """Properties in order, those that may be left out too, then others."""
    return _Members(node, writer).whole()


class _Members:
    """What may follow in an object: the next property that is written, or the end.

    `at` is the first property that may still come (behind the last: others), and `count` how many
    have been written, where that matters.
    """

    def __init__(self, node: Object, writer: Writer) -> None:
        self._node, self._writer = node, writer
        self._num = len(node.properties)
        self._needed = [0]  # required properties from each on
        for one in reversed(node.properties):
            self._needed.append(self._needed[-1] + one.is_required)
        self._needed.reverse()
        high = node.high
        if high is not None and high >= self._num and not node.others:
            high = None
        is_counted = node.low > self._needed[0] or high is not None
        self._low, self._high = node.low if is_counted else 0, high
        self._step = 1 if is_counted else 0

    def whole(self) -> Parts:
        parts = ['"{"', GAP]
        if not self._can_go(0, 0):
            return [*parts, '"}"']
        if self._can_end(0, 0):
            return [*parts, f'("}}" | {self._next(0, 0)})']
        return [*parts, *self._required(0, 0)]

    def _can_end(self, at: int, count: int) -> bool:
        return not self._needed[at] and count >= self._low

    def _can_go(self, at: int, count: int) -> bool:
        """Whether one more may be written, and the bounds still be kept."""
        left = self._num - at
        fewest = count + max(self._step, self._needed[at] * self._step)
        is_enough = bool(self._node.others) or (left > 0 and count + left * self._step >= self._low)
        return is_enough and (self._high is None or fewest <= self._high)

    def _required(self, at: int, count: int) -> Parts:
        """One member and what follows, where none may be left out."""
        parts: Parts = []
        while at < self._num and not self._can_skip(at, count):
            parts += self._member(at)
            at, count = at + 1, count + self._step
            if self._can_end(at, count) or not self._can_go(at, count):
                return [*parts, *self._after(at, count)]
            parts.append(_MORE)
        return [*parts, self._next(at, count)]

    def _can_skip(self, at: int, count: int) -> bool:
        return not self._node.properties[at].is_required and self._can_go(at + 1, count)

    def _after(self, at: int, count: int) -> Parts:
        """What follows a member."""
        count = count if self._high is not None else min(count, self._low)
        if not self._can_go(at, count):
            return [_END_OF_OBJECT]
        if at == self._num and self._high is not None:
            low, high = max(0, self._low - count), self._high - count
            return [f"({_MORE} {self._other()}){{{low},{high}}}", _END_OF_OBJECT]
        if not self._can_end(at, count):
            return [_MORE, *self._required(at, count)]
        more = self._next(at, count)
        key = (self, "after", at, count)
        return [self._writer.rule(key, lambda: f"{_END_OF_OBJECT} | {_MORE} {more}")]

    def _next(self, at: int, count: int) -> str:
        """A rule of one member and what follows: this property, or one behind it."""
        return self._writer.rule((self, "next", at, count), lambda: self._choice(at, count))

    def _choice(self, at: int, count: int) -> str:
        if at == self._num:
            return " ".join([self._other(), *self._after(at, count + self._step)])
        # Of the properties of a whole block, what names have in common is read once.
        size = _BLOCK if at % _BLOCK == 0 else 1
        options: list[Parts] = []
        for place in range(at, min(at + size, self._num)):
            if self._high is None or count + 1 + self._needed[place + 1] <= self._high:
                after = self._after(place + 1, count + self._step)
                options.append([*self._member(place), *after])
            if not self._can_skip(place, count):
                break
        else:
            options.append([self._next(min(at + size, self._num), count)])
        return factored(options)

    def _member(self, at: int) -> Parts:
        one = self._node.properties[at]
        name = literal(f"{literal(one.name)}:")
        return [name, SPACE, self._writer.value(one.value)]

    def _other(self) -> str:
        """A rule of one property without a name of its own."""
        return self._writer.rule(("other", self._node.others), self._any_other)

    def _any_other(self) -> str:
        options = []
        for one in self._node.others:
            name, value = self._writer.other_name(one.names), self._writer.value(one.value)
            options.append(f'{name} ":" {SPACE} {value}')
        return " | ".join(options)


# ---- Choices


def factored(options: Sequence[Parts]) -> str:
    """One of several sequences; what some begin with alike, to a character, is written once."""
    if len(options) == 1:
        return " ".join(options[0])
    return _factored([_spread(option) for option in options], 0)


def _factored(options: Sequence[Parts], depth: int) -> str:
    groups: dict[str, list[Parts]] = {}
    for option in options:
        groups.setdefault(option[0] if option else '""', []).append(option)
    written = []
    for group in groups.values():
        if len(group) == 1 or depth > _MAX_FACTORED:
            written += [" ".join(option) or '""' for option in group]
            continue
        columns = zip(*group, strict=False)
        alike = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, columns)]
        rests = _factored([option[len(alike) :] for option in group], depth + 1)
        written.append(f"{' '.join(alike)} ({rests})")
    return " | ".join(written)


def _spread(parts: Parts) -> Parts:
    """The same sequence with texts in single characters."""
    found: Parts = []
    for part in parts:
        is_text = part.startswith('"') and part.endswith('"')
        found += map(literal, json.loads(part)) if is_text else [part]
    return found
