"""Equal parts of a rewritten schema as one definition: the library takes each place for itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue

MIN_SHARED_CHARS = 64


def shared(root: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """An equal schema, whose definitions hold what stands in several places."""
    given = root.get("$defs", {})
    assert isinstance(given, Mapping)
    places = Counter[str]()
    for node in ({key: value for key, value in root.items() if key != "$defs"}, *given.values()):
        _count(node, places)
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


def _inner(node: Mapping[str, JsonValue]) -> list[JsonValue]:
    """The schemas within one."""
    found: list[JsonValue] = []
    for key in ("properties", "patternProperties"):
        value = node.get(key)
        found += value.values() if isinstance(value, Mapping) else ()
    for key in ("anyOf", "prefixItems"):
        value = node.get(key)
        found += value if isinstance(value, (list, tuple)) else ()
    found += [node[key] for key in ("items", "additionalProperties") if key in node]
    return [value for value in found if isinstance(value, Mapping)]


def _count(node: JsonValue, places: Counter[str]) -> None:
    if not isinstance(node, Mapping):
        return
    key = json.dumps(node)
    places[key] += 1
    if places[key] == 1:  # what is within an equal one is counted once
        for inner in _inner(node):
            _count(inner, places)


def _referring(
    node: JsonValue, names: Mapping[str, str], defs: dict[str, JsonValue], is_whole: bool = False
) -> JsonValue:
    if not isinstance(node, Mapping):
        return node
    name = None if is_whole else names.get(json.dumps(node))
    if name is not None and name in defs:
        return {"$ref": f"#/$defs/{name}"}
    result = dict(node)
    for key in ("properties", "patternProperties"):
        value = node.get(key)
        if isinstance(value, Mapping):
            result[key] = {inner: _referring(one, names, defs) for inner, one in value.items()}
    for key in ("anyOf", "prefixItems"):
        value = node.get(key)
        if isinstance(value, (list, tuple)):
            result[key] = [_referring(one, names, defs) for one in value]
    for key in ("items", "additionalProperties"):
        if key in node:
            result[key] = _referring(node[key], names, defs)
    if name is None:
        return result
    defs[name] = result
    return {"$ref": f"#/$defs/{name}"}
