"""Requests with grammars and tools, for bench/soak.py: each answer can be checked by itself.

An answer that ended must be what its schema, pattern or choice allows. One that was cut short must
be what the same request is answered again, which is the caller's to ask.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

Check = Callable[[str], None]

SCHEMAS: tuple[dict[str, object], ...] = (
    {
        "type": "object",
        "properties": {
            "apples": {"type": "integer", "minimum": 0, "maximum": 99},
            "note": {"type": "string", "maxLength": 20},
        },
        "required": ["apples", "note"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["red", "green", "blue"]},
            "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        },
        "required": ["kind", "parts"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "size": {"anyOf": [{"type": "null"}, {"type": "number"}]},
        },
        "required": ["code", "size"],
        "additionalProperties": False,
    },
)
CHOICES = ("yes", "no", "perhaps")
EBNF = 'root ::= "(" root ")" | [0-9]'


@dataclass(frozen=True)
class Asked:
    """One request: where it goes, how to find the answer's texts, and what they must be."""

    path: str
    body: dict[str, Any]
    check: Check

    def texts(self, answer: dict[str, Any]) -> tuple[bool, list[str]]:
        """Whether the answer ended by itself, and its text or the arguments of its calls."""
        if self.path == "/v1/completions":
            choice = answer["choices"][0]
            return choice["finish_reason"] == "stop", [choice["text"]]
        if self.path == "/v1/chat/completions":
            choice = answer["choices"][0]
            calls = choice["message"].get("tool_calls") or ()
            texts = [call["function"]["arguments"] for call in calls]
            return choice["finish_reason"] != "length", texts or [choice["message"]["content"]]
        if self.path == "/v1/responses":
            items = [one for one in answer["output"] if one["type"] != "reasoning"]
            calls = [one["arguments"] for one in items if one["type"] == "function_call"]
            parts = [part["text"] for one in items for part in one.get("content") or ()]
            return answer["status"] == "completed", calls or parts
        blocks = [one for one in answer["content"] if one["type"] != "thinking"]
        calls = [json.dumps(one["input"]) for one in blocks if one["type"] == "tool_use"]
        texts = [one["text"] for one in blocks if one["type"] == "text"]
        return answer["stop_reason"] != "max_tokens", calls or texts

    def whole(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer that the events of a stream make up, as far as `texts` reads it."""
        if self.path == "/v1/responses":
            return dict(events[-1]["response"])
        if self.path == "/v1/messages":
            return _message_of(events)
        choices = [one["choices"][0] for one in events if one.get("choices")]
        ends = [one["finish_reason"] for one in choices if one["finish_reason"]]
        text = "".join(one.get("text") or "" for one in choices)
        deltas = [one.get("delta") or {} for one in choices]
        arguments: dict[int, str] = {}
        for call in [call for delta in deltas for call in delta.get("tool_calls") or ()]:
            more = call["function"].get("arguments") or ""
            arguments[call["index"]] = arguments.get(call["index"], "") + more
        message = {
            "content": "".join(delta.get("content") or "" for delta in deltas),
            "tool_calls": [{"function": {"arguments": one}} for one in arguments.values()],
        }
        return {"choices": [{"finish_reason": ends[-1], "text": text, "message": message}]}

    def is_checked(self, answer: dict[str, Any]) -> bool:
        """Checks an answer that ended; False for one that was cut short.

        Raises:
            AssertionError: it is not what was asked for.
        """
        has_ended, texts = self.texts(answer)
        if not has_ended:
            return False
        assert texts, f"nothing is answered: {json.dumps(answer)[:300]}"
        for text in texts:
            self.check(text)
        return True


def _message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    reason = None
    for event in events:
        delta = event.get("delta") or {}
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif delta.get("type") == "text_delta":
            blocks[event["index"]]["text"] += delta["text"]
        elif delta.get("type") == "input_json_delta":
            blocks[event["index"]]["json"] += delta["partial_json"]
        elif event["type"] == "message_delta":
            reason = delta["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(block["json"] or "{}")
            except ValueError:  # cut short: a whole answer shows it so
                block["input"] = {"_raw": block["json"]}
    return {"content": blocks, "stop_reason": reason}


def asked(draw: random.Random, words: list[str]) -> Asked:
    """A request to one of the four APIs, whose answer is always the same."""
    schema = draw.choice(SCHEMAS)
    question = " ".join(draw.choices(words, k=draw.randint(1, 30)))
    kind = draw.choice([_completion, _chat, _response, _message])
    return kind(draw, schema, question)


def _fits(schema: dict[str, object]) -> Check:
    def check(text: str) -> None:
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"{text!r} does not fit {json.dumps(schema)}: {error}") from None

    return check


def _matches(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), f"{text!r} is not {pattern}"

    return check


def _completion(draw: random.Random, schema: dict[str, object], question: str) -> Asked:
    pattern = draw.choice([r"[a-f]{3,9}", r"(ab|cd)+[0-9]", r"[0-9]{1,3}(\.[0-9]{2})?"])
    demands: list[tuple[dict[str, object], Check]] = [
        ({"json": schema}, _fits(schema)),
        ({"regex": pattern}, _matches(pattern)),
        ({"choice": list(CHOICES)}, _matches("|".join(CHOICES))),
        ({"grammar": EBNF}, _matches(r"\(*[0-9]\)*")),
    ]
    demand, check = draw.choice(demands)
    body = {"prompt": question, "max_tokens": 100, "structured_outputs": demand}
    return Asked("/v1/completions", {**body, "seed": draw.randrange(99)}, check)


def _tool(schema: dict[str, object], name: str) -> dict[str, object]:
    return {"name": "record", name: schema}


def _chat(draw: random.Random, schema: dict[str, object], question: str) -> Asked:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    function = {"type": "function", "function": _tool(schema, "parameters")}
    demand = draw.choice(
        [{"response_format": form}, {"tools": [function], "tool_choice": "required"}]
    )
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200, **demand}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    return Asked("/v1/chat/completions", {**body, "seed": draw.randrange(99)}, _fits(schema))


def _response(draw: random.Random, schema: dict[str, object], question: str) -> Asked:
    form = {"format": {"type": "json_schema", "name": "form", "schema": schema}}
    function = {"type": "function", **_tool(schema, "parameters")}
    demand = draw.choice([{"text": form}, {"tools": [function], "tool_choice": "required"}])
    body = {"input": question, "max_output_tokens": 200, "reasoning": {"effort": "none"}, **demand}
    return Asked("/v1/responses", {**body, "temperature": 0}, _fits(schema))


def _message(draw: random.Random, schema: dict[str, object], question: str) -> Asked:
    form = {"format": {"type": "json_schema", "schema": schema}}
    tools = [_tool(schema, "input_schema")]
    demand = draw.choice(
        [{"output_config": form}, {"tools": tools, "tool_choice": {"type": "any"}}]
    )
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200, **demand}
    body["thinking"] = {"type": "disabled"}
    return Asked("/v1/messages", {**body, "temperature": 0}, _fits(schema))
