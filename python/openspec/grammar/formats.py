"""Formats: the pieces that grammars are put together from, as xgrammar's structural tags have them.

A format is JSON. Whole ones become a grammar's source with `source_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.schemas.constraints import Unenforceable
from openspec.grammar.schemas.json_tree import JsonTree
from openspec.grammar.schemas.schema import enforceable

Format: TypeAlias = dict[str, JsonValue]

MAX_SOURCE_BYTES = 1 << 19
"""Of a request's grammar, all its schemas together."""
MAX_TEXTS = 10_000
LENGTH_RULE = "text_of_length"
"""What `csrc/grammar` knows the rules with a budget of characters by: not for a request's own."""
MAX_TAG_DEPTH = 32
ANY_OBJECT: Format = {"type": "object", "additionalProperties": True}


def text(value: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def json_of(schema: JsonValue, layout: str = "indented") -> Format:
    """JSON of a schema that `enforceable` takes; `layout` as in `json_rules`."""
    return {"type": "json_schema", "json_schema": schema, "layout": layout}


def any_text(without: Sequence[str] = ()) -> Format:
    """Any text that contains none of these."""
    return {"type": "any_text", "excludes": list(without)} if without else {"type": "any_text"}


def pattern(source: str) -> Format:
    """A regular expression in the library's syntax, matched by whole texts."""
    return {"type": "regex", "pattern": source}


def sequence(*parts: Format) -> Format:
    """One after another."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def choice(*options: Format) -> Format:
    """One of them."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(content: Format) -> Format:
    """The content, or nothing."""
    return {"type": "optional", "content": content}


def any_number(content: Format) -> Format:
    """The content, any number of times."""
    return {"type": "star", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    """Content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def source_of(format: Format, param: str) -> str:
    """What the compiler takes: the same text for the same grammar.

    Raises:
        RequestError: too large, naming `param`.
    """
    source = json.dumps({"type": "structural_tag", "format": format}, ensure_ascii=False)
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise RequestError(
            f"{param}: the grammar is larger than {MAX_SOURCE_BYTES} bytes; send a smaller one",
            param,
        )
    return source


def schema_format(schema: JsonValue, param: str, place: str = "") -> Format:
    """JSON of a request's schema.

    Raises:
        RequestError: it cannot be enforced, naming the place in it.
    """
    rewritten(schema, param, place)
    return json_of(schema)


def rewritten(schema: JsonValue, param: str, place: str = "") -> JsonTree:
    """A request's schema as a tree; `place` says where in `param` it stands."""
    try:
        return enforceable(schema)
    except Unenforceable as error:
        raise RequestError(f"{place or param}: {error}", param) from None
    except RecursionError:
        raise RequestError(f"{place or param}: the schema is nested too deeply", param) from None


def regex_format(source: str, param: str) -> Format:
    """Texts that match a request's pattern as a whole.

    Raises:
        RequestError: it cannot be enforced.
    """
    try:
        found = Pattern(source).automaton(is_anchored=True)
        return {"type": "grammar", "grammar": f"root ::= {found.spelled()}"}
    except PatternError as error:
        raise RequestError(
            f"{param}: {source[:100]!r} cannot be enforced: {error}", param
        ) from None


def choice_format(texts: Sequence[str], param: str) -> Format:
    """One of a request's texts.

    Raises:
        RequestError: none, too many, or an empty one.
    """
    if not 0 < len(texts) <= MAX_TEXTS or not all(texts):
        raise RequestError(
            f"{param}: choice takes 1 to {MAX_TEXTS} texts, none of them empty", param
        )
    return choice(*(text(one) for one in dict.fromkeys(texts)))


def grammar_format(source: str, param: str) -> Format:
    """A request's grammar in xgrammar's EBNF.

    Raises:
        RequestError: it is empty, or has a rule of a name that lengths of schemas take.
    """
    if not source.strip():
        raise RequestError(f"{param} is empty", param)
    if LENGTH_RULE in source:
        raise RequestError(f"{param}: the name {LENGTH_RULE} is taken; use another", param)
    return {"type": "grammar", "grammar": source}


_LISTS = ("elements", "tags")
_KNOWN_TAGS = frozenset(
    "const_string json_schema any_text grammar regex sequence or tag triggered_tags "
    "tags_with_separator optional plus star repeat dispatch".split()
)


def structural_tag_format(given: JsonValue, param: str) -> Format:
    """A request's structural tag, of the form with `format` or the older one with `structures`.

    Raises:
        RequestError: it is none, or one of its schemas or patterns cannot be enforced.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise RequestError(f"{param} is not JSON", param) from None
    if not isinstance(given, Mapping):
        raise RequestError(f"{param} must be an object", param)
    if "structures" in given:
        structures = given["structures"]
        if not isinstance(structures, list):
            raise RequestError(f"{param}: structures must be a list", param)
        tags: list[JsonValue] = []
        for one in structures:
            if not isinstance(one, Mapping):
                raise RequestError(f"{param}: structures must hold objects", param)
            content: Format = {"type": "json_schema", "json_schema": one.get("schema", {})}
            tags.append({"type": "tag", "begin": one.get("begin"), "content": content,
                         "end": one.get("end")})  # fmt: skip
        triggered: Format = {"type": "triggered_tags", "triggers": given.get("triggers"),
                             "tags": tags}  # fmt: skip
        return _checked(triggered, param, "structures", 0)
    if "format" not in given:
        raise RequestError(f"{param}: it needs format, or structures and triggers", param)
    return _checked(given["format"], param, "format", 0)


def _typed(item: JsonValue, key: str) -> JsonValue:
    """An item of a list; in a list of tags the library takes one without a type for a tag."""
    if key == "tags" and isinstance(item, Mapping):
        return {"type": "tag", **item}
    return item


def _checked(given: JsonValue, param: str, place: str, depth: int) -> Format:
    if not isinstance(given, Mapping) or depth > MAX_TAG_DEPTH:
        raise RequestError(
            f"{param}: {place} must be a format, nested at most {MAX_TAG_DEPTH} deep", param
        )
    kind = given.get("type")
    if kind not in _KNOWN_TAGS:
        raise RequestError(
            f"{param}: {place}: type {str(kind)[:64]!r} is not supported; known are "
            f"{', '.join(sorted(_KNOWN_TAGS))}",
            param,
        )
    result: Format = dict(given)
    if kind == "json_schema":
        if given.get("style", "json") != "json" or given.get("excludes"):
            raise RequestError(f"{param}: {place}: only JSON without excludes is supported", param)
        return schema_format(given.get("json_schema", {}), param, f"{param}: {place}")
    if kind == "regex":
        return regex_format(str(given.get("pattern", "")), param)
    if kind == "grammar":
        return grammar_format(str(given.get("grammar", "")), param)
    if "content" in given:
        result["content"] = _checked(given["content"], param, f"{place}.content", depth + 1)
    for key in _LISTS:
        items = given.get(key)
        if items is not None:
            if not isinstance(items, (list, tuple)):
                raise RequestError(f"{param}: {place}.{key} must be a list", param)
            result[key] = [
                _checked(_typed(item, key), param, f"{place}.{key}[{i}]", depth + 1)
                for i, item in enumerate(items)
            ]
    if kind == "dispatch":
        rules = given.get("rules")
        if not isinstance(rules, (list, tuple)) or not all(
            isinstance(rule, (list, tuple)) and len(rule) == 2 for rule in rules
        ):
            raise RequestError(f"{param}: {place}.rules must be a list of pairs", param)
        result["rules"] = [
            [rule[0], _checked(rule[1], param, f"{place}.rules[{i}]", depth + 1)]
            for i, rule in enumerate(rules)
        ]
    return result
