"""Steps as the server sends them and as the page shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from tests.serve.sse import parse_events
from tests.ui.conftest import Visit


def recorded(visit: Visit) -> list[list[dict]]:
    """Steps of every generation from here on, as the server sent them; filled while it runs."""
    runs: list[list[dict]] = []

    def note(response) -> None:
        if not response.url.endswith("completions"):
            return
        chunks = parse_events(response.body())
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        steps = [step for choice in choices for step in choice.get("steps", ())]
        if steps:  # none where the page warms the server up
            runs.append(steps)

    visit.page.on("requestfinished", lambda request: note(request.response()))
    return runs


def sent(visit: Visit) -> list[dict]:
    """Bodies of the generations from here on."""
    bodies: list[dict] = []

    def note(request) -> None:
        if request.url.endswith("completions"):
            bodies.append(request.post_data_json)

    visit.page.on("request", note)
    return bodies


def tint(position: int) -> str:
    return f"p{position if position <= 3 else 4 if position <= 7 else 8}"


def spans(visit: Visit, root: str = ".answer") -> list[list[str]]:
    """(text, classes, step) of each token."""
    return visit.page.eval_on_selector_all(
        f"{root} .t", "all => all.map((t) => [t.textContent, t.className, t.dataset.s])"
    )


def step_of(tokens: list[str], drafts: list[str] | None = None, **more: object) -> dict:
    """A step as the server would send it."""
    drafts = tokens[:-1] if drafts is None else drafts
    return {
        "token_ids": list(range(len(tokens))),
        "tokens": tokens,
        "draft_token_ids": list(range(len(drafts))),
        "draft_tokens": drafts,
        "draft_parents": list(range(-1, len(drafts) - 1)),
        "accepted": list(range(len(tokens) - 1)),
        "num_rows": 1 + len(drafts),
        "num_sequences": 1,
        "time_ms": 1.0,
        "device_time_ms": 0.8,
        "draft_time_ms": None,
        **more,
    }


def answering(steps: Iterable[dict], deltas: Iterable[dict] | None = None) -> Callable:
    """Puts an answer of these steps in the server's place; without deltas all is content."""
    steps = list(steps)
    deltas = deltas or [{"content": "".join(step["tokens"])} for step in steps]
    events = [
        {"choices": [{"index": 0, "delta": delta, "steps": [step]}]}
        for step, delta in zip(steps, deltas, strict=True)
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def setup(page) -> None:
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )

    return setup
