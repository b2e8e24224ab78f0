"""Texts of a schema: patterns, formats and lengths as automata."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, reduce
from operator import and_

from openspec.grammar.patterns.automaton import MAX_STATES, Automaton
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON
from openspec.grammar.patterns.formats import FORMATS
from openspec.grammar.patterns.nodes import ANY, ENDLESS, PatternError, Repeat
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.schemas.constraints import At, Budget, Plain, Unenforceable, Unsatisfiable
from openspec.grammar.schemas.json_tree import Matching, Node, Text, Texts

REFUSED_FORMATS = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex")
"""Formats of the standard that are not enforced; unknown ones are annotations."""

_LABELS = r"([a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?\.){1,2}[a-z]{2,6}"
USUAL_FORMS = {
    "email": rf"^[A-Za-z0-9_%+-]{{1,20}}(\.[A-Za-z0-9_%+-]{{1,20}})?@{_LABELS}$",
    "hostname": f"^{_LABELS}$",
    "uri": rf"^https?://{_LABELS}(/[A-Za-z0-9._~+-]{{1,32}}){{0,3}}/?$",
}
"""Of formats whose own automaton would take too many states beside a length."""

ANY_TEXT = Automaton.of(Repeat(ANY, 0, ENDLESS))
UNESCAPED = ANY_TEXT.without(ESCAPED_IN_JSON)
"""Texts that JSON writes as they are."""


class TextAutomata:
    """The automata of one schema's texts, each made once."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._known: dict[tuple[str, bool], Automaton] = {}
        self._nodes: dict[Hashable, Matching] = {}

    def built(self, make: Callable[[], Automaton], pointer: str, what: str) -> Automaton:
        """An automaton, paid for by its states.

        Raises:
            Unenforceable: naming `pointer` and `what`.
        """
        try:
            found = make()
        except PatternError as error:
            raise Unenforceable(pointer, f"{what} cannot be enforced: {error}") from None
        self._budget.take(100 + 10 * found.num_states, pointer)
        return found

    def pattern(self, at: At, *, is_wide: bool = False) -> Automaton:
        """The texts in which a pattern is found; `is_wide`: or may be, as `Pattern` says."""
        source = str(at.schema)
        key = source, is_wide
        if key not in self._known:
            self._known[key] = self.built(
                lambda: Pattern(source, is_wide=is_wide).automaton(is_anchored=False),
                at.pointer,
                repr(source[:100]),
            )
        return self._known[key]

    def all_of(self, plain: Plain) -> list[Automaton]:
        """Those of patterns and formats that a text must fit."""
        found = [self.pattern(at) for at in plain.patterns]
        for at in plain.formats:
            if at.schema in REFUSED_FORMATS:
                raise Unenforceable(at.pointer, f"{at.schema} cannot be enforced; leave it out")
            if at.schema in FORMATS:
                found.append(FORMATS[str(at.schema)]())
        return list(dict.fromkeys(found))

    def admits(self, plain: Plain, text: str) -> bool:
        """Whether a text fits."""
        is_long_enough = plain.min_length <= len(text)
        is_short_enough = plain.max_length is None or len(text) <= plain.max_length
        self._budget.take(1 + len(text) // 64, plain.pointer)
        return (
            is_long_enough
            and is_short_enough
            and all(automaton.accepts(text) for automaton in self.all_of(plain))
        )

    def node(self, plain: Plain) -> Node:
        """Texts of patterns, formats and lengths."""
        low, high = plain.min_length, plain.max_length
        if high is not None and low > high:
            raise Unsatisfiable
        automata = self.all_of(plain)
        if not automata:
            return Texts(('""',)) if high == 0 else Text(low, high)
        key = tuple(automata), low, high
        if key not in self._nodes:
            self._nodes[key] = self._matching(plain, automata)
        return self._nodes[key]

    def _matching(self, plain: Plain, automata: list[Automaton]) -> Matching:
        pointer = (*plain.patterns, *plain.formats)[-1].pointer
        found = self.built(lambda: reduce(and_, automata), pointer, "together with others it")
        found = self.built(lambda: _bounded(plain, found), pointer, "together with a length it")
        if found.is_empty:
            raise Unsatisfiable
        spelled = self.built(lambda: unescaped(found), pointer, "it")
        if spelled.is_empty:
            raise Unenforceable(pointer, "it needs a character that JSON writes as an escape")
        return Matching(spelled, is_quoted=True)


def _bounded(plain: Plain, found: Automaton) -> Automaton:
    """Texts of an automaton that have the lengths; of some formats only the usual ones."""
    low, high = plain.min_length, plain.max_length
    try:
        return _with_lengths(found, low, high)
    except PatternError:
        forms = [USUAL_FORMS.get(str(at.schema)) for at in plain.formats]
        if plain.patterns or len(forms) != 1 or forms[0] is None:
            raise
        usual = Pattern(forms[0]).automaton(is_anchored=False)
        return _with_lengths(usual, low, high)


def _with_lengths(found: Automaton, low: int, high: int | None) -> Automaton:
    fewest, most = found.lengths()
    if low <= fewest and (high is None or (most is not None and most <= high)):
        return found
    return found & of_length(low, high)


@lru_cache(256)
def unescaped(automaton: Automaton) -> Automaton:
    """The texts that JSON writes as they are."""
    return automaton & UNESCAPED


def of_length(low: int, high: int | None) -> Automaton:
    """Texts of `low` to `high` characters (None: any number).

    Raises:
        PatternError: they are too long.
    """
    last = low if high is None else high
    if last >= MAX_STATES:
        raise PatternError(f"lengths go up to {MAX_STATES - 1} there")
    rows = [{0: place + 1} for place in range(last)]
    rows.append({0: last} if high is None else {})
    return Automaton([ANY.ranges], rows, set(range(low, last + 1)))
