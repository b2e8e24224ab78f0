"""Grammars of calls in each model's form: what they allow, the form's parser reads as calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
from openspec.grammar.schemas.json_tree import JsonTree, Object
from openspec.text.grammars.coder_calls import coder_parameters
from openspec.text.parsers.json_forms import (
    HermesParser,
    LlamaParser,
    MistralParser,
    is_tool_name,
)
from openspec.text.parsers.value_types import NO_TYPES, ValueTypes
from openspec.text.parsers.xml_calls import is_function_name

CALL_LAYOUT = "line"
"""Of arguments, which models write on one line."""
NO_ARGUMENTS = JsonTree(Object(()), {})


@dataclass(frozen=True, slots=True)
class CallRule:
    """A tool that may be called."""

    name: str
    types: ValueTypes
    """Of its parameters: the parser of bare values goes by them."""
    arguments: JsonTree
    """What `enforceable` made of its schema."""
    is_lenient: bool = False
    """Whether they may be any object where the form cannot enforce them."""


def calls_format(
    form: str, rules: Sequence[CallRule], *, has_names: bool, parallel: bool
) -> Format:
    """One call or several, with no other text.

    `has_names`: the form writes the name before the arguments, where it knows two ways.

    Raises:
        RequestError: the form cannot be read with a tool's name, or parameters, in it.
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


def _check_name(name: str, is_read: Callable[[str], bool]) -> None:
    """Of forms that write it without quotes."""
    if not is_read(name):
        wrong = f"{name[:100]!r} cannot be a tool's name"
        raise RequestError(f"{wrong} in the form in which this model calls", "tools")


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
    _check_name(rule.name, is_tool_name)
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
    _check_name(rule.name, is_function_name)
    begin = f"<tool_call>\n<function={rule.name}>\n"
    try:
        parameters = coder_parameters(rule.arguments, rule.types)
    except RequestError as error:
        if not rule.is_lenient:
            raise RequestError(f"{rule.name[:100]}: {error}", "tools") from None
        parameters = coder_parameters(ANY_OBJECT, NO_TYPES)
    return sequence(text(begin), parameters, text("</function>\n</tool_call>"))


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
