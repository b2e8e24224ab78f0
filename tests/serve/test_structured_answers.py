"""Structured output of the real server: valid, and the same with drafts, thinking and calls."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
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


def answer(client: httpx.Client, temperature: int, asked: dict) -> tuple:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": temperature,
        "max_tokens": 300,
        "seed": 5,
        **asked,
    }
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    message = choice["message"]
    calls = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
    if choice["finish_reason"] != "length":
        for arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA)
        if "response_format" in asked and not calls:
            jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert calls or "tool_choice" not in asked
    return message["content"], message["reasoning_content"], calls, choice["finish_reason"]


def answers(method: str) -> list[tuple]:
    demands = list(itertools.product((0, 1), ASKED))
    with (
        real_server("--port", "0", "--method", method) as server,
        server.client as client,
        ThreadPoolExecutor(len(demands)) as pool,
    ):
        found = list(pool.map(lambda demand: answer(client, *demand), demands))
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


REPEAT = {"type": "repeat", "min": 10**9, "max": 10**9}
ENDLESS = [
    {"grammar": 'root ::= "a" root'},
    {"grammar": 'root ::= "a" b\nb ::= c b\nc ::= "x"'},
    {"structural_tag": {"format": {**REPEAT, "content": {"type": "const_string", "value": "a"}}}},
]
BANNED = {"prompt": "A", "max_tokens": 9, "guided_json": SCHEMA, "allowed_token_ids": [5, 6]}


def test_what_a_grammar_cannot_do_ends_its_request_alone() -> None:
    with real_server("--port", "0") as server, server.client as client:
        for asked in ENDLESS:
            answer = client.post(
                "/v1/completions", json={"prompt": "A", "structured_outputs": asked}
            )
            assert answer.status_code == 400, asked
        answer = client.post("/v1/completions", json=BANNED)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "grammar_failed"
        assert "allowed_token_ids or bad_words forbid" in answer.json()["error"]["message"]
        # Too late for a status: an event of the stream.
        streamed = client.post("/v1/completions", json={**BANNED, "stream": True})
        assert "grammar_failed" in streamed.text
        # The reply names the source of its drafts.
        sure = {"prompt": "A", "max_tokens": 20, "guided_regex": "The answer to that is [0-9]"}
        answer = client.post("/v1/completions", json=sure).json()
        stats = answer["metrics"]["speculative_decoding"]
        drafted = (stats["num_forced_tokens"], stats["num_draft_tokens"])
        accepted = (stats["num_accepted_forced_tokens"], stats["num_accepted_tokens"])
        assert 0 < accepted[0] <= accepted[1] <= drafted[1] and accepted[0] <= drafted[0]
        assert stats["num_copied_tokens"] == stats["num_accepted_copied_tokens"] == 0
        after = client.post("/v1/completions", json={"prompt": "A", "max_tokens": 3})
        assert after.status_code == 200


@pytest.mark.full
def test_masks_that_take_too_long_hold_nobody_up() -> None:
    with real_server("--port", "0") as server, server.client as client:
        end = client.post("/tokenize", json={"prompt": "<|im_end|>"}).json()["tokens"]
        slow = {
            "prompt": "x",
            "max_tokens": 1000,
            "structured_outputs": {"grammar": 'root ::= root root | "a" | ""'},
            "logit_bias": {str(token): -100 for token in end},
        }
        answer = client.post("/v1/completions", json=slow, timeout=300)
        assert answer.status_code == 400
        assert "make it less ambiguous" in answer.json()["error"]["message"]
