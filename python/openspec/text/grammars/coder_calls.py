"""Grammars of Qwen3-Coder's calls, which write texts bare and other values as JSON.

What is made here, `XmlParser` reads as arguments that fit the tool: it makes JSON of bare text by
the same `value_types`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice

from openspec.errors import RequestError
from openspec.grammar.formats import (
    Format,
    any_number,
    any_text,
    choice,
    json_of,
    matching,
    optional,
    sequence,
    text,
)
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.characters import TAG_OPENING, complement
from openspec.grammar.patterns.nodes import ENDLESS, Chars, PatternError, Repeat
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.schemas.json_tree import (
    AnyOf,
    Anything,
    JsonTree,
    Matching,
    Node,
    Object,
    Others,
    Ref,
    Text,
    Texts,
)
from openspec.text.parsers.value_types import TEXT, ValueTypes
from openspec.text.parsers.xml_calls import VALUE_ENDS, is_tag_name

MAX_OPTIONS = 10_000
"""Kinds of objects, or of values, among which one is chosen."""
MAX_COUNTED = 4096
"""Parameters that a count of them has written, once for each count that may come before."""
MAX_LENGTH = 2048
"""Characters that an automaton counts."""
_OTHER_NAMES = Pattern("[A-Za-z_][A-Za-z0-9_-]{0,63}").automaton(is_anchored=True)
_BARE = Chars(complement(TAG_OPENING))


def coder_parameters(arguments: JsonTree, types: ValueTypes) -> Format:
    """The parameters of a call, one after another in their tags.

    Raises:
        RequestError: they cannot be written in this form.
    """
    options = list(islice(_options(arguments.root, arguments.defs), MAX_OPTIONS + 1))
    if len(options) > MAX_OPTIONS:
        raise RequestError(f"it has more than {MAX_OPTIONS} kinds of arguments")
    objects = [
        Object((), (Others(None, Anything()),)) if isinstance(one, Anything) else one
        for one in options
        if isinstance(one, (Anything, Object))
    ]
    found = [_Parameters(one, types, arguments.defs).format() for one in objects]
    kept = [one for one in found if one is not None]
    if not kept:
        raise RequestError("no object fits its parameters in the form in which this model calls")
    return choice(*kept)


def _options(node: Node, defs: Mapping[str, Node]) -> Iterator[Node]:
    """What a node may be: each option once, whatever refers to whatever."""
    waiting, seen = [node], set[Node]()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, Ref):
            waiting.append(defs[one.name])
        elif isinstance(one, AnyOf):
            waiting.extend(reversed(one.options))
        else:
            yield one


class _Parameters:
    """The parameters of one kind of object, in order, as many as it may have."""

    def __init__(self, node: Object, types: ValueTypes, defs: Mapping[str, Node]) -> None:
        self._node, self._defs = node, defs
        self._named = [
            (_tagged(text(one.name), self._value(one.name, one.value, types)), one.is_required)
            for one in node.properties
            if one.is_required or is_tag_name(one.name)
        ]
        self._others = self._other_parameters()
        self._num_written = 0

    def format(self) -> Format | None:
        """None where it cannot have as many as it must."""
        return self._from(0, self._node.low, self._node.high)

    def _from(self, place: int, low: int, high: int | None) -> Format | None:
        """Those from a place on, at least `low` and at most `high` of them."""
        left = self._named[place:]
        if high is not None and high < sum(is_required for _, is_required in left):
            return None
        num_left = len(left)
        if (low <= 0 or low <= sum(is_required for _, is_required in left)) and (
            high is None or (high >= num_left and self._others is None)
        ):
            self._count(num_left)
            parts = [one if is_required else optional(one) for one, is_required in left]
            return sequence(text(""), *parts, *self._rest(0, high))
        if not left:
            return self._end(low, high)
        one, is_required = left[0]
        self._count(1)
        after = self._from(place + 1, low - 1, None if high is None else high - 1)
        options = [] if after is None else [sequence(one, after)]
        if not is_required and (skipped := self._from(place + 1, low, high)) is not None:
            options.append(skipped)
        return choice(*options) if options else None

    def _end(self, low: int, high: int | None) -> Format | None:
        """What may follow all that are named. A name may come twice: one other counts once."""
        if low > 1 or (low == 1 and self._others is None):
            return None
        return sequence(text(""), *self._rest(low, high))

    def _rest(self, low: int, high: int | None) -> list[Format]:
        if self._others is None:
            return []
        first = [self._others] if low > 0 else []
        return first if high is not None else [*first, any_number(self._others)]

    def _count(self, number: int) -> None:
        self._num_written += number
        if self._num_written > MAX_COUNTED:
            raise RequestError(
                "how many parameters it must have cannot be enforced in the form in which this "
                "model calls: it has too many"
            )

    def _other_parameters(self) -> Format | None:
        """One that is not named, with a text as its value; narrower than what may be."""
        options = []
        for others in self._node.others:
            names = _OTHER_NAMES if others.names is None else _OTHER_NAMES & others.names
            values = _texts(others.value, TEXT, self._defs)
            if not names.is_empty and values:
                options.append(_tagged(matching(names), choice(*values)))
        return choice(*options) if options else None

    def _value(self, name: str, node: Node, types: ValueTypes) -> Format:
        """A value as the form's parser reads it: bare text where it may be a text, else JSON."""
        if not is_tag_name(name):
            raise RequestError(
                f"{name[:100]!r} cannot be a parameter's name in the form in which this model calls"
            )
        kinds = types.get(name, TEXT)
        if "string" not in kinds:
            return json_of(JsonTree(node, self._defs), "line")
        try:
            options = _texts(node, kinds, self._defs)
        except PatternError as error:
            raise _unwritable(name, str(error)) from None
        if not options:
            raise _unwritable(name, "no text of it can be written")
        return choice(*options)


def _unwritable(name: str, reason: str) -> RequestError:
    return RequestError(
        f"{name[:100]!r} cannot be enforced in the form in which this model calls: {reason}"
    )


def _tagged(name: Format, content: Format) -> Format:
    return sequence(text("<parameter="), name, text(">\n"), content, text("\n</parameter>\n"))


def _texts(node: Node, kinds: frozenset[str], defs: Mapping[str, Node]) -> list[Format]:
    """The texts that a value may be, bare, and null where the parser reads it as such."""
    options: list[Format] = []
    for one in islice(_options(node, defs), MAX_OPTIONS):
        if isinstance(one, Anything) or one == Text():
            options.append(any_text(VALUE_ENDS))
        elif isinstance(one, Texts):
            options += [text(bare) for bare in _bare_texts(one, kinds)]
        elif isinstance(one, (Text, Matching)):
            automaton = _bare_automaton(one)
            if automaton is not None and not automaton.is_empty:
                options.append(matching(automaton))
    return options


def _bare_texts(node: Texts, kinds: frozenset[str]) -> Iterator[str]:
    for spelled in node.texts:
        value = json.loads(spelled)
        is_null = value is None and "null" in kinds
        is_text = isinstance(value, str) and not any(end in value for end in VALUE_ENDS)
        if is_null or (is_text and not ("null" in kinds and value.strip() == "null")):
            yield "null" if is_null else value


def _bare_automaton(node: Text | Matching) -> Automaton | None:
    """A text without what could begin a tag; None where it is no text."""
    if isinstance(node, Matching):
        return node.automaton.without(TAG_OPENING) if node.is_quoted else None
    if max(node.low, node.high or 0) > MAX_LENGTH:
        raise PatternError(f"only lengths up to {MAX_LENGTH} can be counted")
    high = ENDLESS if node.high is None else node.high
    return Automaton.of(Repeat(_BARE, node.low, high))
