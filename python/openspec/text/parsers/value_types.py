"""What the parameters of a tool may be, for forms of calls that write them as bare text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from openspec.checkpoint.strict_json import JsonValue

ValueTypes: TypeAlias = Mapping[str, frozenset[str]]
"""Types by a parameter's name; one that is not there is a text."""

NO_TYPES: ValueTypes = {}
TEXT = frozenset({"string"})
MAX_STEPS = 10_000
"""Schemas of a request that are looked at once more; parameters beyond that are texts."""
_COMBINED = ("anyOf", "oneOf", "allOf")
_KINDS = frozenset("boolean integer number null object array string".split())


def kind_of(value: object) -> str:
    """A JSON value's type, as schemas call it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def types_of_tools(schemas: Mapping[str, JsonValue]) -> dict[str, ValueTypes]:
    """Of tools by name, with their parameters' schemas: the types of each named parameter."""
    walk = _Walk()
    return {name: walk.value_types(schema) for name, schema in schemas.items()}


def value_types(schema: JsonValue) -> ValueTypes:
    """The types of each parameter that the schema of one tool names, wherever it names it."""
    return _Walk().value_types(schema)


class _Walk:
    """Looks at each schema of a request once, and again only for so many steps."""

    def __init__(self) -> None:
        self._kinds: dict[int, frozenset[str]] = {}  # that a schema itself names, by identity
        self._targets: dict[tuple[int, str], JsonValue] = {}
        self._num_steps = 0

    @property
    def _is_over(self) -> bool:
        return self._num_steps > MAX_STEPS

    def value_types(self, root: JsonValue) -> ValueTypes:
        named: dict[str, list[JsonValue]] = {}
        for one in self._within(root, root):
            properties = one.get("properties")
            for name, value in properties.items() if isinstance(properties, Mapping) else ():
                named.setdefault(name, []).append(value)
        found = {}
        for name, values in named.items():
            kinds = {kind for value in values for one in self._within(value, root)
                     for kind in self._kinds[id(one)]}  # fmt: skip
            if self._is_over:
                break
            found[name] = frozenset(kinds) or TEXT
        return found

    def _within(self, schema: JsonValue, root: JsonValue) -> Iterator[Mapping[str, JsonValue]]:
        """A schema, what it refers to and what it combines."""
        waiting, seen = [schema], set[int]()
        while waiting and not self._is_over:
            one = waiting.pop()
            if not isinstance(one, Mapping) or id(one) in seen:
                self._num_steps += 1
                continue
            seen.add(id(one))
            if id(one) in self._kinds:
                self._num_steps += 1
            else:
                self._kinds[id(one)] = _own_kinds(one)
            yield one
            if isinstance(reference := one.get("$ref"), str):
                waiting.append(self._target(root, reference))
            for key in _COMBINED:
                options = one.get(key)
                if isinstance(options, list):
                    waiting.extend(options)

    def _target(self, root: JsonValue, reference: str) -> JsonValue:
        """What `#/...` refers to; None where that is nothing."""
        key = id(root), reference
        if key not in self._targets:
            found = root
            for step in reference.split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                found = found.get(name) if isinstance(found, Mapping) else None
            self._targets[key] = found
        return self._targets[key]


def _own_kinds(schema: Mapping[str, JsonValue]) -> frozenset[str]:
    """The types that it names, or else those of the values that it lists."""
    given = schema.get("type")
    if given is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return frozenset(map(kind_of, values)) if isinstance(values, list) else frozenset()
    names = given if isinstance(given, list) else [given]
    return _KINDS & {name for name in names if isinstance(name, str)}
