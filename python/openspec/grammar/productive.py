"""Whether a rewritten schema has values that end."""

from __future__ import annotations

from collections.abc import Mapping

from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.constraints import Unenforceable


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
