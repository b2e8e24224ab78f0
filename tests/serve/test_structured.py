"""Structured output over HTTP: what is asked reaches the engine compiled, and conflicts are 400."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections.abc import Callable

import httpx
import pytest

from openspec.grammar.compiler import GrammarLimits
from tests.serve.conftest import RunningServer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
LIMITS = {RESPONSES: "max_output_tokens"}
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAGS = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        # As the library's documents write it: in this list a tag needs no type.
        "tags": [
            {
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
    }
}


def held_bytes(server: RunningServer) -> int:
    """Of the grammars in the engine, which come compressed: half as much again as their text."""
    texts = [zlib.decompress(data) for data in server.engine.grammars.values()]
    return sum(len(text) * 3 // 2 for text in texts)


def grammar_of_last(server: RunningServer) -> str:
    return server.engine.requests[-1].grammar


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"guided_json": SCHEMA}),
        (TEXT, {"guided_json": json.dumps(SCHEMA)}),
        (TEXT, {"guided_regex": "a+"}),
        (TEXT, {"guided_choice": ["yes", "no"]}),
        (TEXT, {"guided_grammar": 'root ::= "yes"'}),
        (TEXT, {"json_schema": json.dumps(SCHEMA)}),
        (CHAT, {"regex": "a+"}),
        (CHAT, {"ebnf": 'root ::= "yes"'}),
        (TEXT, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}),
        (CHAT, {"guided_decoding_backend": "guidance", "guided_choice": ["a", "b"]}),
        (CHAT, {"ebnf": 'start: "yes" | WORD\nWORD: /[a-z]+/'}),
        (TEXT, {"response_format": FORMAT}),
        (TEXT, {"structured_outputs": {"json_object": True}}),
        (TEXT, {"structured_outputs": {"structural_tag": TAGS}}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"response_format": FORMAT}),
        (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}),
        (CHAT, {"tools": [TOOL], "response_format": FORMAT}),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        ),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
        (RESPONSES, {"text": {"format": {"type": "structural_tag", **TAGS}}}),
        (CHAT, {"response_format": {"type": "structural_tag", **TAGS}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
        (
            "/v1/messages",
            {"tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        ),
    ],
    ids=str,
)
def test_every_way_to_ask(server: RunningServer, path: str, fields: dict) -> None:
    body = {"messages": HI} if path in (CHAT, "/v1/messages") else {}
    body |= {TEXT: {"prompt": "a"}, RESPONSES: {"input": "hi"}}.get(path, {})
    limit = {LIMITS.get(path, "max_tokens"): 4}
    response = server.client.post(path, json={**body, **limit, **fields})
    assert response.status_code == 200, response.text
    assert grammar_of_last(server) in server.engine.grammars


def test_free_answers_have_no_grammar(server: RunningServer) -> None:
    lax = {"type": "function", "function": {**TOOL["function"], "strict": False}}
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [TOOL]}, {"tools": [lax]}):
        server.chat(max_tokens=2, **fields)
        assert grammar_of_last(server) == ""


@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search", "name": "web"}]], ids=str)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_auto_without_usable_tools_is_text(
    server: RunningServer, path: str, tools: list[dict] | None
) -> None:
    auto = {"type": "auto"} if path == MESSAGES else "auto"
    body = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    if path == CHAT and tools:
        return  # other types of tools are refused by name
    body |= {"tools": tools, "tool_choice": auto, LIMITS.get(path, "max_tokens"): 4}
    assert server.client.post(path, json=body).status_code == 200
    assert grammar_of_last(server) == ""


def key_of(server: RunningServer, path: str = CHAT, **body: object) -> str:
    """The grammar that a request is answered with."""
    body = {LIMITS.get(path, "max_tokens"): 2, **body}
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return grammar_of_last(server)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_no_stop_string_ends_a_call_that_must_come(server: RunningServer, path: str) -> None:
    tool = {"name": "add", "input_schema": SCHEMA} if path == MESSAGES else TOOL
    forced = {"tools": [tool], "tool_choice": "required", "messages": HI}
    if path == RESPONSES:
        forced |= {"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]}
        del forced["messages"]
    if path == MESSAGES:
        forced["tool_choice"] = {"type": "any"}
    name = "stop_sequences" if path == MESSAGES else "stop"
    key_of(server, path, **forced, **{name: ["\n"]})
    assert server.engine.requests[-1].sampling.stop == []
    free = {**forced, "tool_choice": {"type": "auto"} if path == MESSAGES else "auto"}
    key_of(server, path, **free, **{name: ["\n"]})
    assert server.engine.requests[-1].sampling.stop == ["\n"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_call_that_must_come_goes_before_the_form_of_the_content(
    server: RunningServer, path: str
) -> None:
    fields, form = {
        CHAT: ({"tools": [TOOL], "tool_choice": "required"}, {"response_format": FORMAT}),
        RESPONSES: (
            {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"},
            {"text": {"format": {"type": "json_object"}}},
        ),
        MESSAGES: (
            {"tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
    }[path]
    body = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    assert key_of(server, path, **body, **fields) == key_of(server, path, **body, **fields, **form)


def test_a_forced_call_keeps_the_schema_of_a_tool_that_is_not_strict(
    server: RunningServer,
) -> None:
    def asked(parameters: dict, strict: bool | None = None) -> str:
        function = {"name": "add", "parameters": parameters, "strict": strict}
        tools = [{"type": "function", "function": function}]
        key = key_of(server, messages=HI, tools=tools, tool_choice="required")
        return zlib.decompress(server.engine.grammars[key]).decode("utf-8", "replace")

    assert asked(SCHEMA, strict=False) == asked(SCHEMA)
    assert asked({"not": {}}, strict=False) == asked({"type": "object"})


def test_only_allowed_tools_are_called(server: RunningServer) -> None:
    """As OpenAI's API has it: the prompt shows all tools, and the answer calls some of them."""
    names = ("add", "sub", "end")
    tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in names]
    chat = {"messages": HI, "tools": tools}
    flat = {"input": "hi", "tools": [{"type": "function", **tool["function"]} for tool in tools]}

    def choice(mode: str, path: str, *allowed: str) -> dict:
        if path == RESPONSES:
            listed = [{"type": "function", "name": name} for name in allowed]
            return {"type": "allowed_tools", "mode": mode, "tools": listed}
        listed = [{"type": "function", "function": {"name": name}} for name in allowed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}

    def asked(mode: str, path: str, *allowed: str) -> str:
        body = flat if path == RESPONSES else chat
        return key_of(server, path, **body, tool_choice=choice(mode, path, *allowed))

    for path in (CHAT, RESPONSES):
        some = key_of(server, messages=HI, tools=tools[:2], tool_choice="required")
        assert asked("required", path, "add", "sub", "add") == some
        prompt = server.engine.requests[-1].prompt_token_ids
        assert '"end"' in server.context.tokenizer.decode(prompt)
        loose = asked("auto", path, "add", "sub")
        assert loose not in ("", some) and loose == asked("auto", CHAT, "add", "sub")
        assert asked("auto", path, *names) == ""
    server.chat(**chat, max_tokens=2, tool_choice=choice("auto", RESPONSES, "add"))
    for wrong in (
        choice("auto", CHAT),
        choice("auto", CHAT, "none"),
        choice("some", CHAT, "add"),
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        {"type": "allowed_tools", "allowed_tools": ["add"]},
        {"type": "allowed_tools", "mode": "auto", "tools": "add"},
    ):
        assert server.error(CHAT, **chat, tool_choice=wrong)["param"] == "tool_choice"


def test_allowed_tools_of_types_that_are_skipped(server: RunningServer) -> None:
    function, hosted = {"type": "function", **TOOL["function"]}, {"type": "web_search"}
    named = {"type": "function", "name": "add"}

    def asked(mode: str, tools: list[dict], allowed: list[dict]) -> str:
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        return key_of(server, RESPONSES, input="hi", tools=tools, tool_choice=choice)

    forced = key_of(server, RESPONSES, input="hi", tools=[function], tool_choice="required")
    assert asked("required", [function, hosted], [hosted, named]) == forced
    assert asked("auto", [function, hosted], [hosted]) == ""
    assert asked("auto", [hosted], [hosted]) == ""
    for tools, allowed in (([function], [hosted]), ([function, hosted], [])):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
        error = server.error(RESPONSES, input="hi", tools=tools, tool_choice=choice)
        assert error["param"] == "tool_choice"
    choice = {"type": "allowed_tools", "mode": "required", "tools": [hosted]}
    fields = {"tools": [function, hosted], "tool_choice": choice}
    assert server.error(RESPONSES, input="hi", **fields)["param"] == "tool_choice"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type(server: RunningServer, kind: str) -> None:
    given = {"type": kind, "schema": SCHEMA}
    expected = key_of(server, messages=HI, response_format=FORMAT)
    assert key_of(server, messages=HI, response_format=given) == expected
    assert key_of(server, RESPONSES, input="hi", text={"format": given}) == expected


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (TEXT, {"guided_json": {}, "guided_regex": "a"}, "guided_json", "leave out all but one"),
        (
            TEXT,
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs",
            "leave out",
        ),
        (TEXT, {"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown key 'jsn'"),
        (TEXT, {"structured_outputs": {}}, "structured_outputs", "exactly one"),
        (
            TEXT,
            {"structured_outputs": {"regex": 5}},
            "structured_outputs",
            "regex must be a string",
        ),
        (
            CHAT,
            {"structured_outputs": {"choice": ["a", 1]}},
            "structured_outputs",
            "choice[1] must be a string",
        ),
        (TEXT, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
        (TEXT, {"guided_regex": "(?=a)"}, "guided_regex", "lookahead"),
        (TEXT, {"guided_choice": []}, "guided_choice", "1 to"),
        (TEXT, {"guided_grammar": "root ::= ("}, "guided_grammar", "the grammar cannot be used"),
        (
            TEXT,
            {"guided_json": {"properties": {"a": {"not": {}}}}},
            "guided_json",
            "#/properties/a/not",
        ),
        (CHAT, {"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "leave out"),
        (CHAT, {"regex": "a", "ebnf": 'root ::= "a"'}, "regex", "ebnf exclude each other"),
        (
            CHAT,
            {
                "response_format": FORMAT,
                "messages": [*HI, {"role": "assistant", "content": '{"a":'}],
                "continue_final_message": True,
            },
            "response_format",
            "last message",
        ),
        (CHAT, {"response_format": {"type": "json_schema", "schema": 5}}, "response_format", "obj"),
        (
            TEXT,
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            "response_format",
            "unknown key 'value'",
        ),
        (
            CHAT,
            {"response_format": {**FORMAT, "schema": SCHEMA}},
            "response_format",
            "not both",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object", "strict": "yes"}},
            "response_format",
            "strict must be true or false",
        ),
        (CHAT, {"response_format": {"type": "regex"}}, "response_format", "structured_outputs"),
        (
            CHAT,
            {"response_format": {**FORMAT, "json_schema": {"schema": SCHEMA, "strict": True}}},
            "response_format",
            "additionalProperties",
        ),
        (TEXT, {"guided_regex": "a", "min_tokens": 3}, "min_tokens", "exclude"),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": "required", "min_tokens": 3},
            "min_tokens",
            "exclude",
        ),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"tools": [TOOL, TOOL], "tool_choice": "required"}, "tools", "same name"),
    ],
    ids=str,
)
def test_conflicts_say_what_to_leave_out(
    server: RunningServer, path: str, fields: dict, param: str, words: str
) -> None:
    body = {"prompt": "a"} if path == TEXT else {"messages": HI}
    error = server.error(path, **{**body, **fields})
    assert error["param"] == param and words in error["message"], error


def test_equal_grammars_are_loaded_once(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    for _ in range(3):
        server.complete(prompt="a", max_tokens=1, guided_json=SCHEMA)
    info = server.client.get("/server_info").json()["structured_outputs"]
    assert len(server.engine.grammars) == info["num_cached"] == 1
    assert info["num_cached_bytes"] == held_bytes(server)
    assert info["timeout_s"] == 10


def test_the_engine_forgets_with_the_cache(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = GrammarLimits(timeout_s=10.0, memory=4 << 30, room=4 << 20)
    monkeypatch.setattr(GrammarLimits, "within", lambda *_: few)
    server = start_server()
    for number in range(24):
        schema = {
            "type": "array",
            "items": {"type": "string", "pattern": f"^[^x]{{1,{100 + number}}}$"},
        }
        server.complete(prompt="a", max_tokens=1, guided_json=schema)
    deadline = time.monotonic() + 10
    while held_bytes(server) > 4 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 0 < len(server.engine.grammars) < 24


def test_what_has_no_room_beside_grammars_in_use_is_told_to_come_again(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = GrammarLimits(timeout_s=10.0, memory=4 << 30, room=20_000)
    monkeypatch.setattr(GrammarLimits, "within", lambda *_: few)
    server = start_server()
    for number in range(100):
        body = {"prompt": "a", "max_tokens": 1, "guided_choice": [f"yes {number}", "no"]}
        response = server.client.post(TEXT, json=body)
        if response.status_code == 503:
            break
        assert response.status_code == 200, response.text
        compiler = server.context.grammars._compiler
        assert compiler is not None
        for one in list(compiler._kept.values()):
            compiler.hold(one.grammar)
    assert response.headers["retry-after"] and "leave no room" in response.text
    assert held_bytes(server) <= 20_000


def large_schema() -> dict:
    """10 kB of nested objects, integers and patterns."""
    leaf = {
        "type": "object",
        "properties": {
            f"field_{i}": {
                "type": "string",
                "pattern": f"^[a-z]{{1,{20 + i}}}-[0-9]{{{1 + i % 5}}}$",
            }
            if i % 2
            else {"type": "integer", "minimum": -i, "maximum": 1000 + i}
            for i in range(16)
        },
    }
    return {"type": "object", "properties": {f"part_{i}": leaf for i in range(9)}}


def test_others_go_on_while_a_schema_compiles(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    schema = large_schema()
    assert len(json.dumps(schema)) > 10_000
    server.complete(prompt="a", max_tokens=1, guided_regex="a")  # the process is there
    delays: list[float] = []
    done = threading.Event()

    async def watch() -> None:
        while not done.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.005)
            delays.append(time.monotonic() - before - 0.005)

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    server.complete(prompt="a", max_tokens=1, guided_json=schema)
    done.set()
    watching.result(10)
    assert max(delays) < 0.2, max(delays)


def test_a_bomb_ends_in_time_and_others_are_served(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server(grammar_timeout_s=1.0)
    bomb = "root ::= " + " ".join(f"([a-z]? {'[a-z]? ' * 40})" for _ in range(60))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                client.post(TEXT, json={"prompt": "a", "guided_grammar": bomb, "max_tokens": 1})
            )
        )
        thread.start()
        start = time.monotonic()
        server.complete(prompt="a", max_tokens=1, guided_choice=["yes"])
        assert time.monotonic() - start < 15
        thread.join(30)
    assert answers[0].status_code in (200, 400), answers[0].text
