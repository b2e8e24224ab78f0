"""Rules for JSON strings of bounded length."""

from __future__ import annotations

from collections.abc import Iterable

from openspec.grammar.formats import LENGTH_RULE
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON, complement
from openspec.grammar.patterns.nodes import ENDLESS, Chars, Repeat
from openspec.grammar.schemas.json_tree import Text

MAX_COUNTED = 256
"""Characters that the automata of one schema count. Each takes about 20 ms at 150,000 tokens."""
MAX_COUNTED_START = 8
"""The most that a text within a budget must have: an automaton counts those."""

_PLAIN = complement(ESCAPED_IN_JSON)
_CHARACTER = r"[^\"\\\0-\x1f]"


def chars_behind_quote(tokens: Iterable[bytes]) -> int:
    """The most characters of a token after its first quote: what it can add to a text it opens."""
    found = (token.partition(b'"')[2] for token in tokens)
    return max((sum(byte & 0xC0 != 0x80 for byte in behind) for behind in found), default=0)


class Lengths:
    """The texts of one tree."""

    def __init__(self, texts: Iterable[Text], longest: int, behind_quote: int) -> None:
        """Of the vocabulary: characters of its `longest` token, and the most `behind_quote`."""
        self.rules: dict[str, str] = {}
        """Bodies of the rules that `body_of` refers to, by name."""
        self._longest = longest
        self._budgets = _with_budgets(texts, longest, behind_quote)

    def body_of(self, text: Text) -> str:
        """A rule's body: a string of so many characters.

        The library does not see a budget in a token that begins before its rule, so the budget has
        to be larger than what such a token has of the text. An automaton counts smaller ones.
        """
        low, high = text.low, text.high
        is_endless = high is None and low <= MAX_COUNTED_START
        if is_endless or (
            high is not None and high - low < self._longest and text not in self._budgets
        ):
            node = Repeat(Chars(_PLAIN), low, ENDLESS if high is None else high)
            return Automaton.of(node).quoted().spelled()
        start = f"{_CHARACTER}{{{low}}}" if low else ""
        if high is None:
            return rf'"\"" {start} {_CHARACTER}* "\""'
        # A rule for each place: so the library knows what follows it.
        name = f"{LENGTH_RULE}_{len(self.rules)}"
        if text in self._budgets:
            self.rules[f"{name}[max_chars={high}]"] = f"{start} {_CHARACTER}*"
            return rf'"\"" {name} "\""'
        self.rules[f"{name}[max_chars={high - low}]"] = f"{_CHARACTER}*"
        return rf'"\"" {start} {name} "\""'


def _with_budgets(texts: Iterable[Text], longest: int, behind_quote: int) -> set[Text]:
    """Lengths below the longest token that a budget counts: automata of all would take too long."""
    found = [(text.high, text) for text in set(texts) if text.high is not None]
    budgets, left = set(), MAX_COUNTED
    for high, text in sorted(found, key=lambda pair: (pair[0], pair[1].low)):
        if high - text.low >= longest:
            continue
        if high > left and high > behind_quote and text.low <= MAX_COUNTED_START:
            budgets.add(text)
        else:
            left -= high
    return budgets
