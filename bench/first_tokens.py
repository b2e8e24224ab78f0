"""Time to the first token over HTTP of every form of a chat, asked in turns.

    python -m bench.first_tokens --json FILE

Each turn asks the same question in each form, in a new order. What else the machine does thus hits
all forms alike, and the median of the paired differences to `/v1/chat/completions` is what a form
costs. The first token is the first delta that has text.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from openspec.bench.environment import environment
from openspec.bench.server import ServerUnderTest, started_server
from openspec.settings import Raw

CHAT = "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, object]] = {
    CHAT: {"max_tokens": 4, "reasoning_effort": "none"},
    RESPONSES: {"max_output_tokens": 4, "reasoning": {"effort": "none"}},
    MESSAGES: {"max_tokens": 4, "thinking": {"type": "disabled"}},
}
"""Without thinking, so that the first token is the first text."""
FIRST_TEXT = {
    CHAT: rb'"content":"[^"]',
    RESPONSES: rb'"delta":"[^"]',
    MESSAGES: rb'"text":"[^"]',
}
CONVERSATIONS = {
    "a short question": ("Be brief.", 0),
    "an agent's turn": ("Rule: never guess what a file holds, read it first.\n" * 40, 8),
}
"""System message and number of tools; an agent's are in the prefix cache from the first turn on."""
END = b"0\r\n\r\n"


class Client:
    """One connection, which stays open: what is timed is the server, not the handshake."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._socket = socket.create_connection((server.address.host, server.address.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first_text_s(self, path: str, body: bytes) -> float:
        """Seconds from sending a request to its first text; the rest is read before it returns.

        Raises:
            RuntimeError: an answer without text, or another status than 200.
        """
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        start = time.perf_counter()
        self._socket.sendall(request)
        answer, first = b"", None
        while not answer.endswith(END):
            piece = self._socket.recv(1 << 16)
            now = time.perf_counter()
            if not piece:
                break
            answer += piece
            if first is None and re.search(FIRST_TEXT[path], answer):
                first = now - start
        if first is None or not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path} answered without text: {answer[:2000]!r}")
        return first


def request_body(path: str, text: str, rules: str, num_tools: int) -> bytes:
    """The same conversation in the form of a path."""
    body = {**BODIES[path], "temperature": 0, "stream": True}
    turns: list[dict[str, str]] = [{"role": "user", "content": text}]
    if path == RESPONSES:
        body |= {"input": turns, "instructions": rules}
    elif path == MESSAGES:
        body |= {"messages": turns, "system": rules}
    else:
        body["messages"] = [{"role": "system", "content": rules}, *turns]
    if num_tools:
        body["tools"] = [tool(path, f"tool_{i}") for i in range(num_tools)]
    return json.dumps(body).encode()


def tool(path: str, name: str) -> dict[str, object]:
    """One tool of an agent."""
    properties = {key: {"type": "string", "description": "A path"} for key in ("from", "to")}
    schema = {"type": "object", "properties": properties, "required": ["from"]}
    function = {"name": name, "description": "Copies a file to another place. " * 8}
    if path == MESSAGES:
        return {**function, "input_schema": schema}
    function["parameters"] = schema
    if path == RESPONSES:
        return {"type": "function", **function}
    return {"type": "function", "function": function}


def measure(
    server: ServerUnderTest, turns: int, rules: str, num_tools: int
) -> dict[str, list[float]]:
    """Milliseconds to the first text of each path, one entry a turn."""
    draw = random.Random(0)
    client = Client(server)
    times: dict[str, list[float]] = {path: [] for path in BODIES}
    for turn in range(turns + 10):
        for path in draw.sample(list(BODIES), len(BODIES)):
            text = f"{draw.randrange(10**9):09d}: Tom has 3 apples and buys 4 more. How many?"
            first_s = client.first_text_s(path, request_body(path, text, rules, num_tools))
            if turn >= 10:  # the others warm up
                times[path].append(1e3 * first_s)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians of each path, and of its differences to chat, with a 95 % interval of that median."""
    result = {}
    for path, own in times.items():
        tenth = sorted(own)[len(own) // 10]
        result[path] = {"median_ms": round(median(own), 3), "tenth_ms": round(tenth, 3)}
        if path != CHAT:
            more = sorted(a - b for a, b in zip(own, times[CHAT], strict=True))
            # Order statistics of a binomial with p = 1/2.
            half = round(0.98 * len(more) ** 0.5)
            middle = len(more) // 2
            result[path] |= {
                "more_than_chat_ms": round(median(more), 3),
                "at_least_ms": round(more[max(0, middle - half)], 3),
                "at_most_ms": round(more[min(len(more) - 1, middle + half)], 3),
            }
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, nargs=2, default=[2000, 500], help="of each kind")
    parser.add_argument("--json", type=Path, help="where to record the figures")
    args = parser.parse_args(argv)
    settings: dict[str, Raw] = {"num_threads": 1, "kv_cache_memory": "128MiB"}
    record: dict[str, object] = {}
    with started_server(settings) as server:
        record["environment"] = environment(vars(args) | {"json": None}, server.info)
        for turns, (name, (rules, num_tools)) in zip(
            args.turns, CONVERSATIONS.items(), strict=True
        ):
            size = len(request_body(CHAT, "", rules, num_tools))
            paths = summary(measure(server, turns, rules, num_tools))
            record[name] = {"turns": turns, "body_bytes": size, **paths}
            print(name, json.dumps(record[name], indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
