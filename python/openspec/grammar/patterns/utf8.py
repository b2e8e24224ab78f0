"""Automata over characters as automata over the bytes of UTF-8, spelled for the grammar library."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

Arcs: TypeAlias = tuple[tuple[int, int, int], ...]
"""Ranges in order, without overlap, with the state that each leads to."""

_LENGTHS = (
    # The first and last code point of each length, what its first byte adds, and the bytes behind.
    (0x0, 0x7F, 0x00, 0),
    (0x80, 0x7FF, 0xC0, 1),
    (0x800, 0xFFFF, 0xE0, 2),
    (0x10000, 0x10FFFF, 0xF0, 3),
)
_TAIL, _TAIL_BITS = 0x80, 6


def spelled_in_bytes(rows: Sequence[Sequence[tuple[int, int, int]]], ends: Collection[int]) -> str:
    """A rule's body: `Regex("automaton:...")` with the number of states, the ends and the arcs.

    `rows`: of each state the ranges of code points and the state that each leads to; 0 starts.
    States within a character that have the same bytes ahead are one, so what comes from a minimal
    automaton is minimal.
    """
    states = _States(len(rows))
    arcs = [states.arcs_of(row) for row in rows]
    arcs += states.inner
    parts = [str(len(arcs)), ",".join(map(str, sorted(ends)))]
    parts += [
        f"{number},{low},{high},{to}" for number, row in enumerate(arcs) for low, high, to in row
    ]
    return f'Regex("automaton:{";".join(parts)}")'


class _States:
    """The states within characters, numbered after the given ones."""

    def __init__(self, num_outer: int) -> None:
        self.inner: list[Arcs] = []
        self._num_outer = num_outer
        self._numbers: dict[Arcs, int] = {}

    def arcs_of(self, row: Sequence[tuple[int, int, int]]) -> Arcs:
        """The arcs by the first byte of each character."""
        found: list[tuple[int, int, int]] = []
        for first, last, lead, num_behind in _LENGTHS:
            pieces = [
                (max(low, first), min(high, last), to)
                for low, high, to in sorted(row)
                if low <= last and high >= first
            ]
            found += [(lead + low, lead + high, to) for low, high, to in
                      self._digits(pieces, num_behind)]  # fmt: skip
        return _joined(found)

    def _digits(
        self, pieces: list[tuple[int, int, int]], num_behind: int
    ) -> list[tuple[int, int, int]]:
        """The arcs by the byte before `num_behind` others, as its number without a mark."""
        if not num_behind:
            return pieces
        size = 1 << (_TAIL_BITS * num_behind)
        found: list[tuple[int, int, int]] = []
        parts: dict[int, list[tuple[int, int, int]]] = {}  # of characters that share the byte
        for low, high, to in pieces:
            first, last = low // size, high // size
            if first == last or low % size:
                end = high if first == last else (first + 1) * size - 1
                parts.setdefault(first, []).append((low % size, end % size, to))
                first += 1
            if first <= last and (high + 1) % size:
                parts.setdefault(last, []).append((0, high % size, to))
                last -= 1
            if first <= last:
                found.append((first, last, self._state([(0, size - 1, to)], num_behind)))
        found += [(at, at, self._state(part, num_behind)) for at, part in parts.items()]
        return sorted(found)

    def _state(self, pieces: list[tuple[int, int, int]], num_ahead: int) -> int:
        """The state before `num_ahead` bytes."""
        digits = self._digits(pieces, num_ahead - 1)
        arcs = _joined([(_TAIL + low, _TAIL + high, to) for low, high, to in digits])
        number = self._numbers.get(arcs)
        if number is None:
            number = self._numbers[arcs] = self._num_outer + len(self.inner)
            self.inner.append(arcs)
        return number


def _joined(arcs: list[tuple[int, int, int]]) -> Arcs:
    """Neighbouring ranges that lead to one state as one."""
    joined: list[tuple[int, int, int]] = []
    for low, high, to in sorted(arcs):
        if joined and joined[-1][2] == to and joined[-1][1] == low - 1:
            joined[-1] = (joined[-1][0], high, to)
        else:
            joined.append((low, high, to))
    return tuple(joined)
