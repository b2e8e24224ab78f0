"""Minimal deterministic automata over characters: what patterns, formats and names match.

Equal languages are equal automata. A text is matched in time that grows with its length only, and
everything that is built counts its states and steps, whatever the pattern.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from openspec.grammar.patterns.characters import Ranges, complement, set_of
from openspec.grammar.patterns.minimal import Row, joined, merged, ordered, trimmed
from openspec.grammar.patterns.nodes import ENDLESS, Chars, Node, PatternError, Repeat
from openspec.grammar.patterns.positions import positions_of
from openspec.grammar.patterns.utf8 import spelled_in_bytes

MAX_STATES = 4096
MAX_STEPS = 1 << 21
"""Of one automaton's construction, each below a microsecond."""

_NOWHERE = -1
_State = TypeVar("_State")


class Automaton:
    """A set of texts. Immutable; compares and hashes by the set."""

    __slots__ = ("_classes", "_cuts", "_ends", "_hash", "_rows")

    def __init__(self, classes: Sequence[Ranges], rows: Sequence[Row], ends: set[int]) -> None:
        """Of any automaton that starts in state 0 and has disjoint `classes`: makes it minimal."""
        rows, ends = trimmed(rows, ends)
        rows, ends = merged(rows, ends)
        classes, rows = joined(classes, rows)
        self._classes, self._rows, self._ends = ordered(classes, rows, ends)
        self._cuts = sorted(
            (low, high, one) for one, ranges in enumerate(self._classes) for low, high in ranges
        )
        self._hash = hash(
            (self._classes, tuple(tuple(row.items()) for row in self._rows), self._ends)
        )

    @staticmethod
    def of(node: Node) -> Automaton:
        """The texts that a pattern's node matches as a whole.

        Raises:
            PatternError: it takes more than `MAX_STATES` states, or too many steps.
        """
        positions = positions_of(node)
        end = positions.end
        steps = _Steps()
        known: dict[int, int] = {}  # where a set of positions leads

        def after(taken: int) -> int:
            found = known.get(taken)
            if found is None:
                found, rest = 0, taken
                while rest:
                    low = rest & -rest
                    found |= positions.follow[low.bit_length() - 1]
                    rest ^= low
                    steps.take(1)
                known[taken] = found
            return found

        def step(state: int) -> Iterable[tuple[int, int]]:
            steps.take(len(positions.readers))
            for one, readers in enumerate(positions.readers):
                if taken := state & readers:
                    yield one, after(taken)

        rows, states = _explored(positions.first, step, steps)
        ends = {number for state, number in states.items() if state & end}
        return Automaton(positions.classes, rows, ends)

    @staticmethod
    def of_texts(texts: Iterable[str]) -> Automaton:
        """Exactly these texts.

        Raises:
            PatternError: they have too many characters, or take too many states.
        """
        rows: list[Row] = [{}]
        ends, steps = set(), _Steps()
        for text in texts:
            state = 0
            steps.take(len(text))
            for character in text:
                code = ord(character)
                if code not in rows[state]:
                    rows[state][code] = len(rows)
                    rows.append({})
                state = rows[state][code]
            ends.add(state)
        # A state's number is below those that follow it, so equal ends are found from the back.
        same: dict[tuple[bool, tuple[tuple[int, int], ...]], int] = {}
        becomes = [0] * len(rows)
        for number in reversed(range(len(rows))):
            row = tuple(sorted((code, becomes[to]) for code, to in rows[number].items()))
            becomes[number] = same.setdefault((number in ends, row), number)
        kept = sorted(set(becomes))
        if len(kept) > MAX_STATES:
            raise PatternError(f"its texts take more than {MAX_STATES} states")
        place = {number: at for at, number in enumerate(kept)}
        codes = sorted({code for row in rows for code in row})
        classes = {code: one for one, code in enumerate(codes)}
        return Automaton(
            [((code, code),) for code in codes],
            [
                {classes[code]: place[becomes[to]] for code, to in rows[number].items()}
                for number in kept
            ],
            {place[becomes[number]] for number in ends},
        )

    def __and__(self, other: Automaton) -> Automaton:
        """The texts of both."""
        return _product(
            self, other, lambda one, two: one and two, lambda one, two: _NOWHERE in (one, two)
        )

    def __or__(self, other: Automaton) -> Automaton:
        """The texts of either."""
        return _product(self, other, lambda one, two: one or two, lambda one, two: one == two < 0)

    def __sub__(self, other: Automaton) -> Automaton:
        """The texts of this one that the other has not."""
        return _product(self, other, lambda one, two: one and not two, lambda one, _: one < 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Automaton) and (
            self._hash == other._hash
            and self._classes == other._classes
            and self._rows == other._rows
            and self._ends == other._ends
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Automaton({len(self._rows)} states, {len(self._classes)} classes)"

    def without(self, ranges: Ranges) -> Automaton:
        """The texts that have no character of a set."""
        return self & Automaton.of(Repeat(Chars(complement(ranges)), 0, ENDLESS))

    def quoted(self) -> Automaton:
        """The texts between quotation marks; none of them has one itself."""
        mark, end = len(self._classes), len(self._rows) + 1
        rows: list[Row] = [{mark: 1}]
        rows += [{one: to + 1 for one, to in row.items()} for row in self._rows]
        for number in self._ends:
            rows[number + 1][mark] = end
        return Automaton([*self._classes, set_of('"')], [*rows, {}], {end})

    def accepts(self, text: str) -> bool:
        """Whether it is one of the texts; takes time in proportion to its length."""
        state = 0
        for character in text:
            code = ord(character)
            at = bisect_left(self._cuts, (code + 1,)) - 1
            if at < 0 or code > self._cuts[at][1]:
                return False
            to = self._rows[state].get(self._cuts[at][2])
            if to is None:
                return False
            state = to
        return state in self._ends

    @property
    def is_empty(self) -> bool:
        """Whether there is no text."""
        return not self._ends

    @property
    def num_states(self) -> int:
        """States, those from which no text ends left out."""
        return len(self._rows)

    def texts(self, most: int) -> list[str] | None:
        """All texts, in order of their characters; None if there are more than `most`."""
        if self.lengths()[1] is None:
            return None
        found: list[str] = []
        paths = [("", 0)]
        while paths:
            text, state = paths.pop()
            if state in self._ends:
                found.append(text)
            ranges = self.arcs(state)
            # Each path ends in a text of its own.
            if len(found) + len(paths) + sum(high - low + 1 for low, high, _ in ranges) > most:
                return None
            for low, high, to in ranges:
                paths.extend((text + chr(code), to) for code in range(low, high + 1))
        return sorted(found)

    def lengths(self) -> tuple[int, int | None]:
        """The fewest and the most characters of a text (None: there is no end); (0, 0) of none."""
        layer, seen, fewest, most = {0}, 0, None, 0
        while layer:
            if layer & self._ends:
                fewest, most = (seen if fewest is None else fewest), seen
            if seen > len(self._rows):
                return fewest or 0, None
            layer = {to for state in layer for to in self._rows[state].values()}
            seen += 1
        return fewest or 0, most

    def arcs(self, state: int) -> list[tuple[int, int, int]]:
        """Ranges of characters and the state that each leads to; state 0 starts."""
        row = self._rows[state].items()
        return [(low, high, to) for one, to in row for low, high in self._classes[one]]

    def may_end(self, state: int) -> bool:
        """Whether a text may end there."""
        return state in self._ends

    def spelled(self) -> str:
        """A rule's body for the library: the automaton over UTF-8's bytes."""
        return spelled_in_bytes(list(map(self.arcs, range(len(self._rows)))), self._ends)


class _Steps:
    """What is left of a construction's budget."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def take(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise PatternError("it is too ambiguous: its automaton takes too long to build")


def _explored(
    start: _State, step: Callable[[_State], Iterable[tuple[int, _State]]], steps: _Steps
) -> tuple[list[Row], dict[_State, int]]:
    """The rows of all that `start` leads to, and the number of each."""
    states = {start: 0}
    rows: list[Row] = []
    waiting = deque([start])
    while waiting:
        row: Row = {}
        for one, to in step(waiting.popleft()):
            steps.take(1)
            number = states.get(to)
            if number is None:
                number = states[to] = len(states)
                if number >= MAX_STATES:
                    raise PatternError(
                        f"it is too ambiguous: its automaton has more than {MAX_STATES} states"
                    )
                waiting.append(to)
            row[one] = number
        rows.append(row)
    return rows, states


def _product(
    one: Automaton,
    two: Automaton,
    is_end: Callable[[bool, bool], bool],
    is_dead: Callable[[int, int], bool],
) -> Automaton:
    """Both at once, where a state of either may be `_NOWHERE`."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for low, high, pair in _refined(one._cuts, two._cuts):
        ranges.setdefault(pair, []).append((low, high))
    pairs = list(ranges)
    steps = _Steps()

    def step(state: tuple[int, int]) -> Iterable[tuple[int, tuple[int, int]]]:
        first = one._rows[state[0]] if state[0] >= 0 else {}
        second = two._rows[state[1]] if state[1] >= 0 else {}
        steps.take(len(pairs))
        for number, (left, right) in enumerate(pairs):
            to = first.get(left, _NOWHERE), second.get(right, _NOWHERE)
            if not is_dead(*to):
                yield number, to

    rows, states = _explored((0, 0), step, steps)
    ends = {
        number
        for (left, right), number in states.items()
        if is_end(left in one._ends, right in two._ends)
    }
    return Automaton([tuple(ranges[pair]) for pair in pairs], rows, ends)


def _refined(
    one: Sequence[tuple[int, int, int]], two: Sequence[tuple[int, int, int]]
) -> Iterable[tuple[int, int, tuple[int, int]]]:
    """Ranges that lie in one class of each (_NOWHERE: in none), but for those in none of either."""
    starts = sorted({edge for cut in (*one, *two) for edge in (cut[0], cut[1] + 1)})
    at = [0, 0]
    for low, after in itertools.pairwise(starts):
        pair = []
        for side, cuts in enumerate((one, two)):
            while at[side] < len(cuts) and cuts[at[side]][1] < low:
                at[side] += 1
            is_inside = at[side] < len(cuts) and cuts[at[side]][0] <= low
            pair.append(cuts[at[side]][2] if is_inside else _NOWHERE)
        if pair != [_NOWHERE, _NOWHERE]:
            yield low, after - 1, (pair[0], pair[1])
