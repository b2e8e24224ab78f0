"""JSON values: their types, and when two are the same."""

from __future__ import annotations

from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue


def type_of(value: JsonValue) -> str:
    """A value's type; of whole numbers `integer`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def same(one: JsonValue, two: JsonValue) -> bool:
    """Equality as JSON has it: true is not 1."""
    if isinstance(one, bool) != isinstance(two, bool):
        return False
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two
