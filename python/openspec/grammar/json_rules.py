"""JSON of a schema in the library's rules, with white space and lengths of our own.

The library writes the rules. It allows white space wherever JSON does, and counts characters in one
rule each, which costs a mask of the whole vocabulary a character. Here white space is what people
and models write, a long length is the budget of one rule, and equal short ones share an automaton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from openspec import _grammar
from openspec.checkpoint.strict_json import JsonValue
from openspec.grammar.patterns.characters import ESCAPED_IN_JSON
from openspec.grammar.formats import LENGTH_RULE
from openspec.grammar.patterns.pattern import ANY, Repeat, render

MAX_INDENT = 32
_LINE = ('""', '" "')
LAYOUTS = {
    "line": _LINE,
    # Spelled out: the library would write a repetition as rules that do not know what follows.
    "indented": (*_LINE, *('"\\n"' + " [ \\t]" * count for count in range(MAX_INDENT + 1))),
}
"""White space after a bracket or comma and before a closing bracket, by the name of a layout."""
_FOLLOWS = r'(=(["\[{}\]\-0-9tfn]))'
"""What begins a value, a name or an end: with it most tokens are decided when compiling."""

MAX_COUNTED = 256
"""Characters that the automata of one schema count. Each takes about 20 ms at 150,000 tokens."""
MAX_COUNTED_START = 8
"""The most that a text within a budget must have: an automaton counts those."""

_NO_ESCAPE = r"[^\"\\\0-\x1f]"
_LIBRARY_CHARACTERS = r"[^\"\\\r\n]"
_CHARACTERS = re.compile(r'(\w+_characters) ::= \(\(\[\^\\"\\\\\\r\\n\]\)\)')
_GAP_RULE = re.compile(r"whitespace(_\d+)? ::= .*")
_GAP = r"whitespace(?:_\d+)?\{0, 2\}"
_PIECE = re.compile(
    rf'(?P<separator>{_GAP} "(?P<sign>[:,])" {_GAP})|(?P<gap>{_GAP})'
    r"|(?P<characters>\w+_characters)\{(?P<low>\d+), (?P<high>-?\d+)\}"
    r'|"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]'
)


def chars_behind_quote(tokens: Iterable[bytes]) -> int:
    """The most characters of a token after its first quote: what it can add to a text it opens."""
    found = (token.partition(b'"')[2] for token in tokens)
    return max((sum(byte & 0xC0 != 0x80 for byte in behind) for behind in found), default=0)


def compile_source(
    vocabulary: _grammar.Vocabulary, source: str, behind_quote: int | None = None
) -> bytes:
    """The compiled grammar of a source that `formats.source_of` has written.

    `behind_quote`: `chars_behind_quote` of the vocabulary. Without it automata count every length
    below that of the longest token, whatever that takes.

    Raises:
        ValueError: the library refuses it.
    """
    longest = vocabulary.max_token_chars
    tag = json.loads(source)
    tag["format"] = _with_rules(
        tag["format"], longest, longest if behind_quote is None else behind_quote
    )
    return _grammar.compile_structural_tag(vocabulary, json.dumps(tag, ensure_ascii=False))


def _with_rules(format: JsonValue, longest: int, behind_quote: int) -> JsonValue:
    if isinstance(format, list):
        return [_with_rules(one, longest, behind_quote) for one in format]
    if not isinstance(format, Mapping):
        return format
    if format.get("type") == "json_schema":
        schema = json.dumps(format["json_schema"], ensure_ascii=False)
        rules = json_rules(schema, str(format["layout"]), longest, behind_quote)
        return {"type": "grammar", "grammar": rules}
    return {key: _with_rules(value, longest, behind_quote) for key, value in format.items()}


def json_rules(schema: str, layout: str, longest: int, behind_quote: int) -> str:
    """The grammar, in EBNF, of a schema that `enforceable` has rewritten.

    Of the vocabulary: characters of its `longest` token, and the most `behind_quote` in one.
    """
    lines = _grammar.json_schema_rules(schema).splitlines()
    counted = {found[1] for line in lines if (found := _CHARACTERS.fullmatch(line))}
    lengths: dict[str, str] = {}  # rules by name
    budgets = _with_budgets(lines, counted, longest, behind_quote)

    def replaced(piece: re.Match[str]) -> str:
        if piece["separator"]:
            return '":" json_space' if piece["sign"] == ":" else '"," json_gap'
        if piece["gap"]:
            return "json_gap"
        if piece["characters"] in counted:
            low, high = int(piece["low"]), int(piece["high"])
            return _of_length(lengths, low, high, longest, (low, high) in budgets)
        return _NO_ESCAPE if piece[0] == _LIBRARY_CHARACTERS else piece[0]

    kept = [line for line in lines if not _GAP_RULE.fullmatch(line)]
    rules = [_PIECE.sub(replaced, line) for line in kept]
    gaps = (("json_space", _LINE), ("json_gap", LAYOUTS[layout]))
    layout_rules = [f"{name} ::= ({' | '.join(options)}) {_FOLLOWS}" for name, options in gaps]
    length_rules = [f"{name} ::= {body}" for name, body in lengths.items()]
    return "\n".join([*rules, *length_rules, *layout_rules])


def _with_budgets(
    lines: list[str], counted: set[str], longest: int, behind_quote: int
) -> set[tuple[int, int]]:
    """Lengths below the longest token that a budget counts: automata of all would take too long."""
    found = {
        (int(piece["low"]), int(piece["high"]))
        for line in lines
        for piece in _PIECE.finditer(line)
        if piece["characters"] in counted
    }
    budgets, left = set(), MAX_COUNTED
    for low, high in sorted(found, key=lambda ends: ends[1]):
        if high < 0 or high - low >= longest:
            continue
        if high > left and high > behind_quote and low <= MAX_COUNTED_START:
            budgets.add((low, high))
        else:
            left -= high
    return budgets


def _of_length(rules: dict[str, str], low: int, high: int, longest: int, has_budget: bool) -> str:
    """So many characters (high -1: any number); adds the rule that this needs, if any.

    The library does not see a budget in a token that begins before its rule, so the budget has to
    be larger than what such a token has of the text. An automaton counts smaller ones.
    """
    start = f"{_NO_ESCAPE}{{{low}}}" if low else ""
    if high < 0:
        return f"{start} {_NO_ESCAPE}*"
    # A rule for each place: so the library knows what follows it.
    name = f"{LENGTH_RULE}_{len(rules)}"
    if has_budget:
        rules[f"{name}[max_chars={high}]"] = f"{start} {_NO_ESCAPE}*"
        return name
    if high - low >= longest:
        rules[f"{name}[max_chars={high - low}]"] = f"{_NO_ESCAPE}*"
        return f"{start} {name}"
    # One for all places: each state takes milliseconds to compile. So it says what follows.
    name = f"counted_text_{low}_{high}"
    pattern = render(Repeat(ANY, low, high), ESCAPED_IN_JSON).replace("\\", "\\\\")
    rules[name] = f'Regex("{pattern}", json_string=true) (="\\"")'
    return name
