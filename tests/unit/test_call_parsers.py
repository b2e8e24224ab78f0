"""Tool calls in every form, as models write them, however the text is cut."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openspec.text.parsers.call_parser import CallParser
from openspec.text.parsers.message import CALL_PARSERS
from openspec.text.parsers.pieces import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
)
from openspec.text.parsers.reader import MAX_HEAD_CHARS
from openspec.text.parsers.value_types import types_of_tools
from tests.unit.examples import examples

TOOLS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "options": {"type": "object"},
            "force": {"type": "boolean"},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["integer", "null"]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
TYPES = types_of_tools(TOOLS)
Said = list[str | tuple[str, str]]
"""Content as texts, calls as name and arguments."""


def joined(pieces: list[Piece]) -> Said:
    """What all pieces say together; checks that they follow one another as they may."""
    said: Said = []
    ids: set[str] = set()
    open_index: int | None = None
    for piece in pieces:
        if isinstance(piece, Content):
            assert piece.text and open_index is None
            if said and isinstance(said[-1], str):
                said[-1] += piece.text
            else:
                said.append(piece.text)
        elif isinstance(piece, CallStart):
            assert open_index is None and piece.index == len(ids) and piece.call_id not in ids
            ids.add(piece.call_id)
            open_index = piece.index
            said.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            assert open_index == piece.index and piece.text
            name, arguments = said[-1]
            said[-1] = (name, arguments + piece.text)
        else:
            assert isinstance(piece, CallEnd) and open_index == piece.index
            open_index = None
    assert open_index is None
    return said


def parse(form: str, pieces: list[str]) -> Said:
    parser = CALL_PARSERS[form](TYPES)
    found = [piece for text in pieces for piece in parser.push(text)]
    return joined(found + parser.push("", is_last=True))


def cuts(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 8))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def check(form: str, text: str, expected: Said) -> None:
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    rng = random.Random(text)
    for _ in range(30):
        assert parse(form, cuts(text, rng)) == expected


ADD = '{"name": "add", "arguments": {"a": 1, "b": [{"}": "]"}]}}'
ADDED = ("add", '{"a": 1, "b": [{"}": "]"}]}')
H = f"<tool_call>\n{ADD}\n</tool_call>"
CODE = r'{"text": "if (a[0] == \"{\") {\n\treturn \"}\\\\\";\n} \u00e9 \ud83d\ude00 </tool"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ["plain"]),
        ("", []),
        ("\n\n", ["\n\n"]),
        (f"a\n{H}", ["a", ADDED]),
        (f"{H}\n{H}", [ADDED, ADDED]),
        (f"a{H}\nb{H}c", ["a", ADDED, "b", ADDED, "c"]),
        (f"{H}\n\n", [ADDED]),
        (H.removesuffix("</tool_call>"), [ADDED]),
        (f"<tool_call>{ADD} and\n{H}", [ADDED, " and", ADDED]),
        ("<tool_call>{}</tool_call>", ["<tool_call>{}</tool_call>"]),
        ("<tool_call>[1", ["<tool_call>[1"]),
        ("x\n\n<tool_call>y</tool_call>", ["x\n\n<tool_call>y</tool_call>"]),
        (f"{H}\n<tool_call>y\n", [ADDED, "<tool_call>y\n"]),
        ("a < b <tool", ["a < b <tool"]),
        (f"<tool_call><tool_call>{ADD}</tool_call>", ["<tool_call>", ADDED]),
        ("<tool_call>\n{'name': 'add'}\n</tool_call>", None),
        ('<tool_call>{"name": 5}</tool_call>', None),
        ('<tool_call>{"name": ""}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments": NaN}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments": 1e999}</tool_call>', ("add", "1e999")),
        ('<tool_call>{"name": "add", "arguments": nothing}</tool_call>', None),
        ('<tool_call>{"name": "add", "arguments"', None),
        ('<tool_call>{"name": "add\\ud83d", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "now"}</tool_call>', ("now", "{}")),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', ("now", "{}")),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', ("now", "{}")),
        ('<tool_call>{"name": "now", "arguments": "x"}</tool_call>', ("now", "x")),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ("add", '{"a": 1}')),
        ('<tool_call>{"id": [1, {}], "name" : "f", "arguments":{ } }</tool_call>', ("f", "{ }")),
        ('<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', ("f", "{}")),
        (f'<tool_call>{{"name": "write", "arguments": {CODE}}}</tool_call>', ("write", CODE)),
        # As text, with half a character, with a whole one, and cut within an escape.
        (r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\n\ud83d\n\"}"}</tool_call>', None),
        (r'<tool_call>{"name": "f", "arguments": "{\"\ud83d\ude00\u00E9\"', ("f", '{"😀é"')),
        (r'<tool_call>{"name": "f", "arguments": "\ud8', ("f", r"\ud8")),
        # Wrong JSON after the start goes out as it is; the closing tag ends it all the same.
        ('<tool_call>{"name": "f", "arguments": {"a": 1,, }}</tool_call>', ("f", '{"a": 1,, }')),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', ("f", '{"a": 1')),
        ('<tool_call>{"name": "f", "arguments": {"a": "1}}\n</tool_call>', ("f", '{"a": "1}}')),
        ('<tool_call>{"name": "f", "arguments": {"a": "1', ("f", '{"a": "1')),
        (f"<tool_call>{ADD}}}</tool_call>", [ADDED, "}"]),
        ('<tool_call>{"name": "f", "arguments": {}; x</tool_call>', [("f", "{}"), "; x"]),
        ("<tool_call>" + "[" * 5000, ["<tool_call>" + "[" * 5000]),
    ],
)
def test_hermes(text: str, expected: Said | tuple[str, str] | None) -> None:
    if r"\n\ud83d\n" in text:
        expected = ("f", '{"a": "\n\\ud83d\n"}')
    check("hermes", text, [text] if expected is None else expect(expected))


def expect(expected: Said | tuple[str, str]) -> Said:
    return [expected] if isinstance(expected, tuple) else expected


L = ADD.replace("arguments", "parameters")
TAG = "<|python_tag|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (L, [ADDED]),
        (f"\n {L}\n", [ADDED]),
        (f'{{"type": "function", {L[1:]}', [ADDED]),
        (f"{L}; {L}", [ADDED, ADDED]),
        (f"{L}\nDone.", [ADDED, "Done."]),
        (f"{L}; {{}}", [ADDED, "; {}"]),
        (f"Text {L}", None),
        ('{"name": "Alice", "parameters": {"age": 5}}', None),
        ('{"name": "add", "parameters": "none"}', None),
        ('{"name": "add", "age": 5}', ("add", "{}")),
        ('{"name": "add", "parameters": {"a": 1', ("add", '{"a": 1')),
        ('{"name": "add", "parameters', None),
        ('{"answer": [1, 2]}\n', None),
        ("{not json}", None),
        ("", []),
        (" \n", None),
        (f"{TAG}{L}", [ADDED]),
        (f"I look.\n{TAG}{L};{L}", ["I look.", ADDED, ADDED]),
        (f'{TAG}{{"name": "unknown", "parameters": {{}}}}', ("unknown", "{}")),
        (
            f'{TAG}brave_search.call(query="a \\"b\\" \\n\'c\' é", num=5, x=None, y=True)',
            ("brave_search", '{"query": "a \\"b\\" \\n\'c\' é", "num": 5, "x": null, "y": true}'),
        ),
        (f"{TAG}now.call()", ("now", "{}")),
        (f"{TAG}f.call(a='x',b = -1.5e3 ) then", [("f", '{"a": "x", "b": -1.5e3}'), " then"]),
        (f"{TAG}f.call(a=__import__('os'))", None),
        (f"{TAG}f.call(a=nan)", None),
        (f'{TAG}f.call(a="x", )', None),
        (f'{TAG}f.call(a="x"', None),
        (f"{TAG}print('hi')\nx = {{}}", None),
        (f"{TAG}a{TAG}{L}", [f"{TAG}a", ADDED]),
    ],
)
def test_llama(text: str, expected: Said | tuple[str, str] | None) -> None:
    check("llama3_json", text, [text] if expected is None else expect(expected))


M = "[TOOL_CALLS]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{M} [{ADD}]", [ADDED]),
        (f'{M}[{ADD}, {ADD[:-1]}, "id": "abcdefghi"}} ]', [ADDED, ADDED]),
        (f"{M} {ADD}", [ADDED]),
        (f"Look:\n{M}[{ADD}]\nThen", ["Look:", ADDED, "Then"]),
        (f"{M}[{ADD}, x]", [ADDED, ", x]"]),
        (f"{M}[{ADD}", [ADDED]),
        (f"{M}[]", None),
        (f"{M}[{{'name': 'add'}}]", None),
        (f"{M}write[ARGS]{CODE}", ("write", CODE)),
        (f"{M}add{{}}{M}now[CALL_ID]abc123DEF[ARGS] {{}}", [("add", "{}"), ("now", "{}")]),
        (f'{M}my-tool.x[ARGS]{{"a": 1}} ok', [("my-tool.x", '{"a": 1}'), " ok"]),
        (f"{M}add[ARGS]", None),
        (f"{M}add what?", None),
        (M, None),
        (f"{M}{M}add{{}}", [M, ("add", "{}")]),
    ],
)
def test_mistral(text: str, expected: Said | tuple[str, str] | None) -> None:
    check("mistral", text, [text] if expected is None else expect(expected))


def test_mistrals_ids_fit_its_templates() -> None:
    pieces = CALL_PARSERS["mistral"](TYPES).push(f"{M}[{ADD}, {ADD}]", is_last=True)
    ids = [piece.call_id for piece in pieces if isinstance(piece, CallStart)]
    assert len(set(ids)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", call_id) for call_id in ids)


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (xml("add", a="1", b="2.5"), ("add", '{"a": 1, "b": 2.5}')),
        (xml("now"), ("now", "{}")),
        (f"I add.\n\n{xml('now')}\n{xml('now')}", ["I add.", ("now", "{}"), ("now", "{}")]),
        (xml("now").removeprefix("<tool_call>\n"), ("now", "{}")),
        (xml("now").removesuffix("\n</tool_call>"), ("now", "{}")),
        (
            xml("write", path="/a b", text='\n if a < b:\n  print("</p>é")\n\n', lines="[1, 2]"),
            (
                "write",
                '{"path": "/a b", "text": "\\n if a < b:\\n  print(\\"</p>é\\")\\n\\n", '
                '"lines": [1, 2]}',
            ),
        ),
        (xml("write", path="5", text="null"), ("write", '{"path": "5", "text": "null"}')),
        (xml("write", mode="null", size="null"), ("write", '{"mode": null, "size": null}')),
        (xml("write", mode="x", size="7"), ("write", '{"mode": "x", "size": 7}')),
        (
            xml("write", force="True", options='{"a": {"b": null}}', lines="none"),
            ("write", '{"force": true, "options": {"a": {"b": null}}, "lines": "none"}'),
        ),
        (xml("add", a="1.5", b="1"), ("add", '{"a": "1.5", "b": 1}')),
        (
            xml("add", a="18446744073709551615", b="1.10"),
            ("add", '{"a": 18446744073709551615, "b": 1.10}'),
        ),
        (xml("write", lines="[1e2,0.10]"), ("write", '{"lines": [1e2,0.10]}')),
        (xml("add", a="NaN", b="Infinity"), ("add", '{"a": "NaN", "b": "Infinity"}')),
        (xml("add", a="__import__('os')"), ("add", """{"a": "__import__('os')"}""")),
        (xml("add", other="1"), ("add", '{"other": "1"}')),
        (xml("unknown", a="1"), ("unknown", '{"a": "1"}')),
        (
            "<function=write><parameter=path>x</parameter><parameter=text></parameter></function>",
            ("write", '{"path": "x", "text": ""}'),
        ),
        (
            "<function=write>\n<parameter=path>\nx\n<parameter=text>\ny\n</function>\n</tool_call>z",
            [("write", '{"path": "x", "text": "y"}'), "z"],
        ),
        (
            "<function=write>\n<parameter=path>\nx\n</parameter>\njunk",
            [("write", '{"path": "x"}'), "junk"],
        ),
        (
            "<function=write>\n<parameter=path>\nx\n</parameter>\n<parameter= \njunk",
            [("write", '{"path": "x"}'), "<parameter= \njunk"],
        ),
        ("<function=write>\n<parameter=text>\nab\n</param", ("write", '{"text": "ab\\n</param')),
        ("<function=add>\n<parameter=a>\n1", ("add", '{"a": "1')),
        ("<function=write>\n<parameter=path>x</parameter>\n", ("write", '{"path": "x"')),
        ("<tool_call>\n<function=write>\n", None),
        ("<tool_call>\n<function=write>\nno", None),
        ("<tool_call>\n<function=>\n</function>", None),
        ("<tool_call> {}</tool_call>", None),
        ("<function", None),
    ],
)
def test_qwen3_coder(text: str, expected: Said | tuple[str, str] | None) -> None:
    wanted: Said = [text] if expected is None else expect(expected)
    check("qwen3_coder", text, wanted)


PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        '"',
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\\",
        "\\u",
        "d83d",
    ),
    *('{"name": "add"', ', "arguments": {', '"parameters": "', "}}", "null", "NaN", "text", "é😀"),
    *(TAG, "add.call(", "a=", "'", ")", "; ", M, "[ARGS]", "[CALL_ID]", "add", "write", "False"),
    *("<function=", "<function=write>", "<parameter=text>", "</parameter>", "</function>", ">"),
    *(H, L, f"{M}[{ADD}]", xml("write", text="a\nb", size="3")),
]


@pytest.mark.parametrize("form", sorted(CALL_PARSERS))
@examples(300)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=10),
    rng=st.randoms(use_true_random=False),
)
def test_cuts_change_nothing(form: str, parts: list[str], rng: random.Random) -> None:
    text = "".join(parts)
    whole = parse(form, [text])
    assert parse(form, cuts(text, rng)) == whole
    assert parse(form, list(text)) == whole
    said = [one for one in whole if isinstance(one, str)]
    # Content is the text without its calls, in order and nothing twice.
    position = 0
    for letter in "".join(said):
        position = text.index(letter, position) + 1
    if len(said) == len(whole):
        assert "".join(said) == text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "' + "x" * 100_000),
        ("hermes", "<tool_call>" + " " * 100_000 + ADD),
        ("hermes", '<tool_call>{"arguments": "' + "x" * 100_000 + '", "name": "f"}'),
        ("hermes", '<tool_call>{"x": "' + "x" * 100_000 + '", "name": "f", "arguments": {}}'),
        ("llama3_json", f'{TAG}f.call(a="' + "x" * 100_000 + '")'),
        ("mistral", M + "x" * 100_000 + "[ARGS]{}"),
        ("qwen3_coder", "<tool_call><function=" + "x" * 100_000 + "></function>"),
    ],
)
def test_what_is_kept_is_bounded(form: str, text: str) -> None:
    assert len(text) > MAX_HEAD_CHARS
    assert parse(form, [text]) == [text]
    pieces = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    assert parse(form, pieces) == [text]


def long_answer(form: str, size: int) -> str:
    value = "line of text, {braces} and more\n" * (size // 32)
    if form == "qwen3_coder":
        return xml("write", text=value)
    call = json.dumps({"name": "write", "arguments": {"text": value}})
    return {"hermes": f"<tool_call>{call}</tool_call>", "mistral": f"{M}[{call}]"}.get(form, call)


@pytest.mark.parametrize("form", sorted(CALL_PARSERS))
@pytest.mark.parametrize("make", [long_answer, lambda _, size: "some text\n\n< [" * (size // 13)])
def test_a_token_costs_the_same_late_in_an_answer(
    form: str, make: Callable[[str, int], str]
) -> None:
    def seconds(size: int) -> float:
        text = make(form, size)
        best = 1e9
        for _ in range(3):
            parser: CallParser = CALL_PARSERS[form](TYPES)
            begun = time.process_time()
            for start in range(0, len(text), 4):
                parser.push(text[start : start + 4])
            parser.push("", is_last=True)
            best = min(best, time.process_time() - begun)
        return best

    # 16 times the text; were all of it read again for each token, it would take 256 times as long.
    assert seconds(32_000) < 64 * seconds(2_000)


def test_arguments_go_out_as_they_come() -> None:
    for form in ("hermes", "mistral", "llama3_json", "qwen3_coder"):
        text = long_answer(form, 4000)
        parser, num_out = CALL_PARSERS[form](TYPES), 0
        for start in range(0, len(text), 8):
            for piece in parser.push(text[start : start + 8]):
                num_out += len(piece.text) if isinstance(piece, CallArguments) else 0
            assert num_out > start - 100


WHOLE = {
    "hermes": f"Text.\n{H}\n{H}",
    "qwen3_coder": (
        "Text.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "mistral": "Text.\n[TOOL_CALLS][" + ADD + ", " + ADD + "]",
    "llama3_json": "Text.\n<|python_tag|>" + ADD,
}


@pytest.mark.parametrize("form", WHOLE)
def test_what_a_limit_leaves_of_tags_is_no_content(form: str) -> None:
    text = WHOLE[form]
    for end in range(len(text)):
        for size in (1, 7, len(text)):
            parser = CALL_PARSERS[form](TYPES)
            pieces = [text[at : min(at + size, end)] for at in range(0, end, size)]
            found = [piece for one in pieces for piece in parser.push(one)]
            found += parser.push("", is_last=True, is_cut=True)
            content = "".join(piece.text for piece in found if isinstance(piece, Content))
            assert content.rstrip("\n") == text[: min(end, len("Text."))], (end, size)
            calls = joined(found)
            for piece, call in zip(
                (one for one in found if isinstance(one, CallEnd)),
                (one for one in calls if isinstance(one, tuple)),
                strict=True,
            ):
                assert piece.is_cut or json.loads(call[1])


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_content_that_looks_like_a_call_survives_a_limit(form: str) -> None:
    texts = {"hermes": "a <tool_call> b", "llama3_json": '{"city": "Bonn", "population": 33'}
    parser = CALL_PARSERS[form](TYPES)
    assert joined(parser.push(texts[form], is_last=True, is_cut=True)) == [texts[form]]
