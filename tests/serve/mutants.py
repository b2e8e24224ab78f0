"""Broken bodies, and how a server must answer them: below 500, quickly, in the right shape."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable

from tests.serve.waiting import PATIENCE_S

SEED = 20261120
CONCURRENCY = 8
MAX_MESSAGE_CHARS = 4000
SEEDS: dict[str, list[dict]] = {
    "/v1/completions": [
        {
            "model": None,
            "prompt": "one two",
            "max_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "n": 2,
            "best_of": 2,
            "seed": 1,
            "stop": ["x", "y"],
            "logprobs": 2,
            "echo": True,
            "logit_bias": {"5": 1.5},
            "presence_penalty": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "stop_token_ids": [3],
            "speculative": {"enabled": True, "num_speculative_tokens": 2},
            "return_token_ids": True,
        },
        {"prompt": [1, 2, 3], "max_tokens": 2, "prompt_logprobs": 1, "ignore_eos": True},
        {
            "prompt": [[1, 2], [3]],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        {"prompt": ["a", "b"], "max_tokens": 2, "allowed_token_ids": [1, 2], "priority": 1},
    ],
    "/v1/chat/completions": [
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
                }
            ],
            "tool_choice": "auto",
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "text"},
            "reasoning_effort": "low",
        },
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2,
            "stream": True,
            "n": 2,
            "stop": "x",
        },
        {
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "on"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 1,
        },
    ],
    "/v1/messages": [
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": "be kind"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "x"},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "strict": False}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
        {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], "stream": True},
    ],
    "/v1/messages/count_tokens": [
        {
            "system": "be kind",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "on"},
            ],
        }
    ],
    "/v1/responses/input_tokens": [{"input": "hi", "instructions": "be kind"}],
    "/v1/responses": [
        {
            "input": [
                {"role": "developer", "content": "be brief"},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "instructions": "be kind",
            "max_output_tokens": 3,
            "tools": [
                {
                    "type": "function",
                    "name": "f",
                    "parameters": {"type": "object"},
                    "strict": False,
                },
                {"type": "web_search"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "store": False,
            "seed": 1,
        },
        {"input": "hi", "max_output_tokens": 2, "stream": True},
    ],
    "/tokenize": [
        {"prompt": "one", "add_special_tokens": False, "return_token_strs": True},
        {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True},
    ],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/abort_request": [{"request_id": "x", "abort_all": False}],
}
ODD_VALUES: list[object] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, 2**31, 2**63, -(2**63) - 1, 10**30),
    *("", "x", "1", "null", "\x00", "日本語", "😀" * 50, "<|im_end|>", "</think>", "a" * 5000),
    *([], {}, [[]], [None], [1.5], ["a", 1], {"": ""}, {"a": {"b": [1]}}, [[[[1]]]], [2**70]),
    *(["x"] * 40, [1] * 3000, {str(i): 1 for i in range(50)}, [{}], "\ud800", "a\udfffb"),
]
ODD_VALUES += ['{"a":NaN}', '{"a":1e400}', '{"a":1,"a":2}', '{"a":"\\ud800"}', "[" * 5000]
ODD_TEXT = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e999",
    "0x10",
    "01",
    "+1",
    ".5",
    "1.",
]


def places(value: object, path: tuple = ()) -> list[tuple]:
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            found += places(value[index], (*path, index))
    return found


def replace(body: object, path: tuple, change: Callable[[dict | list, object], None]) -> None:
    target = body
    for step in path[:-1]:
        target = target[step]
    change(target, path[-1])


def mutate(rng: random.Random, seed: dict) -> bytes:
    body = json.loads(json.dumps(seed))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        inner = [path for path in places(body) if path]
        if not inner:
            break
        path = rng.choice(inner)
        value = copy.deepcopy(rng.choice(ODD_VALUES))

        def change(target: dict | list, key: object, value: object = value) -> None:
            kind = rng.random()
            if kind < 0.7:
                target[key] = value
            elif kind < 0.8:
                del target[key]
            elif isinstance(target, dict):
                target[str(rng.choice(ODD_VALUES))[:20]] = value
            else:
                target.append(value)

        replace(body, path, change)
    text = json.dumps(body)
    kind = rng.random()
    if kind < 0.06:
        text = text[: rng.randrange(len(text))]
    elif kind < 0.12:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(ODD_TEXT) + text[place + rng.randrange(3) :]
    elif kind < 0.16:
        text = text.replace(":", f': {rng.choice(ODD_TEXT)}, "x":', 1)
    elif kind < 0.19 and text.startswith('{"'):
        text = "{" + text[1:-1] + ", " + text[1:]  # every key twice
    elif kind < 0.21:
        depth = rng.choice([10, 200, 2000, 100_000])
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
        nested = opening * depth + "1" + closing * depth
        text = text[:-1] + ', "deep": ' + nested + "}" if rng.random() < 0.5 else nested
    data = text.encode("utf-8", "surrogatepass")
    if kind > 0.95:
        place = rng.randrange(len(data) + 1)
        data = data[:place] + rng.randbytes(rng.randint(1, 4)) + data[place:]
    return data


async def send(port: int, cases: list[tuple[str, bytes]]) -> tuple[Counter[int], list[str]]:
    """Sends every case; the statuses, and what is wrong with an answer."""
    statuses: Counter[int] = Counter()
    failures: list[str] = []

    async def worker() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while cases:
            path, body = cases.pop()
            started = time.monotonic()
            writer.write(
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            status, headers, answer = await asyncio.wait_for(read_answer(reader), PATIENCE_S)
            statuses[status] += 1
            problem = None
            if status == 503 and "retry-after" in headers:
                pass  # a limit is full
            elif status >= 500:
                problem = f"status {status}"
            elif status >= 400:
                error = json.loads(answer)["error"]
                keys = {"message", "type"}
                if not path.startswith("/v1/messages"):
                    keys |= {"param", "code"}
                elif "details" in error:
                    keys |= {"details"}
                if set(error) != keys:
                    problem = "shape"
                elif len(error["message"]) > MAX_MESSAGE_CHARS:
                    problem = "long message"
            elif b'"error":' in answer[:20] or not answer:
                problem = "error in a stream"
            if time.monotonic() - started > PATIENCE_S / 2:
                problem = "slow"
            if problem:
                failures.append(f"{problem}: {path} {body[:300]!r} -> {answer[:300]!r}")
            if headers.get("connection") == "close":
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return statuses, failures


async def watch_health(port: int, times: list[float]) -> None:
    """Notes how long each of many /health takes."""
    while True:
        await asyncio.sleep(0.01)
        started = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        status, _, _ = await read_answer(reader)
        assert status == 200
        times.append(time.monotonic() - started)
        writer.close()


async def send_and_watch(
    port: int, cases: list[tuple[str, bytes]]
) -> tuple[Counter[int], list[str], list[float]]:
    """What `send` returns, and how long /health took meanwhile, in rising order."""
    times: list[float] = []
    watching = asyncio.create_task(watch_health(port, times))
    statuses, failures = await send(port, cases)
    assert not watching.done(), watching.exception()
    watching.cancel()
    return statuses, failures, sorted(times)


def check_answers(port: int, num_bodies: int) -> None:
    """Sends so many broken bodies, which a fixed seed chooses."""
    rng = random.Random(SEED)
    paths = rng.choices(list(SEEDS), weights=[10, 10, 5, 2, 2, 5, 2, 1, 1], k=num_bodies)
    cases = [(path, mutate(rng, rng.choice(SEEDS[path]))) for path in paths]
    statuses, failures = asyncio.run(send(port, cases))
    assert not failures, failures[:5]
    assert sum(statuses.values()) == num_bodies
    assert set(statuses) <= {200, 400, 404, 413}, statuses
    # Both kinds must be there, or the mutations are too tame or too wild.
    assert statuses[200] > num_bodies / 20 and statuses[400] > num_bodies / 4, statuses


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {}
    for line in head[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readline()).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body
