"""Patterns drawn at random, and automata as they are spelled for the library."""

from __future__ import annotations

import random

CHARACTERS = ("a", "b", "/", "[ab]", "[^a]", ".", "é", "[^é]", r"[^\W/]")
REPEATS = ("*", "+", "?", "{0,2}", "{2}", "{1,}")


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(CHARACTERS)
    inner = random_pattern(rng, depth - 1)
    if kind < 0.6:
        return f"({inner}){rng.choice(REPEATS)}"
    other = random_pattern(rng, depth - 1)
    return f"({inner}|{other})" if kind < 0.75 else inner + other


class SpelledOut:
    """An automaton over bytes, read from a rule's body."""

    def __init__(self, body: str) -> None:
        head, *parts = body.removeprefix('Regex("automaton:').removesuffix('")').split(";")
        self.num_states = int(head)
        self.ends = {int(one) for one in parts[0].split(",") if one}
        self.next: list[dict[int, int]] = [{} for _ in range(self.num_states)]
        for arc in filter(None, parts[1:]):
            start, low, high, to = map(int, arc.split(","))
            for byte in range(low, high + 1):
                assert byte not in self.next[start], "two ways on"
                self.next[start][byte] = to

    def after(self, state: int | None, text: bytes) -> int | None:
        """The state behind some bytes; None where they are not allowed."""
        for byte in text:
            if state is None:
                return None
            state = self.next[state].get(byte)
        return state

    def accepts(self, text: bytes) -> bool:
        return self.after(0, text) in self.ends
