"""Regular expressions of schemas and requests: which are enforced, and what they mean in full.

ECMA 262's syntax as far as it is regular. A pattern is parsed into sets of characters, so that what
the grammar gets matches whole texts, and inside JSON no character that JSON writes as an escape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from openspec.grammar.patterns.characters import (
    CLASSES,
    CONTROLS,
    ESCAPED_IN_JSON,
    LINE_ENDS,
    MAX_CODE,
    SURROGATES,
    Ranges,
    complement,
    set_of,
    union,
)

MAX_PATTERN_CHARS = 4096
MAX_REPEATS = 2048
"""States that the repetitions of one pattern may unroll to."""
MAX_UNROLLED = 128
"""Above it the library counts instead, which makes every mask a thousand times as slow."""
MAX_DEPTH = 32
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


class Pattern:
    """A parsed pattern."""

    def __init__(self, source: str) -> None:
        """Parses it.

        Raises:
            PatternError: not a pattern, one that no grammar enforces, or a limit is hit.
        """
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"it has more than {MAX_PATTERN_CHARS} characters")
        self._source, self._at = source, 0
        options = self._options(0)
        if self._at < len(source):
            raise PatternError(f"unmatched ')' at character {self._at + 1}")
        # Each alternative with whether it is bound to the start and to the end of the text.
        self._bound = options
        _check_cost([nodes for _, nodes, _ in options])

    def whole(self, *, is_anchored: bool) -> Choice:
        """What whole texts match; unless `is_anchored`, the pattern may be anywhere in one."""
        anything = Repeat(ANY, 0, ENDLESS)
        options = []
        for starts, nodes, ends in self._bound:
            before = () if starts or is_anchored else (anything,)
            after = () if ends or is_anchored else (anything,)
            options.append((*before, *nodes, *after))
        return Choice(tuple(options))

    # ---- Parsing

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self, marker: str) -> bool:
        if self._source.startswith(marker, self._at):
            self._at += len(marker)
            return True
        return False

    def _options(self, depth: int) -> list[tuple[bool, tuple[Node, ...], bool]]:
        if depth > MAX_DEPTH:
            raise PatternError(f"it is nested deeper than {MAX_DEPTH} groups")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options

    def _sequence(self, depth: int) -> tuple[bool, tuple[Node, ...], bool]:
        starts = ends = False
        nodes: list[Node] = []
        while (character := self._peek()) and character not in "|)":
            if self._take("^"):
                if depth or nodes:
                    raise PatternError("'^' stands elsewhere than at the start of an alternative")
                starts = True
            elif self._take("$"):
                if depth or self._peek() not in ("", "|"):
                    raise PatternError("'$' stands elsewhere than at the end of an alternative")
                ends = True
            else:
                nodes.append(self._repeated(self._atom(depth)))
        return starts, tuple(nodes), ends

    def _atom(self, depth: int) -> Node:
        if self._take("("):
            for marker, what in _REFUSED_GROUPS:
                if self._take(marker):
                    raise PatternError(f"{what} ('({marker}') are no regular expressions")
            if not self._take("?:") and (self._take("?<") or self._take("?P<")):
                end = self._source.find(">", self._at)
                if end < 0:
                    raise PatternError("a group's name has no end")
                self._at = end + 1
            elif self._peek() == "?":
                raise PatternError("flags of groups are not supported")
            options = self._options(depth + 1)
            if not self._take(")"):
                raise PatternError("unmatched '('")
            return Choice(tuple(nodes for _, nodes, _ in options))
        if self._take("["):
            return Chars(self._set())
        if self._take("."):
            return Chars(complement(LINE_ENDS))
        if self._take("\\"):
            return Chars(self._escape(is_set=False))
        character = self._peek()
        if character in "*+?":
            raise PatternError(f"nothing to repeat before {character!r}")
        self._at += 1
        return Chars(set_of(character))

    def _repeated(self, node: Node) -> Node:
        while True:
            start = self._at
            if self._take("*"):
                low, high = 0, ENDLESS
            elif self._take("+"):
                low, high = 1, ENDLESS
            elif self._take("?"):
                low, high = 0, 1
            elif self._take("{"):
                bounds = self._bounds()
                if bounds is None:  # a brace that is a character, as ECMA's old syntax has it
                    self._at = start
                    return node
                low, high = bounds
            else:
                return node
            self._take("?")  # a lazy one matches the same texts
            if self._peek() in ("*", "+", "?") or isinstance(node, Repeat):
                raise PatternError("a repetition is repeated without a group")
            node = Repeat(node, low, high)

    def _bounds(self) -> tuple[int, int] | None:
        end = self._source.find("}", self._at)
        low, comma, high = self._source[self._at : max(end, self._at)].partition(",")
        if end < 0 or not (low.isdecimal() and low.isascii()) or (high and not high.isdecimal()):
            return None
        if len(low) > 6 or len(high) > 6:
            raise PatternError("a repetition is too large")
        self._at = end + 1
        most = int(high) if high else ENDLESS if comma else int(low)
        if most < int(low):
            raise PatternError("a repetition's bounds are in the wrong order")
        return int(low), most

    def _set(self) -> Ranges:
        negated, sets = self._take("^"), list[Ranges]()
        while not self._take("]"):
            first = self._member()
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                low, high = first[0][0], last[-1][1]
                if len(first) + len(last) > 2 or low != first[0][1] or high != last[0][0]:
                    raise PatternError("a range of characters has a class as its end")
                if high < low:
                    raise PatternError("a range of characters is in the wrong order")
                sets.append(((low, high),))
            else:
                sets.append(first)
        ranges = union(sets)
        return complement(ranges) if negated else ranges

    def _member(self) -> Ranges:
        character = self._peek()
        if not character:
            raise PatternError("unmatched '['")
        self._at += 1
        return self._escape(is_set=True) if character == "\\" else set_of(character)

    def _escape(self, is_set: bool) -> Ranges:
        character = self._peek()
        self._at += 1
        if character in CLASSES and character:
            return CLASSES[character]
        if character in CONTROLS and character:
            return ((CONTROLS[character],) * 2,)
        if character == "b" and is_set:
            return set_of("\b")
        if character in ("x", "u"):
            braces = character == "u" and self._take("{")
            end = (
                self._source.find("}", self._at) if braces else self._at + (2, 4)[character == "u"]
            )
            digits = self._source[self._at : max(end, self._at)]
            try:
                code = int(digits, 16)
            except ValueError:
                raise PatternError(f"\\{character} needs hexadecimal digits") from None
            self._at = end + braces
            if code > MAX_CODE or SURROGATES[0][0] <= code <= SURROGATES[0][1]:
                raise PatternError(f"\\{character} names no character")
            return ((code, code),)
        if not character or character.isalnum():
            raise PatternError(f"\\{character} is not supported")
        return set_of(character)


_REFUSED_GROUPS = (
    ("?=", "lookaheads"),
    ("?!", "lookaheads"),
    ("?<=", "lookbehinds"),
    ("?<!", "lookbehinds"),
)


def _check_cost(options: Iterable[Sequence[Node]]) -> None:
    if sum(_cost(node) for nodes in options for node in nodes) > MAX_REPEATS:
        raise PatternError(f"its repetitions unroll to more than {MAX_REPEATS} states")


def _cost(node: Node) -> int:
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Choice):
        return sum(_cost(one) for option in node.options for one in option)
    times = node.high if node.high < ENDLESS else node.low + 1
    return max(1, times) * _cost(node.node)


def lengths(node: Node) -> tuple[int, int]:
    """The fewest and the most characters of what it matches."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        low, high = lengths(node.node)
        return low * node.low, min(high * node.high, ENDLESS)
    ends = [sequence_lengths(option) for option in node.options]
    return min(low for low, _ in ends), max(high for _, high in ends)


def sequence_lengths(nodes: Sequence[Node]) -> tuple[int, int]:
    """The fewest and the most characters of what a sequence matches."""
    ends = [lengths(node) for node in nodes]
    return sum(low for low, _ in ends), min(sum(high for _, high in ends), ENDLESS)


def of_length(low: int, high: int) -> Choice:
    """Any text of `low` to `high` characters.

    Raises:
        PatternError: that takes more than the bounds of one repetition.
    """
    choice = Choice(((Repeat(ANY, low, high),),))
    _check_cost(choice.options)
    return choice


def bounded(choice: Choice, low: int, high: int) -> Choice:
    """The choice as far as its texts have `low` to `high` characters.

    Raises:
        PatternError: that takes more than the bounds of one repetition.
    """
    options = []
    for nodes in choice.options:
        fewest, most = sequence_lengths(nodes)
        if low <= fewest and most <= high:
            options.append(nodes)
            continue
        if fewest > high or most < low:
            continue
        # One repetition of a character may take up what the rest, of a fixed length, leaves.
        loose = [i for i, node in enumerate(nodes) if len(set(lengths(node))) > 1]
        node = nodes[loose[0]] if len(loose) == 1 else None
        if not isinstance(node, Repeat) or lengths(node.node) != (1, 1):
            raise PatternError("its length cannot be bounded as well")
        rest = fewest - node.low
        bounds = max(node.low, low - rest), min(node.high, high - rest)
        options.append((*nodes[: loose[0]], Repeat(node.node, *bounds), *nodes[loose[0] + 1 :]))
    if not options:
        raise PatternError("no text of these lengths matches it")
    _check_cost(options)
    return Choice(tuple(options))


def other_than(texts: Sequence[str]) -> Choice:
    """Any text but those given."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    anything = Repeat(ANY, 0, ENDLESS)
    options: list[tuple[Node, ...]] = [] if "" in texts else [()]
    others = complement(union([set_of(first) for first in by_first]))
    options.append((Chars(others), anything))
    for first, rests in by_first.items():
        options.append((Chars(set_of(first)), other_than(rests)))
    return Choice(tuple(options))


def render(node: Node, without: Ranges = ()) -> str:
    """The pattern in ASCII, in the library's syntax, for texts without some characters.

    Raises:
        PatternError: it needs one of those.
    """
    if isinstance(node, Chars):
        return _render_set(node.ranges, without)
    if isinstance(node, Repeat):
        inner = render(node.node, without)
        return _render_repeat(f"({inner})" if isinstance(node.node, Repeat) else inner, node)
    options, failure = [], PatternError("no text matches it")
    for option in node.options:
        try:
            options.append("".join(render(one, without) for one in option))
        except PatternError as error:
            failure = error
    if not options:
        raise failure
    return f"({'|'.join(options)})"


def _render_repeat(inner: str, node: Repeat) -> str:
    """Bounds above the limit in parts that each keep to it, and of which only one fits a text."""
    low, high = node.low, node.high
    if (low, high) == (0, 1):
        return f"(|{inner})"  # the library's "?" also lets the end of what it may leave out repeat
    short = {(0, ENDLESS): "*", (1, ENDLESS): "+"}.get((low, high))
    if short is not None:
        return inner + short
    if low > MAX_UNROLLED or MAX_UNROLLED < high < ENDLESS:
        most = ENDLESS if high == ENDLESS else high - MAX_UNROLLED
        rest = _render_repeat(inner, Repeat(node.node, max(0, low - MAX_UNROLLED), most))
        longer = f"{inner}{{{MAX_UNROLLED}}}{rest}"
        return longer if low >= MAX_UNROLLED else f"({inner}{{{low},{MAX_UNROLLED - 1}}}|{longer})"
    return f"{inner}{{{low},{'' if high == ENDLESS else high}}}"


def _render_set(ranges: Ranges, without: Ranges) -> str:
    if without:
        ranges = complement(union([complement(ranges), without]))
    if not ranges:
        escaped = without == ESCAPED_IN_JSON
        what = "that JSON writes as an escape" if escaped else "that may not be there"
        raise PatternError(f"it needs a character {what}")
    text = "".join(
        _code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges
    )
    return f"[{text}]"


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"
