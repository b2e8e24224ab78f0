"""Formats: the pieces that grammars are put together from, as xgrammar's structural tags have them.

A format is JSON, but for its schemas, which are trees. `json_rules` compiles whole ones.

What a request asks for raises a RequestError in words about its content, without a field's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from openspec.errors import RequestError
from openspec.grammar.lark import lark_as_ebnf
from openspec.grammar.patterns.automaton import Automaton
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern
from openspec.grammar.schemas.json_tree import Anything, JsonTree, Object, Others

Format: TypeAlias = dict[str, Any]

MAX_TEXTS = 10_000
LENGTH_RULE = "text_of_length"
"""What `csrc/grammar` knows the rules with a budget of characters by: not for a request's own."""
_EBNF = re.compile(r"^[^\n\"'#/:]*::=", re.MULTILINE)
"""A rule of a grammar in EBNF."""
ANY_OBJECT = JsonTree(Object((), (Others(None, Anything()),)), {})


def text(value: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def json_of(tree: JsonTree, layout: str = "indented") -> Format:
    """JSON of a tree; `layout` as in `json_rules`."""
    return {"type": "json_schema", "json_schema": tree, "layout": layout}


def any_text(without: Sequence[str] = ()) -> Format:
    """Any text that contains none of these."""
    return {"type": "any_text", "excludes": list(without)} if without else {"type": "any_text"}


def pattern(source: str) -> Format:
    """A regular expression in the library's syntax, matched by whole texts."""
    return {"type": "regex", "pattern": source}


def matching(automaton: Automaton) -> Format:
    """A text that an automaton accepts; it accepts one at least."""
    return {"type": "grammar", "grammar": f"root ::= {automaton.spelled()}"}


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


def with_tokens(format: Format, tokens: Mapping[str, int]) -> Format:
    """A format in which each of these texts is the token of that id alone, never spelled out.

    Only exact texts, and the ends of tags, are looked into.
    """
    if not tokens:
        return format
    kind = format["type"]
    if kind == "const_string":
        cut = re.split(f"({'|'.join(map(re.escape, tokens))})", format["value"])
        parts = [
            {"type": "token", "token": tokens[part]} if part in tokens else text(part)
            for part in cut
            if part
        ]
        return sequence(*parts) if parts else format
    if kind == "tag" and any(one in format["begin"] + format["end"] for one in tokens):
        begin, end = (with_tokens(text(format[key]), tokens) for key in ("begin", "end"))
        return sequence(begin, with_tokens(format["content"], tokens), end)
    result = dict(format)
    if "elements" in format:
        result["elements"] = [with_tokens(one, tokens) for one in format["elements"]]
    if "content" in format:
        result["content"] = with_tokens(format["content"], tokens)
    return result


def tag(begin: str, content: Format, end: str) -> Format:
    """Content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def regex_format(source: str) -> Format:
    """Texts that match a request's pattern as a whole.

    Raises:
        RequestError: it cannot be enforced, or no text matches.
    """
    try:
        automaton = Pattern(source).automaton(is_anchored=True)
    except PatternError as error:
        raise RequestError(f"{source[:100]!r} cannot be enforced: {error}") from None
    if automaton.is_empty:
        raise RequestError(f"no text matches {source[:100]!r}")
    return matching(automaton)


def choice_format(texts: Sequence[str]) -> Format:
    """One of a request's texts.

    Raises:
        RequestError: none, too many, or an empty one.
    """
    if not 0 < len(texts) <= MAX_TEXTS or not all(texts):
        raise RequestError(f"choice takes 1 to {MAX_TEXTS} texts, none of them empty")
    return choice(*(text(one) for one in dict.fromkeys(texts)))


def grammar_format(source: str) -> Format:
    """A request's grammar, in xgrammar's EBNF or in Lark.

    Raises:
        RequestError: it is empty, neither of both, or has what no grammar here may have.
    """
    if not source.strip():
        raise RequestError("the grammar is empty")
    if not _EBNF.search(source):
        source = lark_as_ebnf(source)
    if LENGTH_RULE in source:
        raise RequestError(f"the name {LENGTH_RULE} is taken; use another")
    return {"type": "grammar", "grammar": source}
