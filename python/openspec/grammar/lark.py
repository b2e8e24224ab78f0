"""Grammars in Lark: the part that clients of vLLM and Outlines write, as EBNF.

The library reads them. What would change more than the mask, or would enforce less than it says, is
refused by name: JSON schemas have `structured_outputs.json`, special tokens structural tags.
"""

from __future__ import annotations

import re
import sys

from openspec import _grammar
from openspec.errors import RequestError
from openspec.grammar.patterns.nodes import PatternError
from openspec.grammar.patterns.pattern import Pattern

DIALECTS = "a grammar is in EBNF (root ::= ...) or in Lark (start: ...)"
_RULE = re.compile(r"^[ \t]*\w+(\.\d+)?\s*:(?!:)", re.MULTILINE)
_HIDDEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|/(?![/*])(?:[^/\\\n]|\\.)+/|//.*|#.*'
)
"""Texts, patterns and comments, in which nothing of Lark's own stands."""
_NO_EFFECT = re.compile(
    r"^[ \t]*(?:%llguidance[ \t]*\{[ \t]*\})?"
    r'(?:[?!]{0,2}(\w+)(?:\[capture(?:="[^"\n]*")?\])?(?=(?:\.\d+)?\s*:))?',
    re.MULTILINE,
)
"""What changes no text: options without any, how a tree is shaped, and what guidance takes out."""
_REFUSED = (
    (re.compile(r"%(?!import\b|ignore\b)\w+"), "only %import and %ignore are read"),
    (re.compile(r"@\w+"), "other grammars cannot be referred to"),
    (re.compile(r"<[^\s>]+>"), "special tokens cannot be named; structural_tag has them"),
    (re.compile(r"\w+\[[^\]\n]*\]\s*:"), "attributes of a rule are not supported"),
    (re.compile(r"\w+\.\d+\s*:"), "priorities choose no text; leave them out"),
    (re.compile(r"\w+\{"), "templates are not supported"),
)
_PLACE = re.compile(r"at line \d+, column \d+")
_COMPLAINTS = (
    (re.compile(r"unknown name '(\w+)'"), "no rule is called {}"),
    (re.compile(r"duplicate rule or terminal '(\w+)'"), "two rules are called {}"),
    (re.compile(r"unknown common import '([\w.]+)'"), "%import knows no {}"),
    (re.compile(r"(no start rule)"), "no rule is called start, where a grammar in Lark begins"),
)
"""What the library says of names, in words of our own."""


def lark_as_ebnf(source: str) -> str:
    """A grammar in Lark as EBNF.

    Raises:
        RequestError: it is no Lark, or has what is not read, by name.
    """
    source = _NO_EFFECT.sub(lambda found: (found[1] or "").rjust(len(found[0])), source)
    bare = _HIDDEN.sub(lambda found: " " if found[0][0] == "#" else '""', source)
    for pattern, reason in _REFUSED:
        if found := pattern.search(bare):
            raise RequestError(f"Lark's {found[0][:64]!r}: {reason}")
    if not _RULE.search(bare):
        raise RequestError(f"it has no rule; {DIALECTS}")
    source = _HIDDEN.sub(lambda found: _in_double_quotes(found[0]), source)
    patterns = [found for found in _HIDDEN.finditer(source) if re.match("/[^/]", found[0])]
    for found in patterns:
        if "[[:" in found[0]:  # which the library takes for characters of its own
            _check_pattern(found[0])
    try:
        return _grammar.lark_as_ebnf(source)
    except _grammar.Complaint as error:
        print(f"a grammar in Lark was refused: {error}", file=sys.stderr)
        place = _PLACE.search(str(error))
        where = f", {place[0]}" if place else ""
        for pattern, reason in _COMPLAINTS:
            if found := pattern.search(str(error)):
                raise RequestError(f"{reason.format(found[1])}{where}") from None
        for found in patterns:
            if place and _place_of(source, found.start()) == place[0]:
                _check_pattern(found[0])
        raise RequestError(f"it is no Lark that can be read{where}; {DIALECTS}") from None


def _check_pattern(text: str) -> None:
    """Refuses a pattern between slashes by what no pattern here may have."""
    try:
        Pattern(text[1:-1])
    except PatternError as error:
        raise RequestError(f"Lark's {text[:64]!r}: {error}") from None


def _place_of(source: str, at: int) -> str:
    """Where a character stands, in the library's words."""
    before = source[:at]
    return f"at line {before.count(chr(10)) + 1}, column {at - before.rfind(chr(10))}"


def _in_double_quotes(text: str) -> str:
    """A text in single quotes, as vLLM's clients write it, in Lark's."""
    if not text.startswith("'"):
        return text
    inner = text[1:-1].replace("\\'", "'").replace('"', '\\"')
    return f'"{inner}"'
