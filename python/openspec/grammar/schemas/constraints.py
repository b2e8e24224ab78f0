"""What one JSON schema asks of a value, without references and choices; and two of them at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.values import same

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
ALL_TYPES = frozenset(TYPES)
KEYWORDS = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "unevaluatedItems",
    ),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
}
"""Keywords by the type of the values that they speak of."""
REFUSED = {
    "not": "",
    "if": "",
    "then": "",
    "else": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "extends": "; write allOf",
    "disallow": "",
    "divisibleBy": "; write multipleOf",
    "$dynamicRef": "; write $ref",
    "$recursiveRef": "; write $ref",
}
"""Keywords of some draft that no grammar enforces, each with what to write instead."""


class Unenforceable(ValueError):
    """A place in a schema that cannot be enforced, and why."""

    def __init__(self, pointer: str, reason: str) -> None:
        super().__init__(f"{pointer or '#'}: {reason}")


class Unsatisfiable(Exception):
    """No value fits."""


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


@dataclass(frozen=True, slots=True)
class Others:
    """What one schema says of properties and items that it does not name."""

    names: frozenset[str]
    patterns: tuple[str, ...]
    schema: At

    def concerns(self, name: str) -> bool:
        """Whether a property of this name is one of them."""
        return name not in self.names and not any(
            re.search(pattern, name) for pattern in self.patterns
        )


@dataclass(frozen=True, slots=True)
class Plain:
    """Constraints on one value. None: there is none."""

    pointer: str
    types: frozenset[str] | None = None
    implied: frozenset[str] = frozenset()
    """Types that keywords speak of."""
    enum: tuple[JsonValue, ...] | None = None
    low: tuple[float, bool] | None = None
    """With whether the value itself is left out."""
    high: tuple[float, bool] | None = None
    multiple_of: float | None = None
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    prefix: tuple[Parts, ...] = ()
    items: Parts = ()
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False
    properties: Mapping[str, Parts] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    others: tuple[Others, ...] = ()
    by_pattern: tuple[tuple[str, At], ...] = ()
    names: Parts = ()
    min_properties: int = 0
    max_properties: int | None = None

    @property
    def possible_types(self) -> frozenset[str]:
        """The types that answers have: where none is named, those that keywords speak of."""
        return self.types if self.types is not None else self.implied or ALL_TYPES

    @property
    def is_closed(self) -> bool:
        """Whether answers hold only properties that it names."""
        is_open = self.others or self.by_pattern or not self.properties
        return not is_open or any(other.schema.schema is False for other in self.others)


def read_plain(at: At) -> Plain:
    """The constraints of a schema's own keywords; its combinations are the caller's business.

    Raises:
        Unenforceable: a keyword that no grammar enforces, or a value that is none of its keyword.
    """
    schema, pointer = at.schema, at.pointer
    if not isinstance(schema, Mapping):
        raise Unenforceable(pointer, "a schema is an object, true or false")
    for name, remedy in REFUSED.items():
        if name in schema:
            raise Unenforceable(f"{pointer or '#'}/{name}", f"{name} cannot be enforced{remedy}")
    reader = _Reader(at)
    names = {kind for kind, keywords in KEYWORDS.items() for key in keywords if key in schema}
    formats = reader.texts("format")
    if "format" in schema and not any(key in schema for key in KEYWORDS["string"][:3]):
        names.discard("string")
        if "type" not in schema and not _NUMERIC_FORMATS.issuperset(formats):
            names.add("string")
    enum: tuple[JsonValue, ...] | None = None
    if "enum" in schema:
        enum = tuple(reader.listed("enum"))
    if "const" in schema:
        value = schema["const"]
        enum = (value,) if enum is None or any(same(value, one) for one in enum) else ()
    low, high = reader.bounds()
    own = dict(reader.schemas("properties"))
    patterns = reader.schemas("patternProperties")
    others: tuple[Others, ...] = ()
    key = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
    if key in schema:
        known = frozenset(own)
        others = (Others(known, tuple(pattern for pattern, _ in patterns), at[key]),)
        if key == "unevaluatedProperties":
            if not isinstance(schema[key], bool):
                raise Unenforceable(f"{pointer}/{key}", "only true or false can be enforced")
            others = () if schema[key] is False and own else others
    prefix, items = reader.items()
    return Plain(
        pointer,
        types=reader.types(),
        implied=frozenset(names),
        enum=enum,
        low=low,
        high=high,
        multiple_of=reader.number("multipleOf", above=0),
        min_length=reader.count("minLength") or 0,
        max_length=reader.count("maxLength"),
        patterns=reader.texts("pattern"),
        formats=formats,
        prefix=prefix,
        items=items,
        min_items=reader.count("minItems") or 0,
        max_items=reader.count("maxItems"),
        is_unique=schema.get("uniqueItems") is True,
        properties={name: (part,) for name, part in own.items()},
        required=reader.names("required"),
        others=others,
        by_pattern=tuple(patterns),
        names=(at["propertyNames"],) if "propertyNames" in schema else (),
        min_properties=reader.count("minProperties") or 0,
        max_properties=reader.count("maxProperties"),
    )


_NUMERIC_FORMATS = frozenset(
    f"{prefix}int{bits}" for prefix in ("", "u") for bits in ("", 8, 16, 32, 64, 128)
) | {"float", "double", "decimal"}


class _Reader:
    """Keywords of one schema, typed."""

    def __init__(self, at: At) -> None:
        assert isinstance(at.schema, Mapping)
        self._at, self._schema = at, at.schema

    def _wrong(self, key: str, what: str) -> Unenforceable:
        return Unenforceable(f"{self._at.pointer or '#'}/{key}", f"{key} must be {what}")

    def types(self) -> frozenset[str] | None:
        given = self._schema.get("type")
        if given is None:
            return None
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        for kind in listed:
            if kind not in TYPES:
                raise self._wrong("type", f"one of {', '.join(TYPES)}")
        return frozenset(str(kind) for kind in listed)

    def listed(self, key: str) -> Sequence[JsonValue]:
        given = self._schema[key]
        if not isinstance(given, (list, tuple)) or not given:
            raise self._wrong(key, "a list that is not empty")
        return given

    def names(self, key: str) -> tuple[str, ...]:
        given = self._schema.get(key, ())
        if isinstance(given, bool):  # draft 3
            raise self._wrong(key, "a list of names beside the properties")
        if not isinstance(given, (list, tuple)) or not all(isinstance(n, str) for n in given):
            raise self._wrong(key, "a list of names")
        return tuple(dict.fromkeys(str(name) for name in given))

    def texts(self, key: str) -> tuple[str, ...]:
        given = self._schema.get(key)
        if given is None:
            return ()
        if not isinstance(given, str):
            raise self._wrong(key, "a text")
        return (given,)

    def number(self, key: str, above: float = -math.inf) -> float | None:
        given = self._schema.get(key)
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given <= above:
            raise self._wrong(key, "a number" + (f" above {above}" if above == 0 else ""))
        return given

    def count(self, key: str) -> int | None:
        given = self.number(key)
        if given is None:
            return None
        if given < 0 or given != int(given):
            raise self._wrong(key, "a whole number from 0")
        return int(given)

    def bounds(self) -> tuple[tuple[float, bool] | None, tuple[float, bool] | None]:
        found: list[tuple[float, bool] | None] = []
        for key, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            value, flag = self.number(key), self._schema.get(exclusive)
            bound = None if value is None else (value, flag is True)  # draft 4
            if flag is not None and not isinstance(flag, bool):
                own = self.number(exclusive)
                assert own is not None
                other = (own, True)
                bound = other if bound is None else _tighter(bound, other, key == "minimum")
            found.append(bound)
        return found[0], found[1]

    def schemas(self, key: str) -> list[tuple[str, At]]:
        given = self._schema.get(key)
        if given is None:
            return []
        if not isinstance(given, Mapping):
            raise self._wrong(key, "an object of schemas")
        return [(name, self._at[key][name]) for name in given]

    def items(self) -> tuple[tuple[Parts, ...], Parts]:
        """The schemas of the items at the front, and the one of all others."""
        schema, at = self._schema, self._at
        front, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), (list, tuple)):  # until draft 2019-09
            front, rest = "items", "additionalItems"
        given = schema.get(front, ())
        if not isinstance(given, (list, tuple)):
            raise self._wrong(front, "a list of schemas")
        prefix = tuple((at[front][i],) for i in range(len(given)))
        if rest not in schema and "unevaluatedItems" in schema:
            rest = "unevaluatedItems"
        return prefix, ((at[rest],) if rest in schema else ())


def _tighter(one: tuple[float, bool], two: tuple[float, bool], is_low: bool) -> tuple[float, bool]:
    if one[0] == two[0]:
        return one[0], one[1] or two[1]
    return one if (one[0] > two[0]) == is_low else two


def _least(one: int | None, two: int | None) -> int | None:
    return min((n for n in (one, two) if n is not None), default=None)


def merged(one: Plain, two: Plain) -> Plain:
    """The constraints of both.

    Raises:
        Unsatisfiable: no value fits both.
        Unenforceable: both bind items or multiples, each in its own way.
    """
    types = one.types if two.types is None else two.types
    if one.types is not None and two.types is not None:
        types = one.types & two.types
        if "integer" in one.types | two.types and "number" in one.types | two.types:
            types |= {"integer"}
        if not types:
            raise Unsatisfiable
    enum = one.enum if two.enum is None else two.enum
    if one.enum is not None and two.enum is not None:
        enum = tuple(value for value in one.enum if any(same(value, v) for v in two.enum))
    pairs = [(one.low, two.low, True), (one.high, two.high, False)]
    low, high = (a if b is None else b if a is None else _tighter(a, b, up) for a, b, up in pairs)
    multiples = {m for m in (one.multiple_of, two.multiple_of) if m is not None}
    if len(multiples) > 1:
        if not all(m == int(m) for m in multiples):
            raise Unenforceable(two.pointer, "two multipleOf at once cannot be enforced")
        multiples = {math.lcm(*(int(m) for m in multiples))}
    if (one.prefix or two.prefix) and (one.items or one.prefix) and (two.items or two.prefix):
        raise Unenforceable(two.pointer, "two lists of items at once cannot be enforced")
    properties = dict(one.properties)
    for name, parts in two.properties.items():
        properties[name] = (*properties.get(name, ()), *parts)
    return replace(
        one,
        pointer=one.pointer if len(one.pointer) >= len(two.pointer) else two.pointer,
        types=types,
        implied=one.implied | two.implied,
        enum=enum,
        low=low,
        high=high,
        multiple_of=next(iter(multiples), None),
        min_length=max(one.min_length, two.min_length),
        max_length=_least(one.max_length, two.max_length),
        patterns=tuple(dict.fromkeys((*one.patterns, *two.patterns))),
        formats=tuple(dict.fromkeys((*one.formats, *two.formats))),
        prefix=one.prefix or two.prefix,
        items=(*one.items, *two.items),
        min_items=max(one.min_items, two.min_items),
        max_items=_least(one.max_items, two.max_items),
        is_unique=one.is_unique or two.is_unique,
        properties=properties,
        required=tuple(dict.fromkeys((*one.required, *two.required))),
        others=(*one.others, *two.others),
        by_pattern=(*one.by_pattern, *two.by_pattern),
        names=(*one.names, *two.names),
        min_properties=max(one.min_properties, two.min_properties),
        max_properties=_least(one.max_properties, two.max_properties),
    )
