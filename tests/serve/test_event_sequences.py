"""Streams of /v1/responses and /v1/messages beside the authors' own.

`data/event_sequences.json` lists the events of published streams and the fields of each, with their
sources. Events of one type in a row count once, unless their deltas differ in kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import RunningServer

SEQUENCES = json.loads((Path(__file__).parent / "data" / "event_sequences.json").read_text())
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = {
    "text": "One two three.",
    "two calls": f"{CALL}\n{CALL}",
    "text and call": f"I add.\n{CALL}",
    "thinking and text": "<think>\nLet me see.\n</think>\n\nOne two three.",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
BODIES = {
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "tools": [{"name": "add", "input_schema": SCHEMA}],
    },
}


def fields(value: dict, prefix: str = "") -> Iterator[str]:
    """Names of all fields, those of objects after a dot."""
    for name, inner in value.items():
        yield prefix + name
        if isinstance(inner, dict):
            yield from fields(inner, f"{prefix}{name}.")


@pytest.mark.parametrize(
    "sequence", SEQUENCES, ids=lambda sequence: f"{sequence['path']} {sequence['answer']}"
)
def test_events_are_those_of_the_author(server: RunningServer, sequence: dict) -> None:
    answer = f"{ANSWERS[sequence['answer']]}<|im_end|>"
    server.engine.script = lambda _: server.ids(answer)
    body = {**BODIES[sequence["path"]], "stream": True}
    text = server.client.post(sequence["path"], json=body).text
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    # Anthropic's pings come at any place.
    events = [event for event in events if event["type"] != "ping"]
    steps = [(event["type"], event.get("delta")) for event in events]
    kinds = [(t, delta["type"] if "block" in t and delta else None) for t, delta in steps]
    once = [event for i, event in enumerate(events) if i == 0 or kinds[i] != kinds[i - 1]]
    assert [event["type"] for event in once] == [kind for kind, _ in sequence["events"]]
    for event, (_, names) in zip(once, sequence["events"], strict=True):
        assert set(names.split()) <= set(fields(event)), event
