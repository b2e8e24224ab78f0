"""Which options of a `oneOf` an answer may fit beside its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Protocol

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.constraints import (
    ALL_TYPES,
    Budget,
    OneOf,
    Parts,
    Plain,
    item_parts,
    tighter,
)
from openspec.grammar.schemas.texts import TextAutomata

MAX_DEPTH = 6
MAX_ITEMS = 8
"""Items at the front of arrays that are compared."""
MAX_NAMES = 8
"""Required properties that are tried as what tells options apart."""

_NUMERIC = frozenset(("integer", "number"))
_Option = tuple[int, Plain]


@dataclass(frozen=True, slots=True)
class _Index:
    """Options by the listed values of a property that they require (None: of the whole value)."""

    name: str | None
    by_value: dict[Hashable, list[_Option]]
    others: Sequence[_Option]
    """Options that do not list them."""
    all: Sequence[_Option]


class Choices(Protocol):
    """What `choices.py` knows of all schemas."""

    budget: Budget
    texts: TextAutomata

    def of_all(self, parts: Parts) -> list[Plain]:
        """The choices of several schemas at once."""

    def admits(self, plain: Plain, value: JsonValue) -> bool:
        """Whether a value fits constraints."""

    def admits_itself(self, plain: Plain, value: JsonValue) -> bool:
        """Whether a value fits constraints, also where it fits other options of a `oneOf`."""

    def value_parts(self, plain: Plain, name: str) -> Parts:
        """What the value of a property must fit."""


class Disjoint:
    """What is known of pairs of choices; answers are as the rewriter builds them.

    So they have no properties that their schema does not speak of, which tells more than the schema
    itself.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._indices: dict[int, tuple[OneOf, _Index]] = {}
        self._known: dict[tuple[int, int], tuple[Plain, Plain, bool]] = {}

    def rivals(self, one_of: OneOf, number: int, answer: Plain) -> Iterator[tuple[int, Plain]]:
        """Choices of options other than `number` that an answer might fit, with their option's."""
        if id(one_of) not in self._indices:
            self._indices[id(one_of)] = one_of, self._index(one_of)
        index = self._indices[id(one_of)][1]
        keys = self._listed_in(answer, index.name)
        options = index.all
        if keys is not None:
            found = [option for key in keys for option in index.by_value.get(key, ())]
            options = [*{id(option): option for option in found}.values(), *index.others]
        for other, plain in options:
            self._choices.budget.take(1, one_of.place)
            if other != number:
                yield other, plain

    def never_fits(self, answer: Plain, other: Plain, depth: int = 0) -> bool:
        """Whether no answer to constraints fits others; False where that is not seen."""
        if other.is_trivial or depth > MAX_DEPTH:
            return False
        key = id(answer), id(other)
        if key not in self._known:
            self._choices.budget.take(20, answer.pointer)
            self._known[key] = answer, other, False  # while it is looked into
            self._known[key] = answer, other, self._never_fits(answer, other, depth)
        return self._known[key][2]

    # ---- What tells options apart

    def _index(self, one_of: OneOf) -> _Index:
        options = [(n, plain) for n, option in enumerate(one_of.options) for plain in option]
        counts = Counter(name for _, plain in options for name in plain.required)
        names = [None, *(name for name, _ in counts.most_common(MAX_NAMES))]
        return min(
            (self._index_by(name, options) for name in names),
            key=lambda index: (
                len(index.others)
                + max((len(found) for found in index.by_value.values()), default=0)
            ),
        )

    def _index_by(self, name: str | None, options: Sequence[_Option]) -> _Index:
        by_value: dict[Hashable, list[_Option]] = {}
        others = []
        for option in options:
            plain = option[1]
            keys = self._listed_in(plain, name) if name is None or name in plain.required else None
            if keys is None:
                others.append(option)
            for key in keys or ():
                by_value.setdefault(key, []).append(option)
        return _Index(name, by_value, others, options)

    def _listed_in(self, plain: Plain, name: str | None) -> Set[Hashable] | None:
        """The keys of all values of a property (None: of the whole), where it lists them."""
        if name is None:
            return self._listed([plain])
        if plain.possible_types != {"object"} or name not in plain.properties:
            return None
        return self._listed(self._choices.of_all(plain.properties[name]))

    def _listed(self, choices: Sequence[Plain]) -> Set[Hashable] | None:
        """The keys of all values of some choices, where each lists its own."""
        if len(choices) == 1 and choices[0].enum is not None:
            return choices[0].enum.keys()
        found = set[Hashable]()
        for choice in choices:
            if choice.enum is None:
                return None
            self._choices.budget.take(1 + len(choice.enum), choice.pointer)
            found.update(choice.enum)
        return found

    # ---- Pairs

    def _never_fits(self, answer: Plain, other: Plain, depth: int) -> bool:
        if answer.enum is not None:
            return not any(self._choices.admits(other, value) for value in answer.enum.values())
        if other.enum is not None:
            values = other.enum.values()
            return not any(self._choices.admits_itself(answer, value) for value in values)
        kinds, more = set(answer.possible_types), set(other.types or ALL_TYPES)
        for one in (kinds, more):
            one |= {"integer"} if "number" in one else set()
        shared = kinds & more
        if shared & {"boolean", "null"}:
            return False
        return (
            (not shared & _NUMERIC or _are_apart(answer, other))
            and ("string" not in shared or self._never_texts(answer, other))
            and ("array" not in shared or self._never_arrays(answer, other, depth))
            and ("object" not in shared or self._never_objects(answer, other, depth))
        )

    def _never_parts(self, answer: Parts, other: Parts, depth: int) -> bool:
        """Whether no answer to all of some schemas fits all of others."""
        ones, twos = self._choices.of_all(answer), self._choices.of_all(other)
        keys, others = self._listed(ones), self._listed(twos)
        if keys is not None and others is not None and keys.isdisjoint(others):
            return True
        return all(self.never_fits(one, two, depth + 1) for one in ones for two in twos)

    def _never_texts(self, answer: Plain, other: Plain) -> bool:
        if _never_counts(answer.min_length, answer.max_length, other.min_length, other.max_length):
            return True
        texts = self._choices.texts
        found = texts.all_of(answer)
        wide = [texts.pattern(at, is_wide=True) for at in other.patterns]
        if not found or not wide:
            return False
        pointer = other.patterns[0].pointer
        return texts.built(
            lambda: reduce(and_, [*found, *wide]), pointer, "beside oneOf it"
        ).is_empty

    def _never_arrays(self, answer: Plain, other: Plain, depth: int) -> bool:
        if _never_counts(answer.min_items, answer.max_items, other.min_items, other.max_items):
            return True
        num_items = min(max(answer.min_items, other.min_items), MAX_ITEMS)
        return any(
            self._never_parts(item_parts(answer, i), item_parts(other, i), depth)
            for i in range(num_items)
        )

    def _never_objects(self, answer: Plain, other: Plain, depth: int) -> bool:
        if _never_counts(
            answer.min_properties, answer.max_properties, other.min_properties, other.max_properties
        ):
            return True
        choices = self._choices
        # The answer has what it requires, and where it fits the other what that requires as well.
        for name in {**answer.required, **other.required}:
            choices.budget.take(2, answer.pointer)
            parts = choices.value_parts(answer, name)
            is_unspoken = not parts and name not in answer.required and answer.speaks_of_names
            if is_unspoken or self._never_parts(parts, choices.value_parts(other, name), depth):
                return True
        return False


def _never_counts(low: int, high: int | None, other_low: int, other_high: int | None) -> bool:
    """Whether two ranges of counts have nothing in common."""
    return (high is not None and high < other_low) or (other_high is not None and other_high < low)


def _are_apart(answer: Plain, other: Plain) -> bool:
    """Whether no number is within the bounds of both."""
    low = tighter((answer.low, other.low), is_low=True)
    high = tighter((answer.high, other.high), is_low=False)
    if low is None or high is None:
        return False
    return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))
