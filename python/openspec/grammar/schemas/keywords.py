"""The keywords of one schema, read into constraints."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from fractions import Fraction

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.constraints import (
    TYPES,
    At,
    Bound,
    Others,
    Parts,
    Plain,
    Unenforceable,
    tighter,
)
from openspec.grammar.schemas.values import ValueLimit, exact, key_of

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
_CONSTRAINTS = frozenset(key for keys in KEYWORDS.values() for key in keys) | {
    "type",
    "enum",
    "const",
}
MAX_COUNT = (1 << 31) - 1
"""Of characters, items and properties, which the library counts in 32 bits."""
REFUSED = {
    "not": "",
    "if": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "dependencies": "",
    "contains": "",
    "extends": "; write allOf",
    "disallow": "",
    "divisibleBy": "; write multipleOf",
    "$dynamicRef": "; write $ref",
    "$recursiveRef": "; write $ref",
}
"""Keywords of some draft that no grammar enforces, each with what to write instead."""
ENFORCED = _CONSTRAINTS | REFUSED.keys() | {"allOf", "anyOf", "oneOf"}
"""Keywords that ask for something, but for `$ref`."""
_NUMERIC_FORMATS = frozenset(
    f"{prefix}int{bits}" for prefix in ("", "u") for bits in ("", 8, 16, 32, 64, 128)
) | {"float", "double", "decimal"}


def keywords_of(at: At) -> Mapping[str, JsonValue]:
    """A schema's keywords; one whose value is null is absent, as generators of code mean it.

    Raises:
        Unenforceable: it is no object.
    """
    if not isinstance(at.schema, Mapping):
        raise Unenforceable(at.pointer, "a schema is an object, true or false")
    return {key: value for key, value in at.schema.items() if value is not None or key == "const"}


def listed(at: At, key: str) -> list[At]:
    """The schemas of a keyword that combines some; none where it is absent."""
    given = keywords_of(at).get(key)
    if given is None:
        return []
    if not isinstance(given, (list, tuple)) or not given:
        raise Unenforceable(f"{at.pointer or '#'}/{key}", f"{key} must be a list of schemas")
    return [at[key][index] for index in range(len(given))]


def read_plain(at: At) -> Plain:
    """The constraints of a schema's own keywords.

    Its combinations and what is unevaluated are the caller's business.

    Raises:
        Unenforceable: a keyword that no grammar enforces, or a value that is none of its keyword.
    """
    schema, pointer = keywords_of(at), at.pointer
    for name, remedy in REFUSED.items():
        if name in schema and not _is_idle(name, schema):
            raise Unenforceable(f"{pointer or '#'}/{name}", f"{name} cannot be enforced{remedy}")
    if not _CONSTRAINTS & schema.keys():
        return Plain(pointer, is_trivial=True)
    reader = _Reader(at, schema)
    types = reader.types()
    low, high = reader.bounds()
    own, patterns = reader.schemas("properties"), reader.patterns()
    others: tuple[Others, ...] = ()
    if "additionalProperties" in schema:
        texts = tuple(pattern for pattern, _ in patterns)
        others = (Others(frozenset(own), texts, at["additionalProperties"]),)
    prefix, items = reader.items()
    return Plain(
        pointer,
        types=types,
        implied=_implied(schema),
        enum=reader.enum(has_null=types is not None and schema.get("nullable") is True),
        low=low,
        high=high,
        multiple_of=reader.multiple(),
        min_length=reader.count("minLength") or 0,
        max_length=reader.count("maxLength"),
        patterns=reader.text("pattern"),
        formats=reader.text("format"),
        prefix=prefix,
        items=items,
        has_rest=bool(items),
        min_items=reader.count("minItems") or 0,
        max_items=reader.count("maxItems"),
        is_unique=schema.get("uniqueItems") is True,
        properties={name: (part,) for name, part in own.items()},
        lists_properties="properties" in schema,
        required=dict.fromkeys(reader.names("required")),
        others=others,
        by_pattern=patterns,
        names=(at["propertyNames"],) if "propertyNames" in schema else (),
        min_properties=reader.count("minProperties") or 0,
        max_properties=reader.count("maxProperties"),
    )


def _is_idle(name: str, schema: Mapping[str, JsonValue]) -> bool:
    """Whether a keyword asks for nothing."""
    if name == "if":
        return "then" not in schema and "else" not in schema
    if name == "not":
        return schema[name] is False
    return name.startswith("depend") and schema[name] == {}


def _implied(schema: Mapping[str, JsonValue]) -> frozenset[str]:
    """The types that keywords speak of; a format of numbers speaks of none."""
    kinds = {kind for kind, keys in KEYWORDS.items() for key in keys if key in schema}
    if "string" in kinds and not any(key in schema for key in KEYWORDS["string"][:3]):
        name = schema["format"]
        is_numeric = isinstance(name, str) and name in _NUMERIC_FORMATS
        if "type" in schema or is_numeric:
            kinds.discard("string")
    return frozenset(kinds)


class _Reader:
    """Keywords of one schema, typed."""

    def __init__(self, at: At, schema: Mapping[str, JsonValue]) -> None:
        self._at, self._schema = at, schema

    def _wrong(self, key: str, what: str) -> Unenforceable:
        return Unenforceable(f"{self._at.pointer or '#'}/{key}", f"{key} must be {what}")

    def types(self) -> frozenset[str] | None:
        given = self._schema.get("type")
        if given is None:
            return None
        kinds = list(given) if isinstance(given, (list, tuple)) else [given]
        if not kinds or not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
            raise self._wrong("type", f"one of {', '.join(TYPES)}, or a list of those")
        if self._schema.get("nullable") is True:  # OpenAPI 3.0
            kinds.append("null")
        return frozenset(map(str, kinds))

    def enum(self, *, has_null: bool) -> dict[Hashable, JsonValue] | None:
        """The values of enum and const by their keys."""
        found: dict[Hashable, JsonValue] | None = None
        try:
            if "enum" in self._schema:
                given = self._schema["enum"]
                if not isinstance(given, (list, tuple)) or not given:
                    raise self._wrong("enum", "a list that is not empty")
                found = {}
                for value in given:
                    found.setdefault(key_of(value), value)
            if "const" in self._schema:
                value = self._schema["const"]
                key = key_of(value)
                found = {key: value} if found is None or key in found else {}
        except ValueLimit as error:
            raise Unenforceable(self._at.pointer, str(error)) from None
        if found is not None and has_null:
            found.setdefault(key_of(None), None)
        return found

    def names(self, key: str) -> tuple[str, ...]:
        given = self._schema.get(key, ())
        if isinstance(given, bool):  # draft 3
            raise self._wrong(key, "a list of names beside the properties")
        if not isinstance(given, (list, tuple)) or not all(isinstance(n, str) for n in given):
            raise self._wrong(key, "a list of names")
        return tuple(map(str, given))

    def text(self, key: str) -> Parts:
        given = self._schema.get(key)
        if given is None:
            return ()
        if not isinstance(given, str):
            raise self._wrong(key, "a text")
        return (self._at[key],)

    def number(self, key: str) -> Fraction | None:
        given = self._schema.get(key)
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise self._wrong(key, "a number")
        try:
            return exact(given)
        except ValueLimit as error:
            raise Unenforceable(f"{self._at.pointer or '#'}/{key}", str(error)) from None

    def multiple(self) -> Fraction | None:
        given = self.number("multipleOf")
        if given is not None and given <= 0:
            raise self._wrong("multipleOf", "a number above 0")
        return given

    def count(self, key: str) -> int | None:
        given = self.number(key)
        if given is None:
            return None
        if given < 0 or given.denominator != 1:
            raise self._wrong(key, "a whole number from 0")
        if given <= MAX_COUNT:
            return int(given)
        if key.startswith("max"):
            return MAX_COUNT
        raise Unenforceable(f"{self._at.pointer or '#'}/{key}", f"it goes up to {MAX_COUNT}")

    def bounds(self) -> tuple[Bound | None, Bound | None]:
        found: list[Bound | None] = []
        for key, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            value, flag = self.number(key), self._schema.get(exclusive)
            bound = None if value is None else (value, flag is True)  # draft 4
            own = None if isinstance(flag, bool) else self.number(exclusive)
            other = None if own is None else (own, True)
            found.append(tighter(bound, other, is_low=key == "minimum"))
        return found[0], found[1]

    def schemas(self, key: str) -> dict[str, At]:
        given = self._schema.get(key)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise self._wrong(key, "an object of schemas")
        inner = self._at[key]
        return {name: inner[name] for name in given}

    def patterns(self) -> tuple[tuple[At, At], ...]:
        return tuple(
            (At(source, at.pointer), at) for source, at in self.schemas("patternProperties").items()
        )

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
        return prefix, ((at[rest],) if rest in schema else ())
