"""JSON of a tree as rules of a grammar, in the library's EBNF.

Equal nodes are one rule, and what is regular is one automaton. Of white space there is what people
and models write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any

from openspec import _grammar
from openspec.grammar.formats import Format
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.rules.containers import (
    GAP,
    SPACE,
    array_body,
    factored,
    literal,
    object_parts,
    unique_body,
)
from openspec.grammar.rules.lengths import Lengths
from openspec.grammar.rules.names import affordable
from openspec.grammar.schemas.json_tree import (
    AnyOf,
    Anything,
    Array,
    JsonTree,
    Matching,
    Node,
    Object,
    Others,
    Ref,
    Text,
    Texts,
    UniqueArray,
)

MAX_INDENT = 32
_LINE = ('""', '" "')
LAYOUTS = {
    "line": _LINE,
    # Spelled out: the library would write a repetition as rules that do not know what follows.
    "indented": (*_LINE, *('"\\n"' + " [ \\t]" * count for count in range(MAX_INDENT + 1))),
}
"""White space after a bracket or comma and before a closing bracket, by the name of a layout."""
_FOLLOWS = r'(=(["\[{}\]\-0-9tfn]))'
"""What begins a value, a name or an end: with it most tokens are decided when compiling."""

_DIGIT = "[0-9A-Fa-f]"
_ESCAPE = (
    rf'\\(["\\/bfnrt]|u([0-9A-Ca-cEFef]{_DIGIT}{{3}}|[Dd][0-7]{_DIGIT}{{2}}'
    rf"|[Dd][89ABab]{_DIGIT}{{2}}\\u[Dd][C-Fc-f]{_DIGIT}{{2}}))"
)
STRING = Pattern(rf'"([^"\\\x00-\x1f]|{_ESCAPE})*"').automaton(is_anchored=True)
"""Any JSON string; halves of a surrogate pair stand together."""
SIMPLE = Pattern(r"-?(0|[1-9]\d*)(\.\d+)?([Ee][+-]?\d+)?|true|false|null").automaton(
    is_anchored=True
)
"""Any JSON number, true, false or null."""
_ANYTHING: tuple[Node, ...] = (
    Matching(SIMPLE, is_quoted=False),
    Text(),
    Object((), (Others(None, Anything()),)),
    Array((), Anything()),
)


def json_rules(tree: JsonTree, layout: str, longest: int, behind_quote: int) -> str:
    """The grammar of a tree; its rule `root` is the value. `layout`: see `LAYOUTS`.

    Of the vocabulary: characters of its `longest` token, and the most `behind_quote` in one.
    """
    nodes = list(_nodes_of(tree))
    texts = (node for node in nodes if isinstance(node, Text))
    objects = (node for node in nodes if isinstance(node, Object))
    writer = _Writer(tree, layout, Lengths(texts, longest, behind_quote), affordable(objects))
    return writer.text()


def _nodes_of(tree: JsonTree) -> Iterator[Node]:
    waiting: list[Node] = [tree.root, *tree.defs.values()]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, AnyOf):
            waiting += node.options
        elif isinstance(node, Array):
            waiting += [*node.first, *([] if node.rest is None else [node.rest])]
        elif isinstance(node, Object):
            waiting += [one.value for one in node.properties]
            waiting += [one.value for one in node.others]


class _Writer:
    """Writes rules one after another: a value that is met in one becomes a rule of its own."""

    def __init__(
        self,
        tree: JsonTree,
        layout: str,
        lengths: Lengths,
        names: Mapping[Automaton, Automaton],
    ) -> None:
        self._tree, self._lengths, self._other_names = tree, lengths, names
        self._names: dict[object, str] = {}
        self._waiting: list[tuple[str, Callable[[], str]]] = []
        self._gaps = {SPACE: _LINE, GAP: LAYOUTS[layout]}

    def text(self) -> str:
        """All rules."""
        rules = {"root": self.value(self._tree.root)}
        while self._waiting:
            name, body = self._waiting.pop()
            rules[name] = body()
        rules |= self._lengths.rules
        rules |= {name: f"({' | '.join(gap)}) {_FOLLOWS}" for name, gap in self._gaps.items()}
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items())

    def rule(self, key: object, body: Callable[[], str]) -> str:
        """The name of the rule with a key; its body may refer to it."""
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"json_{len(self._names)}"
            self._waiting.append((name, body))
        return name

    def value(self, node: Node) -> str:
        """A node as one element."""
        if isinstance(node, Ref):
            return self.value(self._tree.defs[node.name])
        if isinstance(node, Texts) and len(node.texts) == 1:
            return literal(node.texts[0])
        if isinstance(node, Matching):
            found = _whole(node)
            return self.rule(found, found.spelled)
        if node == Text():
            return self.rule(STRING, STRING.spelled)
        return self.rule(node, lambda: self._body(node))

    def other_name(self, names: Automaton | None) -> str:
        """A property's name in its quotes."""
        if names is None:
            return self.value(Text())
        return self.value(Matching(self._other_names.get(names, names), is_quoted=True))

    def _body(self, node: Node) -> str:
        if isinstance(node, Texts):
            return _one_of(node.texts)
        if isinstance(node, Text):
            return self._lengths.body_of(node)
        if isinstance(node, Array):
            return array_body(node, self)
        if isinstance(node, UniqueArray):
            return unique_body(node, self)
        if isinstance(node, Object):
            return " ".join(object_parts(node, self))
        options = node.options if isinstance(node, AnyOf) else _ANYTHING
        return factored([self._parts(option) for option in _united(options)])

    def _parts(self, node: Node) -> list[str]:
        """An option as the elements that others may have in common with it."""
        while isinstance(node, Ref):
            node = self._tree.defs[node.name]
        if isinstance(node, Object):
            return object_parts(node, self)
        return [self.value(node)]


def _one_of(texts: Sequence[str]) -> str:
    try:
        return Automaton.of_texts(texts).spelled()
    except PatternError:  # of too many states
        return " | ".join(map(literal, texts))


def _united(options: Sequence[Node]) -> list[Node]:
    """Options that are regular as one automaton for strings and one for the rest.

    So no text is read as several of them, and strings of any length stay one rule of the tree.
    """
    found: list[Node] = []
    texts = {text: None for one in options if isinstance(one, Texts) for text in one.texts}
    for is_string in (True, False):
        automata = [
            _whole(one)
            for one in options
            if isinstance(one, Matching) and one.is_quoted == is_string
        ]
        automata += [STRING] if is_string and Text() in options else []
        listed = tuple(text for text in texts if text.startswith('"') == is_string)
        parts: list[Node] = [Matching(one, is_quoted=False) for one in automata]
        parts += [Texts(listed)] if listed else []
        if len(parts) > 1:
            with suppress(PatternError):  # of too many states
                whole = reduce(or_, automata, Automaton.of_texts(listed))
                parts = [Matching(whole, is_quoted=False)]
        found += parts
    is_regular = (Texts, Matching)
    return [*found, *(one for one in options if one != Text() and not isinstance(one, is_regular))]


def _whole(node: Matching) -> Automaton:
    return node.automaton.quoted() if node.is_quoted else node.automaton


def compile_format(
    vocabulary: _grammar.Vocabulary, format: Format, behind_quote: int | None = None
) -> bytes:
    """The compiled grammar of a format.

    `behind_quote`: `chars_behind_quote` of the vocabulary. Without it automata count every length
    below that of the longest token, whatever that takes.

    Raises:
        ValueError: the library refuses it.
    """
    longest = vocabulary.max_token_chars
    behind = longest if behind_quote is None else behind_quote
    tag = {"type": "structural_tag", "format": _with_rules(format, longest, behind)}
    return _grammar.compile_structural_tag(vocabulary, json.dumps(tag, ensure_ascii=False))


def _with_rules(format: Any, longest: int, behind_quote: int) -> Any:
    if isinstance(format, list):
        return [_with_rules(one, longest, behind_quote) for one in format]
    if not isinstance(format, dict):
        return format
    if format.get("type") == "json_schema":
        rules = json_rules(format["json_schema"], format["layout"], longest, behind_quote)
        return {"type": "grammar", "grammar": rules}
    return {key: _with_rules(value, longest, behind_quote) for key, value in format.items()}
