"""Definitions of a rewritten schema: whether their values end; equal parts as one of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.schemas.constraints import Unenforceable

MIN_SHARED_CHARS = 64


def check_productive(root: JsonValue, defs: Mapping[str, JsonValue]) -> None:
    """Refuses what can never end: a value that must hold another one of its own kind."""

    def ends(node: JsonValue) -> bool:
        if not isinstance(node, Mapping):
            return True
        if "$ref" in node:
            return str(node["$ref"]).rpartition("/")[2] in good
        if isinstance(options := node.get("anyOf"), list):
            return any(map(ends, options))
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            return all(ends(properties[name]) for name in required)
        prefix = node.get("prefixItems")
        return all(map(ends, prefix if isinstance(prefix, list) else ())) and (
            "minItems" not in node or ends(node.get("items"))
        )

    good: set[str] = set()
    while more := {name for name in defs if name not in good and ends(defs[name])}:
        good |= more
    if len(good) < len(defs) or not ends(root):
        raise Unenforceable("", "no value fits this schema: one would hold itself for ever")


def shared(root: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """An equal schema, whose definitions hold what stands in several places.

    The library takes each place for itself.
    """
    given = root.get("$defs", {})
    assert isinstance(given, Mapping)
    places = Counter[str]()
    for node in ({key: value for key, value in root.items() if key != "$defs"}, *given.values()):
        _counted(node, places)
    names = {
        key: f"s{index}"
        for index, (key, num) in enumerate(places.items())
        if num > 1 and len(key) >= MIN_SHARED_CHARS
    }
    if not names:
        return root
    defs: dict[str, JsonValue] = {}
    for name, node in given.items():
        defs[name] = _referring(node, names, defs, is_whole=True)
    whole = {key: value for key, value in root.items() if key != "$defs"}
    result = _referring(whole, names, defs, is_whole=True)
    assert isinstance(result, dict)
    return {**result, "$defs": defs}


def _with_inner(
    node: Mapping[str, JsonValue], change: Callable[[JsonValue], JsonValue]
) -> dict[str, JsonValue]:
    """The schema with those within it changed."""
    result = dict(node)
    for key in ("properties", "patternProperties"):
        value = node.get(key)
        if isinstance(value, Mapping):
            result[key] = {name: change(one) for name, one in value.items()}
    for key in ("anyOf", "prefixItems"):
        value = node.get(key)
        if isinstance(value, (list, tuple)):
            result[key] = [change(one) for one in value]
    for key in ("items", "additionalProperties"):
        if key in node:
            result[key] = change(node[key])
    return result


def _counted(node: JsonValue, places: Counter[str]) -> JsonValue:
    if isinstance(node, Mapping):
        key = json.dumps(node)
        places[key] += 1
        if places[key] == 1:  # what is within an equal one is counted once
            _with_inner(node, partial(_counted, places=places))
    return node


def _referring(
    node: JsonValue, names: Mapping[str, str], defs: dict[str, JsonValue], is_whole: bool = False
) -> JsonValue:
    if not isinstance(node, Mapping):
        return node
    name = None if is_whole else names.get(json.dumps(node))
    if name is None or name not in defs:
        result = _with_inner(node, partial(_referring, names=names, defs=defs))
        if name is None:
            return result
        defs[name] = result
    return {"$ref": f"#/$defs/{name}"}
