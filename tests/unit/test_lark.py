"""Grammars in Lark, as clients of vLLM and Outlines write them."""

from __future__ import annotations

from textwrap import indent

import pytest

from openspec.errors import RequestError
from openspec.grammar.formats import grammar_format
from tests.unit.grammar_walks import accepts, compiled

SQL = """
// As vLLM's documents have it.
?start: select_statement
?select_statement: "SELECT " column_list " FROM " table_name
?column_list: column_name ("," column_name)*
?table_name: identifier
?column_name: identifier
?identifier: /[a-zA-Z_][a-zA-Z0-9_]*/
"""
ARITHMETIC = """
?start: expression
?expression: term (("+" | "-") term)*
?term: factor (("*" | "/") factor)*
?factor: NUMBER
       | "-" factor
       | "(" expression ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""
GUIDANCE = """%llguidance {}

start: "It is " c x
c[capture]: C

C: "a"
     | "b"

x[capture="x"]: X
X: /[0-9]{2}/

"""
JSON = r"""
?start: value
?value: object
| array
| ESCAPED_STRING
| SIGNED_NUMBER      -> number
| "true"             -> true
| "false"            -> false
| "null"             -> null
array  : "[" [value ("," value)*] "]"
object : "{" [pair ("," pair)*] "}"
pair   : ESCAPED_STRING ":" value
%import common.ESCAPED_STRING
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
"""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ("start: 'yes' | \"no\"", ["yes", "no"], ["yesno", ""]),
        ('rule: "x"\nstart: rule ["y"] # at most', ["x", "xy"], ["y", "xyy"]),
        ('!start: A~2..3 "B"i -> named\nA: "a".."c"', ["abb", "abcB"], ["ab", "adB"]),
        ('start: "::=" | "a: b"', ["::=", "a: b"], [":"]),
        (SQL, ["SELECT a,b_1 FROM t"], ["SELECT a b FROM t", "SELECT FROM t"]),
        (ARITHMETIC, ["1+2", "-( 3 * 4.5 )/2"], ["1+", "(1", "a"]),
        (indent(ARITHMETIC, "    "), ["1+2", "-( 3 * 4.5 )/2"], ["1+", "(1", "a"]),
        ('start: a b\n?!a: "x"\n!?b: "y"', ["xy"], ["x", "y"]),
        (GUIDANCE, ["It is a12", "It is b00"], ["It is c12", "It is a1"]),
        ('start: "\\nc[capture]: "', ["\nc[capture]: "], ["\nc: "]),
        (JSON, ['{"a": [1, -2.5e3, "x", null]}', "[]", "true"], ["{a: 1}", "[1,]", "nul"]),
    ],
    ids=[
        "texts",
        "optional",
        "terminals",
        "signs",
        "sql",
        "arithmetic",
        "indented",
        "two signs",
        "guidance",
        "text",
        "json",
    ],
)
def test_the_part_that_clients_write(source: str, good: list[str], bad: list[str]) -> None:
    data = compiled(grammar_format(source))
    assert [text for text in good if not accepts(data, text)] == []
    assert [text for text in bad if accepts(data, text)] == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('start: %json {"type": "object"}', "'%json'"),
        ("start: <think> /a/", "'<think>'"),
        ("start: @other", "'@other'"),
        ('start[temperature=0.5]: "a"', "attributes"),
        ('start: x\nx[capture, stop="."]: X\nX: /[a-z]+/', "attributes"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "'%llguidance'"),
        ('start: pair{"a"}\npair{x}: x x', "templates"),
        ('%override start: "a"', "'%override'"),
        ('start.2: "a"', "'start.2:'"),
        ('begin: "a"', "no rule is called start"),
        ('start: "a"\nstart: "b"', "two rules are called start, at line 2"),
        ("start: X\n%import python.X", "%import knows no python.X"),
        ('start: "a', "at line 1"),
        ("start: nobody", "no rule is called nobody, at line 1"),
        ("start: /(?=a)b/", "'/(?=a)b/': lookaheads"),
        ('start: A\nA: "x" /(?i:a)/', "groups of the kind '(?i'"),
        ("start: /x{,3}/", "write '{0,n}'"),
        ("start: /[[:alpha:]]+/", "is no class"),
        ("just a text", "root ::= ..."),
        ('{"type": "object"}', "start: ..."),
    ],
)
def test_what_is_not_read_is_refused_by_name(source: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(grammar_format(source))
    assert words in str(caught.value)


def test_ebnf_stays_ebnf() -> None:
    for source in ('root ::= "a: b"', '# x: y\nroot ::= inner\ninner ::= "a"', "root::=[a-z]"):
        assert grammar_format(source)["grammar"] == source
