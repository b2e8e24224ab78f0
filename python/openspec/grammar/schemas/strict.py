"""OpenAI's rules for strict schemas, beyond what can be enforced."""

from __future__ import annotations

from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.constraints import Unenforceable

MAX_DEPTH = 64
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def check_strict(schema: JsonValue) -> None:
    """Refuses a schema that leaves out what `strict` demands.

    Raises:
        Unenforceable: with the place and the remedy.
    """
    if not isinstance(schema, Mapping) or (schema.get("type") != "object" and "$ref" not in schema):
        raise Unenforceable("", "a strict schema is an object: its type must be 'object'")
    _check(schema, "#", 0)


def _check(schema: JsonValue, place: str, depth: int) -> None:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, Mapping):
        if schema.get("additionalProperties") is not False:
            raise Unenforceable(
                place, "a strict schema needs additionalProperties: false in every object"
            )
        names = list(properties) if isinstance(properties, Mapping) else []
        required = schema.get("required", [])
        missing = [n for n in names if not isinstance(required, list) or n not in required]
        if missing:
            raise Unenforceable(
                f"{place}/required",
                f"a strict schema requires every property, and {missing[0]!r} is not; one that may "
                "be absent has 'null' among its types",
            )
    for key in _MAPS:
        inner = schema.get(key)
        for name, value in inner.items() if isinstance(inner, Mapping) else ():
            _check(value, f"{place}/{key}/{name}", depth + 1)
    for key in _LISTS:
        options = schema.get(key)
        for index, value in enumerate(options if isinstance(options, list) else ()):
            _check(value, f"{place}/{key}/{index}", depth + 1)
    _check(schema.get("items"), f"{place}/items", depth + 1)
