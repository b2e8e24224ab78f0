"""Is a head better than another, on the same texts?

Texts are the same whatever drafts, so heads are compared text by text: their tokens over the time
that prompts and steps were measured to take. Texts are drawn again and again in pairs, which gives
the interval that the gain lies in. A mean alone says nothing where few texts decide it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from openspec.adapt.scoring import Price, Tally, length_of
from openspec.adapt.texts import Text

NUM_DRAWS = 2000  # of the bootstrap
WORTH = 1.02
"""A head is worth taking if it is surely so many times as fast."""
CLASS_FLOOR, CLASS_SHARE = 0.98, 0.05
"""No kind of text that makes so much of the tokens may become slower than that."""
BASE_FLOOR = 0.97
"""Texts unlike the traffic may become that much slower."""
LONG_PROMPT = 1024  # tokens


class Interval(NamedTuple):
    """How many times as fast: 95 % lie between `low` and `high`."""

    low: float
    middle: float
    high: float


def interval(
    first: Sequence[Tally], other: Sequence[Tally], prices: tuple[Price, Price]
) -> Interval:
    """Of the other's speed to the first's, at their prices, texts drawn in pairs."""
    both = list(zip((first, other), prices, strict=True))

    def ratio(which: Sequence[int]) -> float:
        speeds = [one.speed(some[i] for i in which) for some, one in both]
        return speeds[1] / speeds[0]

    every, drawn = range(len(first)), random.Random(0)
    found = sorted(ratio(drawn.choices(every, k=len(every))) for _ in range(NUM_DRAWS))
    return Interval(found[NUM_DRAWS // 40], ratio(every), found[-NUM_DRAWS // 40])


@dataclass(frozen=True, slots=True)
class Measured:
    """A head on held-out texts; of two heads the texts are the same, in the same order."""

    traffic: list[Tally]
    """Of each prompt."""
    base: list[Tally]
    classes: dict[str, list[Tally]]
    """The traffic's, by kind of text."""
    price: Price
    """Of its drafts, at every step."""

    @property
    def length(self) -> float:
        """Tokens of a step on the traffic."""
        return length_of(self.traffic)

    @property
    def base_length(self) -> float | None:
        """Tokens of a step on the base texts, if there are any."""
        return length_of(self.base) if self.base else None

    @property
    def speed(self) -> float:
        """Tokens a second on the traffic."""
        return self.price.speed(self.traffic)


def class_of(text: Text) -> str:
    """By what decides how far drafts come: how the text was drawn, and how long its prompt is."""
    drawn = "greedy" if text.temperature == 0 else "T <= 0.7"
    drawn = "T > 0.7" if text.temperature > 0.7 else drawn
    return drawn + (", long prompts" if text.prompt > LONG_PROMPT else "")


def measured(
    traffic: Sequence[tuple[Text, Tally]], base: Sequence[Tally], price: Price
) -> Measured:
    """Sums up texts of the same prompt, which are not independent."""
    by_prompt: dict[tuple[int, ...], list[Tally]] = defaultdict(list)
    classes: dict[str, list[Tally]] = defaultdict(list)
    for text, tally in traffic:
        by_prompt[tuple(text.tokens[: text.prompt])].append(tally)
        classes[class_of(text)].append(tally)
    summed = [Tally(*map(sum, zip(*some, strict=True))) for some in by_prompt.values()]
    return Measured(summed, list(base), dict(classes), price)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to take the other head, and why."""

    takes_it: bool
    why: str
    traffic: Interval
    base: float | None
    """How many times as fast base texts are."""
    classes: dict[str, float] = field(default_factory=dict)


def decide(first: Measured, other: Measured, is_finite: bool = True) -> Verdict:
    """Takes the other head if it is surely faster on the traffic and hardly slower elsewhere."""
    prices = (first.price, other.price)
    gain = interval(first.traffic, other.traffic, prices)
    base = interval(first.base, other.base, prices).middle if first.base else None
    total = sum(tally.tokens for tally in first.traffic)
    classes = {
        name: interval(some, other.classes[name], prices).middle
        for name, some in first.classes.items()
        if sum(tally.tokens for tally in some) >= CLASS_SHARE * total
    }
    worse = [name for name, ratio in classes.items() if ratio < CLASS_FLOOR]
    shown = f"{gain.middle:.3f}x as fast ({gain.low:.3f} to {gain.high:.3f}, 95 %)"
    if not is_finite:
        why = "it has numbers that are not finite"
    elif gain.high < WORTH:
        why = f"{shown}: keep the first"
    elif gain.low < WORTH:
        why = f"{shown}: no verdict; more texts would tell"
    elif worse:
        why = f"{shown}, but {worse[0]} is {classes[worse[0]]:.3f}x: keep the first"
    elif base is not None and base < BASE_FLOOR:
        why = f"{shown}, but base texts are {base:.3f}x: keep the first"
    else:
        return Verdict(True, f"{shown}: take it", gain, base, classes)
    return Verdict(False, why, gain, base, classes)
