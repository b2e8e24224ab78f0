"""An agent's conversation on the embedded model: its second turn comes from the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from tests.serve.real_server import RealServer, real_server

NUM_TOKENS = 20_000
MIN_CACHED = 0.95
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
FUNCTION = {"name": "read", "description": "Reads a file"}
ASK = "Read main.py, and say what it prints."
RESULT = "print('hello')\n" * 8
LIMIT = 24


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    with real_server("--kv-cache-memory", "512MiB") as server:
        yield server


def instructions(real: RealServer, name: str) -> str:
    """So long that the first prompt has about NUM_TOKENS, and different for each format."""
    rule = "Rule {} of " + name + ": never guess what a file holds, read it first.\n"
    body = {"prompt": "".join(rule.format(i) for i in range(100)), "model": "tiny"}
    num_tokens = real.client.post("/tokenize", json=body).json()["count"]
    return "".join(rule.format(i) for i in range(NUM_TOKENS * 100 // num_tokens))


def post(real: RealServer, path: str, body: dict) -> dict:
    response = real.client.post(path, json={**body, "temperature": 0})
    assert response.status_code == 200, response.text
    return response.json()


def chat(real: RealServer, system: str) -> Iterator[tuple[int, int]]:
    tools = [{"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ASK}]
    while True:
        body = {"messages": messages, "tools": tools, "max_tokens": LIMIT}
        answer = post(real, "/v1/chat/completions", body)
        usage = answer["usage"]
        yield usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        messages.append(answer["choices"][0]["message"])
        call = {"id": "call_1", "type": "function"}
        call["function"] = {"name": "read", "arguments": '{"path": "main.py"}'}
        messages[-1]["tool_calls"] = [call]
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": RESULT})


def responses(real: RealServer, system: str) -> Iterator[tuple[int, int]]:
    tools = [{"type": "function", **FUNCTION, "parameters": SCHEMA, "strict": False}]
    items = [{"role": "user", "content": ASK}]
    call = {"type": "function_call", "call_id": "call_1", "name": "read"}
    call["arguments"] = '{"path": "main.py"}'
    while True:
        body = {"instructions": system, "input": items, "tools": tools, "max_output_tokens": LIMIT}
        answer = post(real, "/v1/responses", body)
        usage = answer["usage"]
        yield usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        result = {"type": "function_call_output", "call_id": "call_1", "output": RESULT}
        items += [*answer["output"], call, result]


def messages(real: RealServer, system: str) -> Iterator[tuple[int, int]]:
    tools = [{**FUNCTION, "input_schema": SCHEMA}]
    turns = [{"role": "user", "content": ASK}]
    call = {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "main.py"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": RESULT}
    for number in count():
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        blocks = [{"type": "text", "text": text} for text in (billing, system)]
        body = {"system": blocks, "messages": turns, "tools": tools, "max_tokens": LIMIT}
        answer = post(real, "/v1/messages", body)
        usage = answer["usage"]
        num_cached = usage["cache_read_input_tokens"]
        yield usage["input_tokens"] + num_cached, num_cached
        turns += [
            {"role": "assistant", "content": [*answer["content"], call]},
            {"role": "user", "content": [result]},
        ]


@pytest.mark.full
@pytest.mark.parametrize("turns_of", [chat, responses, messages])
def test_the_second_turn_is_cached(
    real: RealServer, turns_of: Callable[[RealServer, str], Iterator[tuple[int, int]]]
) -> None:
    turns = turns_of(real, instructions(real, turns_of.__name__))
    num_prompt, num_cached = next(turns)
    assert num_prompt > 0.95 * NUM_TOKENS and num_cached < 0.05 * num_prompt
    num_prompt, num_cached = next(turns)
    print(f"{turns_of.__name__}: {num_cached} of {num_prompt} tokens cached")
    assert num_cached >= MIN_CACHED * num_prompt
