"""References within a schema."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from openspec.grammar.constraints import At, Unenforceable


def target_of(root: At, at: At) -> At:
    """What the `$ref` at a place in the schema `root` refers to.

    Raises:
        Unenforceable: nothing, or what is not followed.
    """
    assert isinstance(at.schema, Mapping)
    uri = at.schema["$ref"]
    place = f"{at.pointer or '#'}/$ref"
    if not isinstance(uri, str) or not uri.startswith("#"):
        raise Unenforceable(place, "only references within the schema, '#/...', are followed")
    found = root
    for step in uri[1:].split("/")[1:]:
        key: str | int = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found.schema, (list, tuple)) and str(key).isdecimal():
            key = int(key)
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            raise Unenforceable(place, f"{uri[:100]} refers to nothing") from None
    if uri not in ("#", "#/") and not uri.startswith("#/"):
        raise Unenforceable(place, "anchors are not followed; write '#/$defs/...'")
    return found
