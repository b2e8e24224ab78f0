"""Small bodies that ask for grammars which take for ever: refused in words, and nobody waits."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.serve.conftest import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def schema(value: Any) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": {"json": value}}


def tag(format: Any) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": {"structural_tag": {"format": format}}}


def call(parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": HI, "tools": [tool], "tool_choice": "required"}


def doubling(levels: int, keyword: str, last: Any) -> dict[str, Any]:
    defs = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": last}}


def wide(levels: int, const: int) -> dict[str, Any]:
    """Objects whose values are five unions deep."""
    value: dict[str, Any] = {"const": const}
    for _ in range(levels):
        value = {"anyOf": [{"type": "object", "properties": {"a": value}, "required": ["a"]}] * 5}
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}


MANY_A = "a" * 40
NESTED_REPEATS = {
    "type": "repeat", "min": 60_000, "max": 60_000,
    "content": {"type": "repeat", "min": 60_000, "max": 60_000,
                "content": {"type": "const_string", "value": "a"}},
}  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    (schema({"enum": [f"{MANY_A}b"], "pattern": "(a+)+$"}), "no value fits"),
    (
        call({
            "type": "object",
            "properties": {"v": {"type": "string", "enum": [f"{MANY_A}!"], "pattern": "^(a+)+$"}},
            "required": ["v"],
        }),
        "no value fits",
    ),
    (schema({"const": "", "pattern": "["}), "pattern"),
    (schema({"enum": ["a"], "pattern": "^[ab"}), "pattern"),
    (schema('{"const": "\\ud800"}'), "lone surrogate"),
    (schema('{"const": NaN}'), "NaN is not a JSON value"),
    (schema('{"const": 1e400}'), "beyond the range"),
    (schema('{"a": 1, "a": 2}'), "duplicate key"),
    (schema(f'{{"const": {"7" * 5000}}}'), "an integer of over 4300 digits"),
    (schema({"type": "array", "minItems": 10**40}), "#/minItems: it goes up to 2147483647"),
    ({"prompt": "x", "guided_grammar": 'root ::= é\né ::= "a"'}, "it is not valid"),
    ({"prompt": "x", "guided_grammar": "root ::= root{1,4}"}, "compiling it breaks off"),
    ({"prompt": "x", "guided_regex": "a" * 3000}, "written out it has more than 2048 characters"),
    ({"prompt": "x", "guided_regex": "(?>a)b"}, "groups of the kind '(?>' are not supported"),
    (tag({"type": {"a": 1}}), "type of another kind"),
    (tag({"type": ["star"]}), "type of another kind"),
    (tag({"type": "star", "content": {"type": "const_string", "value": ""}}), "may be empty"),
    (tag(NESTED_REPEATS), "the grammar cannot be used"),
    ({"prompt": "x", "guided_grammar": 'root ::= "a" root'}, "the grammar cannot be used"),
    (
        {"prompt": "x", "guided_grammar": 'root ::= "a" b\nb ::= c b\nc ::= "x"'},
        "the grammar cannot be used",
    ),
]  # fmt: skip
TAKEN: list[dict[str, Any]] = [
    schema(doubling(14, "allOf", {"type": "string"})),
    schema(doubling(40, "allOf", {"type": "string"})),
    schema({"oneOf": [{"const": f"c{i}"} for i in range(200)]}),
    schema({"enum": ["a", "b"], "const": "a", "minLength": 1}),
    schema({"type": "array", "items": {"type": "string", "maxLength": 2**63}, "maxItems": 10**40}),
    schema({"type": "object", "maxProperties": 2**63 - 1}),
    call({"type": "object", "properties": {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!": {}},
          "patternProperties": {"^(a+)+$": {}}}),
    call({
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "string"}]}},
        "required": ["a"],
    }),
    call(doubling(20, "anyOf", {"type": "object", "properties": {"a": {"type": "integer"}}})),
]  # fmt: skip
EITHER: list[dict[str, Any]] = [
    schema({"oneOf": [wide(3, 1), wide(3, 2)]}),
    schema({"type": "integer", "multipleOf": 1021}),
    schema({"const": int("7" * 400), "multipleOf": 2.0}),
    schema({"enum": ["a", "b"], "pattern": "\\p{L}+"}),
]


def answered(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    """The answer to a body; asserts what it has cost the event loop's thread."""
    before = server.call(time.thread_time)
    path = CHAT if "messages" in body else TEXT
    response = server.client.post(path, json={**body, "max_tokens": 2})
    after = server.call(time.thread_time)
    assert isinstance(before, float) and isinstance(after, float)
    size = len(json.dumps(body))
    assert size > 4096 or after - before < 0.02, (size, after - before)
    return response


@pytest.fixture(scope="module", autouse=True)
def warm(shared_server: RunningServer) -> None:
    """The compile process is there."""
    shared_server.complete(prompt="a", max_tokens=1, guided_regex="a")


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=lambda value: str(value)[:80])
def test_refused_in_words(server: RunningServer, body: dict[str, Any], words: str) -> None:
    response = answered(server, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"] and error["message"].startswith(f"{error['param']}: "), error


@pytest.mark.parametrize("body", TAKEN, ids=lambda value: str(value)[:80])
def test_taken(server: RunningServer, body: dict[str, Any]) -> None:
    response = answered(server, body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("body", EITHER, ids=lambda value: str(value)[:80])
def test_taken_or_refused(server: RunningServer, body: dict[str, Any]) -> None:
    assert answered(server, body).status_code in (200, 400)


@pytest.mark.parametrize("num_values", [4, 2000])
def test_limits_hold_for_all_tools_together(server: RunningServer, num_values: int) -> None:
    """Each is small enough alone."""
    properties = {f"p{i}": {"enum": [f"v{i}", 1, 2, 3]} for i in range(num_values)}
    parameters = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(4 * 1024 // (1 if num_values == 4 else 100))
    ]
    body = {"messages": HI, "tools": tools, "tool_choice": "required"}
    assert server.client.post(CHAT, json=body).status_code == 400


def test_hanging_up_costs_the_next_client_nothing(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server()
    server.complete(prompt="a", max_tokens=1, guided_regex="a")
    compiler = server.context.grammars._compiler
    assert compiler is not None
    process = compiler._process
    bomb = "root ::= " + " ".join(f"([a-z]? {'[a-z]? ' * 40})" for _ in range(60))
    for number in range(5):
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": "a", "guided_grammar": f'{bomb} "{number}"', "max_tokens": 1}
            server.client.post(TEXT, json=body, timeout=0.2)
    server.complete(prompt="a", max_tokens=1, guided_regex="b")
    deadline = time.monotonic() + 10
    while compiler._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert compiler._process is process


def test_numbers_keep_their_spelling_everywhere(server: RunningServer) -> None:
    """In a body's schema, in what an answer repeats of it, and where numbers are parameters."""
    text = '{"enum": [1.10, 1e2, 18446744073709551615]}'
    body = '{"input": "hi", "temperature": 0.70, "text": {"format": {"type": "json_schema", '
    body += f'"name": "x", "schema": {text}}}}}, "max_output_tokens": 1}}'
    headers = {"content-type": "application/json"}
    response = server.client.post("/v1/responses", content=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "1.10" in response.text and "1e2" in response.text
    assert server.engine.requests[-1].sampling.temperature == 0.7
