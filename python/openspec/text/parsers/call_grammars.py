"""Grammars of calls in each model's form: what they allow, the form's parser reads as calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonValue
from openspec.errors import RequestError
from openspec.grammar.formats import (
    ANY_OBJECT,
    Format,
    any_number,
    any_text,
    choice,
    json_of,
    optional,
    pattern,
    sequence,
    tag,
    text,
)
from openspec.grammar.patterns.characters import TAG_OPENING
from openspec.grammar.patterns.pattern import Pattern, PatternError, of_length, render
from openspec.grammar.schemas.scalars import BOUNDED_FORMATS, bounds_of_length
from openspec.text.parsers.json_forms import HermesParser, LlamaParser, MistralParser
from openspec.text.parsers.xml_calls import VALUE_ENDS, value_types

CALL_LAYOUT = "line"
"""Of arguments, which models write on one line."""
NO_ARGUMENTS: Format = {"type": "object", "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallRule:
    """A tool that may be called."""

    name: str
    schema: JsonValue
    """As the request has it: the parser of bare values goes by it."""
    arguments: Mapping[str, JsonValue]
    """The schema as `enforceable` has rewritten it."""


def calls_format(
    form: str, rules: Sequence[CallRule], *, has_names: bool, parallel: bool
) -> Format:
    """One call or several, with no other text.

    `has_names`: the form writes the name before the arguments, where it knows two ways.
    """
    if form == "mistral" and not has_names:
        return _mistral_list(rules, parallel)
    single, separator = _FORMS[form]
    one = choice(*(single(rule) for rule in rules))
    if not parallel:
        return one
    return sequence(one, any_number(sequence(text(separator), one)))


def text_or_calls_format(
    form: str, rules: Sequence[CallRule], *, has_names: bool, parallel: bool
) -> Format:
    """Free text, which becomes calls where it begins one."""
    calls = calls_format(form, rules, has_names=has_names, parallel=parallel)
    trigger = _TRIGGERS[form]
    if form == "llama3_json":
        # The first character decides. A call after the tag is one of code, which has no grammar.
        other = sequence(pattern(r"[^\u{9}-\u{d}\u{20}\u{7b}]"), any_text([trigger]))
        return choice(calls, optional(other))
    return sequence(any_text([trigger]), optional(calls if not parallel else sequence(
        calls, any_number(sequence(any_text([trigger]), calls)), any_text([trigger])
    )))  # fmt: skip


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _arguments(rule: CallRule) -> Format:
    return json_of(rule.arguments, CALL_LAYOUT)


def _hermes(rule: CallRule) -> Format:
    begin = f'{HermesParser.opening}\n{{"name": {_quoted(rule.name)}, "arguments": '
    return tag(begin, _arguments(rule), f"}}\n{HermesParser.closing}")


def _llama(rule: CallRule) -> Format:
    return tag(f'{{"name": {_quoted(rule.name)}, "parameters": ', _arguments(rule), "}")


def _mistral_named(rule: CallRule) -> Format:
    begin = f"{MistralParser.tag}{rule.name}{MistralParser.arguments_tag}"
    return sequence(text(begin), _arguments(rule))


def _mistral_list(rules: Sequence[CallRule], parallel: bool) -> Format:
    options = [
        tag(f'{{"name": {_quoted(rule.name)}, "arguments": ', _arguments(rule), "}")
        for rule in rules
    ]
    one = choice(*options)
    more = [any_number(sequence(text(", "), one))] if parallel else []
    return sequence(text(MistralParser.tag), optional(text(" ")), text("["), one, *more, text("]"))


def _qwen_coder(rule: CallRule) -> Format:
    begin = f"<tool_call>\n<function={rule.name}>\n"
    options = [_parameters(node, rule) for node in _objects(rule.arguments, rule.arguments)]
    return sequence(text(begin), choice(*options), text("</function>\n</tool_call>"))


def _objects(node: JsonValue, root: Mapping[str, JsonValue]) -> list[Mapping[str, JsonValue]]:
    """The kinds of objects that a rewritten schema allows."""
    node = _resolved(node, root)
    options = node.get("anyOf")
    if isinstance(options, list):
        return [found for option in options for found in _objects(option, root)]
    return [ANY_OBJECT] if not node else [node] if node.get("type") == "object" else []


def _resolved(node: JsonValue, root: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    while isinstance(node, Mapping) and "$ref" in node:
        defs = root["$defs"]
        assert isinstance(defs, Mapping)
        node = defs[str(node["$ref"]).rpartition("/")[2]]
    return node if isinstance(node, Mapping) else {}


def _parameters(node: Mapping[str, JsonValue], rule: CallRule) -> Format:
    properties, required = node.get("properties"), node.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    names = set(required) if isinstance(required, list) else set()
    given = rule.schema if isinstance(rule.schema, Mapping) else {}
    parts = [text("")]
    for name, value in properties.items():
        if ">" in name or "\n" in name or "<" in name:
            raise RequestError(
                f"tools: {rule.name}: {name[:100]!r} cannot be a parameter's name in the form in "
                "which this model writes calls",
                "tools",
            )
        try:
            content = _value(value, value_types(given, name), rule.arguments)
        except PatternError as error:
            raise RequestError(
                f"tools: {rule.name}: {name[:100]!r} cannot be enforced in the form in which this "
                f"model writes calls: {error}",
                "tools",
            ) from None
        one = sequence(text(f"<parameter={name}>\n"), content, text("\n</parameter>\n"))
        parts.append(one if name in names else optional(one))
    if not properties and node.get("additionalProperties") is not False:
        key = pattern("[A-Za-z_][A-Za-z0-9_-]{0,63}")
        parts.append(
            any_number(
                sequence(
                    text("<parameter="), key, text(">\n"), any_text(VALUE_ENDS),
                    text("\n</parameter>\n"),
                )
            )
        )  # fmt: skip
    return sequence(*parts)


def _value(node: JsonValue, types: frozenset[str], root: Mapping[str, JsonValue]) -> Format:
    """A value as the form's parser reads it: bare text where it may be a text, else JSON."""
    if "string" not in types:
        inner = dict(node) if isinstance(node, Mapping) else {}
        if "$defs" in root:
            inner["$defs"] = root["$defs"]
        return json_of(inner, CALL_LAYOUT)
    options = _texts(node, root)
    if "null" in types:
        options.append(text("null"))
    return choice(*options)


def _texts(node: JsonValue, root: Mapping[str, JsonValue]) -> list[Format]:
    node = _resolved(node, root)
    if isinstance(options := node.get("anyOf"), list):
        return [found for option in options for found in _texts(option, root)]
    if isinstance(values := node.get("enum"), list):
        return [text(value) for value in values if isinstance(value, str) and "<" not in value]
    if node and node.get("type") != "string":
        return []
    if "minLength" in node or "maxLength" in node:
        return [pattern(render(of_length(*bounds_of_length(node)), TAG_OPENING))]
    source = node.get("pattern", BOUNDED_FORMATS.get(str(node.get("format"))))
    if isinstance(source, str):
        return [pattern(render(Pattern(source).whole(is_anchored=True), TAG_OPENING))]
    return [any_text(VALUE_ENDS)]


_FORMS: dict[str, tuple[Callable[[CallRule], Format], str]] = {
    "hermes": (_hermes, "\n"),
    "llama3_json": (_llama, "; "),
    "mistral": (_mistral_named, ""),
    "qwen3_coder": (_qwen_coder, "\n"),
}
_TRIGGERS = {
    "hermes": HermesParser.opening,
    "llama3_json": LlamaParser.tag,
    "mistral": MistralParser.tag,
    "qwen3_coder": "<tool_call>",
}
