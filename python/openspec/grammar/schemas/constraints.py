"""What one JSON schema asks of a value, without references and choices; and two of them at once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from openspec.checkpoint.strict_json import JsonValue

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
ALL_TYPES = frozenset(TYPES)
MAX_STEPS = 1_000_000
"""Of rewriting, each of about a microsecond."""


class Unenforceable(ValueError):
    """A place in a schema that cannot be enforced, and why."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"{pointer or '#'}: {reason}")


class Unsatisfiable(Exception):
    """No value fits."""


class Budget:
    """Steps that are left for rewriting; one may serve all schemas of a request."""

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._left = self._all = num_steps

    def take(self, num_steps: int, pointer: str) -> None:
        """Raises Unenforceable, naming `pointer`, where no more are left."""
        self._left -= num_steps
        if self._left < 0:
            raise Unenforceable(
                pointer, f"too large: the schema takes more than {self._all} steps to rewrite"
            )


@dataclass(frozen=True, slots=True)
class At:
    """A schema with its place in the whole, a JSON pointer."""

    schema: JsonValue = field(compare=False)
    pointer: str

    def __getitem__(self, key: str | int) -> At:
        step = str(key).replace("~", "~0").replace("/", "~1")
        inner = self.schema[key]  # type: ignore[index]
        return At(inner, f"{self.pointer or '#'}/{step}")


Parts = tuple[At, ...]
"""Schemas that one value must fit all of."""
Bound = tuple[Fraction, bool]
"""A number, and whether it is left out itself."""


@dataclass(frozen=True, slots=True)
class Others:
    """What one schema says of properties that it does not name."""

    names: frozenset[str]
    patterns: Parts
    """Each holds a pattern's text."""
    schema: At


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """Options of which a value must fit exactly one, each with its choices."""

    place: str
    options: tuple[list[Plain], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """Constraints on one value. None: there is none."""

    pointer: str
    types: frozenset[str] | None = None
    implied: frozenset[str] = frozenset()
    """Types that keywords speak of."""
    enum: Mapping[Hashable, JsonValue] | None = None
    """By `key_of` each."""
    low: Bound | None = None
    high: Bound | None = None
    multiple_of: Fraction | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: Parts = ()
    formats: Parts = ()
    prefix: tuple[Parts, ...] = ()
    items: Parts = ()
    """Of all items behind `prefix`."""
    has_rest: bool = False
    """Whether some keyword speaks of all items."""
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False
    properties: Mapping[str, Parts] = field(default_factory=dict)
    required: Mapping[str, None] = field(default_factory=dict)
    others: tuple[Others, ...] = ()
    by_pattern: tuple[tuple[At, At], ...] = ()
    """Patterns, and the schema of properties whose names match."""
    names: Parts = ()
    min_properties: int = 0
    max_properties: int | None = None
    one_of: tuple[tuple[OneOf, int], ...] = ()
    """With the number of the only option that fits."""
    is_trivial: bool = False
    """Whether everything fits."""

    @property
    def possible_types(self) -> frozenset[str]:
        """The types that answers have: where none is named, those that keywords speak of."""
        return self.types if self.types is not None else self.implied or ALL_TYPES

    @property
    def speaks_of_names(self) -> bool:
        """Whether answers hold only properties that it speaks of."""
        return bool(self.properties or self.by_pattern or self.others)


def _tighter(one: Bound | None, two: Bound | None, is_low: bool) -> Bound | None:
    if one is None or two is None:
        return two if one is None else one
    if one[0] == two[0]:
        return one[0], one[1] or two[1]
    return one if (one[0] > two[0]) == is_low else two


def tighter(lows: tuple[Bound | None, ...], *, is_low: bool) -> Bound | None:
    """The tightest of several lower (or upper) bounds."""
    found = None
    for bound in lows:
        found = _tighter(found, bound, is_low)
    return found


def _least(one: int | None, two: int | None) -> int | None:
    return min((n for n in (one, two) if n is not None), default=None)


def _common_multiple(one: Fraction | None, two: Fraction | None) -> Fraction | None:
    if one is None or two is None:
        return two if one is None else one
    whole = math.lcm(one.numerator * two.denominator, two.numerator * one.denominator)
    return Fraction(whole, one.denominator * two.denominator)


def joined(*parts: Parts) -> Parts:
    """All of them, each once."""
    return tuple(dict.fromkeys(at for some in parts for at in some))


def merged(one: Plain, two: Plain) -> Plain:
    """The constraints of both.

    Raises:
        Unsatisfiable: no value fits both.
    """
    if one.is_trivial or two.is_trivial:
        return two if one.is_trivial else one
    types = one.types if two.types is None else two.types
    if one.types is not None and two.types is not None:
        types = one.types & two.types
        if "integer" in one.types | two.types and "number" in one.types | two.types:
            is_both = all({"integer", "number"} & kinds for kinds in (one.types, two.types))
            types |= {"integer"} if is_both else frozenset()
        if not types:
            raise Unsatisfiable
    enum = one.enum if two.enum is None else two.enum
    if one.enum is not None and two.enum is not None:
        enum = {key: value for key, value in one.enum.items() if key in two.enum}
        if not enum:
            raise Unsatisfiable
    one_of = dict(one.one_of) | dict(two.one_of)
    if any(one_of[choice] != number for choice, number in one.one_of):
        raise Unsatisfiable
    properties = dict(one.properties)
    for name, parts in two.properties.items():
        properties[name] = joined(properties.get(name, ()), parts)
    return replace(
        one,
        pointer=one.pointer if len(one.pointer) >= len(two.pointer) else two.pointer,
        types=types,
        implied=one.implied | two.implied,
        enum=enum,
        low=_tighter(one.low, two.low, is_low=True),
        high=_tighter(one.high, two.high, is_low=False),
        multiple_of=_common_multiple(one.multiple_of, two.multiple_of),
        min_length=max(one.min_length, two.min_length),
        max_length=_least(one.max_length, two.max_length),
        patterns=joined(one.patterns, two.patterns),
        formats=joined(one.formats, two.formats),
        prefix=tuple(
            joined(item_parts(one, place), item_parts(two, place))
            for place in range(max(len(one.prefix), len(two.prefix)))
        ),
        items=joined(one.items, two.items),
        has_rest=one.has_rest or two.has_rest,
        min_items=max(one.min_items, two.min_items),
        max_items=_least(one.max_items, two.max_items),
        is_unique=one.is_unique or two.is_unique,
        properties=properties,
        required={**one.required, **two.required},
        others=tuple(dict.fromkeys((*one.others, *two.others))),
        by_pattern=tuple(dict.fromkeys((*one.by_pattern, *two.by_pattern))),
        names=joined(one.names, two.names),
        min_properties=max(one.min_properties, two.min_properties),
        max_properties=_least(one.max_properties, two.max_properties),
        one_of=tuple(one_of.items()),
    )


def item_parts(plain: Plain, place: int) -> Parts:
    """What the item at a place must fit."""
    return plain.prefix[place] if place < len(plain.prefix) else plain.items


def size_of(plain: Plain) -> int:
    """How many parts merging goes through."""
    return (
        2
        + len(plain.properties)
        + len(plain.required)
        + len(plain.enum or ())
        + len(plain.prefix)
        + len(plain.others)
        + len(plain.by_pattern)
        + len(plain.one_of)
    )
