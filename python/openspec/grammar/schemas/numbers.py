"""Numbers of a schema as automata over their digits.

Whole numbers are written without a point. A number with a bound or a `multipleOf` has no exponent,
and with a `multipleOf` at most the digits after the point that it has itself. Zero has no sign.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.schemas.constraints import Bound, Budget, Plain, Unenforceable, Unsatisfiable
from openspec.grammar.schemas.json_tree import Matching

MAX_DIGITS = 40
"""Before the point of a bound, and after it: bounds that are finer or farther become tighter."""
MAX_REMAINDERS = 1024
"""Of a `multipleOf`, without its point: its automaton tells all remainders apart."""
MAX_STATES = 4096
"""Of an automaton of numbers while it is built."""
MAX_LISTED = 1024
"""Whole multiples within bounds that are listed instead of being counted out."""
_NUMBER = Pattern(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d{1,2})?").automaton(is_anchored=True)

_NOTHING = Automaton.of_texts(())
_ALPHABET = "-0123456789."
_CLASSES = [((ord(character),) * 2,) for character in _ALPHABET]


def admits_number(plain: Plain, number: Fraction) -> bool:
    """Whether a number fits the bounds and is a multiple."""
    low, high, multiple = plain.low, plain.high, plain.multiple_of
    return (
        (low is None or number > low[0] or (number == low[0] and not low[1]))
        and (high is None or number < high[0] or (number == high[0] and not high[1]))
        and (multiple is None or (number / multiple).denominator == 1)
    )


def number_node(plain: Plain, kind: str, budget: Budget) -> Matching:
    """A number, or a whole one, within bounds and a multiple.

    Raises:
        Unsatisfiable: there is none.
        Unenforceable: it takes too many digits or remainders.
    """
    pointer, multiple = plain.pointer or "#", plain.multiple_of
    if multiple is None:
        multiple = Fraction(1) if kind == "integer" else None
    elif kind == "integer":
        multiple = Fraction(multiple.numerator)  # a whole number of p/q is one of p
    if multiple is None and plain.low is None and plain.high is None:
        return Matching(_NUMBER, is_quoted=False)
    low, high = plain.low, plain.high
    if multiple is not None:
        low, high = _multiples_within(low, high, multiple)
    elif low is not None and high is not None:
        is_open = low[1] or high[1]
        if low[0] > high[0] or (low[0] == high[0] and is_open):
            raise Unsatisfiable
    low, high = _tightened(low, high, pointer)
    digits = (1, None) if multiple is None else _whole_digits(multiple, pointer)
    if low is not None and high is not None and digits[0] > 1 and digits[1] == 0:
        first, last = int(low[0]), int(high[0])
        if last - first < MAX_LISTED * digits[0]:
            budget.take(20 * MAX_LISTED, pointer)
            texts = map(str, range(first, last + 1, digits[0]))
            return Matching(Automaton.of_texts(texts), is_quoted=False)
    try:
        found, num_states = _within(low, high, *digits)
    except PatternError:
        raise Unenforceable(
            pointer, f"multipleOf and bounds together take more than {MAX_STATES} states"
        ) from None
    budget.take(50 * num_states, pointer)
    if found.is_empty:
        raise Unenforceable(pointer, f"its numbers take more than {MAX_DIGITS} digits")
    return Matching(found, is_quoted=False)


def _multiples_within(
    low: Bound | None, high: Bound | None, multiple: Fraction
) -> tuple[Bound | None, Bound | None]:
    """The first and the last multiple within bounds."""
    first = last = None
    if low is not None:
        count = low[0] / multiple
        first = math.floor(count) + 1 if low[1] else math.ceil(count)
    if high is not None:
        count = high[0] / multiple
        last = math.ceil(count) - 1 if high[1] else math.floor(count)
    if first is not None and last is not None and first > last:
        raise Unsatisfiable
    return (
        None if first is None else (first * multiple, False),
        None if last is None else (last * multiple, False),
    )


def _tightened(
    low: Bound | None, high: Bound | None, pointer: str
) -> tuple[Bound | None, Bound | None]:
    """Bounds of at most `MAX_DIGITS` digits before and after the point, at least as tight."""
    most, finest = Fraction(10**MAX_DIGITS), 10**MAX_DIGITS
    for bound, sign, key in ((low, 1, "minimum"), (high, -1, "maximum")):
        if bound is not None and sign * bound[0] >= most:
            raise Unenforceable(f"{pointer}/{key}", f"it has more than {MAX_DIGITS} digits")
    if low is not None:
        low = (-most, True) if low[0] <= -most else low
        low = low if finest % low[0].denominator == 0 else _rounded(low[0], math.ceil)
    if high is not None:
        high = (most, True) if high[0] >= most else high
        high = high if finest % high[0].denominator == 0 else _rounded(high[0], math.floor)
    return low, high


def _rounded(number: Fraction, to: Callable[[Fraction], int]) -> Bound:
    return Fraction(to(number * 10**MAX_DIGITS), 10**MAX_DIGITS), False


def _whole_digits(multiple: Fraction, pointer: str) -> tuple[int, int | None]:
    """A multiple without its point, and how many digits stood after it."""
    places = 0
    while multiple.denominator != 1 and places <= MAX_DIGITS:
        multiple, places = multiple * 10, places + 1
    if multiple > MAX_REMAINDERS or places > MAX_DIGITS:
        raise Unenforceable(
            f"{pointer}/multipleOf",
            f"without its point it goes up to {MAX_REMAINDERS}, with {MAX_DIGITS} digits after it",
        )
    return int(multiple), places


@dataclass(frozen=True, slots=True)
class _Magnitude:
    """A bound of numbers without a sign, compared digit by digit.

    A state is (`whole` digits read, sign of the comparison so far) before the point and
    (-1 - `after` digits read, sign) behind it.
    """

    whole: str
    after: str

    @classmethod
    def of(cls, number: Fraction) -> _Magnitude:
        whole, rest = divmod(number, 1)
        digits = str(int(rest * 10**MAX_DIGITS)).zfill(MAX_DIGITS).rstrip("0")
        return cls(str(whole), digits)

    def digit(self, state: tuple[int, int], digit: str) -> tuple[int, int]:
        place, sign = state
        if place < 0:
            if sign:
                return state
            behind = -1 - place
            own = self.after[behind : behind + 1] or "0"
            sign = (digit > own) - (digit < own)
            return (-1, sign) if sign else (max(place - 1, -1 - len(self.after)), 0)
        if place >= len(self.whole):
            return len(self.whole), 1
        own = self.whole[place]
        return place + 1, sign or (digit > own) - (digit < own)

    def point(self, state: tuple[int, int]) -> tuple[int, int]:
        place, sign = state
        return -1, -1 if place < len(self.whole) else sign

    def compared(self, state: tuple[int, int]) -> int:
        """The sign of the difference of the number that ends here and the bound."""
        place, sign = self.point(state) if state[0] >= 0 else state
        return sign if sign or -1 - place >= len(self.after) else -1


_State = tuple[str, int, int, tuple[tuple[int, int], ...]]
"""The part that is read ("-", "", "0", "1" for whole digits, "." and "9" behind the point), the
digits after the point (where those count), the remainder, and a comparison for each bound."""


class _Magnitudes:
    """Numbers from zero between bounds, multiples of `modulus` once their point is left out.

    They have at most `places` digits after the point; None: any number, and all are multiples.
    `has_sign` writes a minus before them.
    """

    def __init__(
        self,
        low: Bound | None,
        high: Bound | None,
        modulus: int,
        places: int | None,
        *,
        has_sign: bool,
    ) -> None:
        self._modulus, self._places = modulus, places
        self._bounds = [
            (_Magnitude.of(bound[0]), sign, bound[1])
            for bound, sign in ((low, 1), (high, -1))
            if bound is not None
        ]
        self.start: _State = ("-" if has_sign else "", 0, 0, ((0, 0),) * len(self._bounds))

    def step(self, state: _State, character: str) -> _State | None:
        part, behind, rest, compared = state
        if part == "-" or character == "-":
            return ("", 0, 0, compared) if part == character else None
        if character == ".":
            if part not in ("0", "1") or self._places == 0:
                return None
            points = zip(self._bounds, compared, strict=True)
            return ".", 0, rest, tuple(bound.point(one) for (bound, _, _), one in points)
        if part == "0" or (part in (".", "9") and behind == self._places):
            return None
        digits = zip(self._bounds, compared, strict=True)
        moved = tuple(bound.digit(one, character) for (bound, _, _), one in digits)
        rest = (rest * 10 + int(character)) % self._modulus
        if part in (".", "9"):
            return "9", behind + (self._places is not None), rest, moved
        return ("0" if part == "" and character == "0" else "1"), 0, rest, moved

    def is_end(self, state: _State) -> bool:
        part, behind, rest, compared = state
        if part in ("-", "", "."):
            return False
        for (bound, wanted, is_open), one in zip(self._bounds, compared, strict=True):
            sign = bound.compared(one)
            if sign == -wanted or (sign == 0 and is_open):
                return False
        shift = (self._places or 0) - behind
        return rest * int(10**shift) % self._modulus == 0

    def automaton(self) -> tuple[Automaton, int]:
        """Their texts, and how many states finding them took.

        Raises:
            PatternError: more than `MAX_STATES`.
        """
        states, rows = {self.start: 0}, list[dict[int, int]]()
        waiting = deque([self.start])
        while waiting:
            state, row = waiting.popleft(), dict[int, int]()
            for one, character in enumerate(_ALPHABET):
                to = self.step(state, character)
                if to is None:
                    continue
                if to not in states:
                    states[to] = len(states)
                    waiting.append(to)
                row[one] = states[to]
            rows.append(row)
            if len(states) > MAX_STATES:
                raise PatternError(f"its numbers take more than {MAX_STATES} states")
        ends = {number for state, number in states.items() if self.is_end(state)}
        return Automaton(_CLASSES, rows, ends), len(states)


@lru_cache(256)
def _within(
    low: Bound | None, high: Bound | None, modulus: int, places: int | None
) -> tuple[Automaton, int]:
    """Texts of numbers within bounds, and how many states finding them took."""

    def magnitudes(
        low: Bound | None, high: Bound | None, *, has_sign: bool
    ) -> tuple[Automaton, int]:
        if high is not None and high[0] < 0:
            return _NOTHING, 0
        low = None if low is not None and low[0] < 0 else low
        return _Magnitudes(low, high, modulus, places, has_sign=has_sign).automaton()

    is_below = high is not None and high[0] < 0
    below = (-high[0], high[1]) if high is not None and is_below else (Fraction(0), True)
    above = None if low is None else (-low[0], low[1])
    ones, num_ones = magnitudes(low, high, has_sign=False)
    twos, num_twos = magnitudes(below, above, has_sign=True)
    return ones | twos, num_ones + num_twos
