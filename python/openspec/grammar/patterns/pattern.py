"""Regular expressions of schemas and requests: which are enforced, and what they mean in full.

ECMA 262's syntax as far as it is regular. A pattern is parsed into sets of characters, so that what
the grammar gets matches whole texts, and inside JSON no character that JSON writes as an escape.
"""

from __future__ import annotations

import re

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.characters import (
    CLASSES,
    CONTROLS,
    LINE_ENDS,
    MAX_CODE,
    SURROGATES,
    WIDE_CLASSES,
    Ranges,
    complement,
    set_of,
    union,
)
from openspec.grammar.patterns.nodes import (
    ANY,
    ENDLESS,
    Chars,
    Choice,
    Node,
    PatternError,
    Repeat,
)

MAX_PATTERN_CHARS = 4096
MAX_PLACES = 2048
"""Characters, sets of them counted as one, of a pattern whose repetitions are written out."""
MAX_DEPTH = 32


class Pattern:
    """A parsed pattern."""

    def __init__(self, source: str, *, is_wide: bool = False) -> None:
        """Parses it.

        Dialects differ in what they call white space. A text matches where it does in all of them;
        if `is_wide`, where it does in one: for texts that a pattern rules out.

        Raises:
            PatternError: not a pattern, one that no grammar enforces, or a limit is hit.
        """
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"it has more than {MAX_PATTERN_CHARS} characters")
        self._source, self._at, self._is_wide = source, 0, is_wide
        # Each alternative with whether it is bound to the start and to the end of the text.
        self._bound = self._options(0)
        if self._at < len(source):
            raise PatternError(f"unmatched ')' at character {self._at + 1}")
        if sum(_cost(node) for _, nodes, _ in self._bound for node in nodes) > MAX_PLACES:
            raise PatternError(f"written out it has more than {MAX_PLACES} characters")

    def automaton(self, *, is_anchored: bool) -> Automaton:
        """What whole texts match; unless `is_anchored`, the pattern may be anywhere in one.

        Raises:
            PatternError: the automaton is too large.
        """
        anything = Repeat(ANY, 0, ENDLESS)
        options = []
        for starts, nodes, ends in self._bound:
            before = () if starts or is_anchored else (anything,)
            after = () if ends or is_anchored else (anything,)
            options.append((*before, *nodes, *after))
        return Automaton.of(Choice(tuple(options)))

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
                kind = self._source[self._at - 1 : self._at + 2]
                raise PatternError(f"groups of the kind {kind!r} are not supported")
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
        found = _BOUNDS.match(self._source, self._at)
        if found is None:
            return None
        low, comma, high = found.groups("")
        if not low and not comma:
            return None
        if not low:
            raise PatternError("'{,n}' is no repetition in ECMA 262's syntax; write '{0,n}'")
        if len(low) > 6 or len(high) > 6:
            raise PatternError("a repetition is too large")
        self._at = found.end()
        most = int(high) if high else ENDLESS if comma else int(low)
        if most < int(low):
            raise PatternError("a repetition's bounds are in the wrong order")
        return int(low), most

    def _set(self) -> Ranges:
        is_negated, sets = self._take("^"), list[Ranges]()
        self._is_wide ^= is_negated  # what one may have, the other may not
        while not self._take("]"):
            first = self._member()
            if self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._member()
                low, high = first[0][0], last[-1][1]
                if low != first[-1][1] or high != last[0][0]:
                    sets += [first, set_of("-"), last]  # a class ends no range
                elif high < low:
                    raise PatternError("a range of characters is in the wrong order")
                else:
                    sets.append(((low, high),))
            else:
                sets.append(first)
        self._is_wide ^= is_negated
        ranges = complement(union(sets))
        return ranges if is_negated else complement(ranges)

    def _member(self) -> Ranges:
        character = self._peek()
        if not character:
            raise PatternError("unmatched '['")
        if _POSIX.match(self._source, self._at):
            raise PatternError("'[:name:]' is no class in ECMA 262's syntax; write out its ranges")
        self._at += 1
        return self._escape(is_set=True) if character == "\\" else set_of(character)

    def _escape(self, is_set: bool) -> Ranges:
        character = self._peek()
        self._at += 1
        classes = WIDE_CLASSES if self._is_wide else CLASSES
        if character and character in classes:
            return classes[character]
        if character and character in CONTROLS:
            return ((CONTROLS[character],) * 2,)
        if character == "b" and is_set:
            return set_of("\b")
        if character and character in "xuc":
            return self._numbered(character)
        if not character or character.isalnum():
            raise PatternError(f"\\{character} is not supported")
        return set_of(character)

    def _numbered(self, kind: str) -> Ranges:
        found = _NUMBERS[kind].match(self._source, self._at)
        if found is None:
            what = "a letter" if kind == "c" else "hexadecimal digits"
            raise PatternError(f"\\{kind} needs {what}")
        self._at = found.end()
        digits = found[0].strip("{}")
        code = ord(digits) % 32 if kind == "c" else int(digits, 16)
        if code > MAX_CODE or SURROGATES[0][0] <= code <= SURROGATES[0][1]:
            raise PatternError(f"\\{kind} names no character")
        return ((code, code),)


# Each looks at a fixed number of characters behind the place where it is tried, or at one run.
_BOUNDS = re.compile(r"([0-9]*)(?:(,)([0-9]*))?\}")
_POSIX = re.compile(r"\[[:.=]")
_NUMBERS = {
    "x": re.compile(r"[0-9A-Fa-f]{2}"),
    "u": re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,8}\}"),
    "c": re.compile(r"[A-Za-z]"),
}
_REFUSED_GROUPS = (
    ("?=", "lookaheads"),
    ("?!", "lookaheads"),
    ("?<=", "lookbehinds"),
    ("?<!", "lookbehinds"),
)


def _cost(node: Node) -> int:
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Choice):
        return sum(_cost(one) for option in node.options for one in option)
    times = node.high if node.high < ENDLESS else node.low + 1
    return max(1, times) * _cost(node.node)
