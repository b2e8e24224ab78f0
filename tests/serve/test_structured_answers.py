"""Structured output of the real server: valid, and the same with drafts, thinking and calls."""

from __future__ import annotations

import json

import jsonschema
import pytest

from tests.serve.real_server import real_server

SCHEMA = {
    "type": "object",
    "properties": {
        "apples": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 30},
        "ok": {"type": "boolean"},
    },
    "required": ["apples", "note", "ok"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA},
}
QUESTION = "Tom has 3 apples and buys 4 more. How many?"
CALL = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED = [
    {"response_format": FORMAT},
    {"response_format": FORMAT, **OFF},
    CALL,
    {**CALL, **OFF},
    {"tools": TOOLS, "response_format": FORMAT},
    {"structured_outputs": {"regex": "[0-9]{1,3} apples"}, **OFF},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"guided_grammar": 'root ::= "a" [0-9] "b"', **OFF},
]


def answers(method: str) -> list[tuple]:
    found = []
    with real_server("--port", "0", "--method", method) as server, server.client as client:
        for temperature in (0, 1):
            for asked in ASKED:
                body = {
                    "messages": [{"role": "user", "content": QUESTION}],
                    "temperature": temperature,
                    "max_tokens": 300,
                    "seed": 5,
                    **asked,
                }
                answer = client.post("/v1/chat/completions", json=body).json()
                choice = answer["choices"][0]
                message = choice["message"]
                calls = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
                if choice["finish_reason"] != "length":
                    for arguments in calls:
                        jsonschema.validate(json.loads(arguments), SCHEMA)
                    if "response_format" in asked and not calls:
                        jsonschema.validate(json.loads(message["content"]), SCHEMA)
                    assert calls or "tool_choice" not in asked
                text, thoughts = message["content"], message["reasoning_content"]
                found.append((text, thoughts, calls, choice["finish_reason"]))
        cut = {"prompt": "A", "max_tokens": 3, "guided_json": SCHEMA}
        choice = client.post("/v1/completions", json=cut).json()["choices"][0]
        assert choice["finish_reason"] == "length" and choice["text"].startswith("{")
    return found


@pytest.mark.parametrize("method", ["ngram", "eagle3", "dflash"])
def test_drafts_change_nothing(method: str, request: pytest.FixtureRequest) -> None:
    if method != "ngram" and not request.config.getoption("--full"):
        pytest.skip("all methods need --full")
    plain = answers("none")
    assert answers(method) == plain
    assert sum(reason != "length" for *_, reason in plain) >= 0.8 * len(plain)
    assert any(reasoning for _, reasoning, *_ in plain)
