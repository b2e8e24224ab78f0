"""Server-sent events read as clients read them."""

from __future__ import annotations

import json

import httpx


def parse_events(body: bytes) -> list[dict]:
    """Every event of a whole stream; checks the framing and the end."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == "", "the stream does not end with an empty line"
    events = []
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block
        events.append(block.removeprefix("data: "))
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def stream(client: httpx.Client, path: str, body: dict) -> list[dict]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.content)
