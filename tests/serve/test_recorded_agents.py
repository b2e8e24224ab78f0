"""What coding agents send: requests recorded from the real ones, their texts replaced by ours.

`tests/clients/run --record tests/serve/data/agents` writes the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

import openspec
from tests.clients.scrub import read_recorded
from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.real_server import real_server

DATA = Path(__file__).parent / "data" / "agents"
AGENTS = sorted(path.stem for path in DATA.glob("*.json"))
MODEL = Path(openspec.__file__).parent / "models" / "tiny"
TYPES = {
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
}
"""The official client's; Anthropic's are checked by tests/clients."""
ANSWER = (
    "<think>\nI look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
)
MIN_CACHED = 0.95
RESULTS = ('"function_call_output"', '"tool_result"', '"role": "tool"')
"""How a tool's result is called in each API."""
LIMITS = {"/v1/responses": "max_output_tokens"}


def events(client: httpx.Client, path: str, body: dict) -> list[dict]:
    """A stream's events, each of which the official client's type takes as it is."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if "data: " in line]
    values = [json.loads(line) for line in lines if line != "[DONE]"]
    adapter = TYPES.get(path)
    for value in values if adapter is not None else ():
        adapter.validate_python(value)
    return values


def cached_share(values: list[dict]) -> float:
    """How much of the prompt was cached, by the usage that the stream brings."""
    last = values[-1]
    usage = last.get("usage") or last.get("response", {}).get("usage")
    if usage is None:
        usage = next(value for value in values if value["type"] == "message_delta")["usage"]
        num_cached = usage["cache_read_input_tokens"]
        return num_cached / (num_cached + usage["input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"] / (usage.get("prompt_tokens") or usage["input_tokens"])


def until_result(agent: str) -> list[tuple[str, dict]]:
    """An agent's requests up to the turn after the first result of a tool."""
    recorded = read_recorded(DATA / f"{agent}.json")
    has_result = [any(name in json.dumps(body) for name in RESULTS) for _, body in recorded]
    return recorded[: has_result.index(True) + 1]


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    with run_fake_server(MODEL, {"max_model_len": 1 << 17}, served_model_name=["tiny"]) as server:
        server.engine.script = lambda _: server.ids(ANSWER)
        yield server


@pytest.mark.parametrize("agent", AGENTS)
def test_every_request_is_taken(scripted: RunningServer, agent: str) -> None:
    recorded = read_recorded(DATA / f"{agent}.json")
    after_result = until_result(agent)[-1]
    assert len(recorded) > 1
    for path, body in [*recorded, after_result]:
        text = json.dumps(events(scripted.client, path.partition("?")[0], body))
        assert ("One" in text and "call" in text) or not body.get("tools")
    prompt = scripted.engine.requests[-1].prompt_token_ids
    text = scripted.context.tokenizer.decode(prompt, skip_special_tokens=False)
    assert "</tools>" in text and "<tool_call>" in text and "<tool_response>" in text


@pytest.mark.full
@pytest.mark.parametrize("agent", AGENTS)
def test_the_turn_after_a_tool_is_cached(agent: str) -> None:
    with real_server("--kv-cache-memory", "512MiB") as server, server.client as client:
        client.timeout = 600
        for path, body in until_result(agent)[-2:]:
            path = path.partition("?")[0]
            body[LIMITS.get(path, "max_tokens")] = 16
            values = events(client, path, {**body, "temperature": 0})
        assert cached_share(values) >= MIN_CACHED
