"""What a client may take of the server: values, places, log-probabilities, the loop's time."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from openspec.errors import RequestError
from openspec.serve.generation.body import parse
from openspec.serve.shapes.chat import ChatCompletionRequest, CompletionRequest
from openspec.serve.shapes.messages import MessagesRequest
from openspec.serve.shapes.messages import as_chat as chat_of_messages
from openspec.serve.shapes.responses import ResponsesRequest
from openspec.serve.shapes.responses import as_chat as chat_of_responses
from openspec.text.json_reader import CONTAINER_COST, MAX_VALUES, num_values
from openspec.text.turns import SMALL
from tests.serve.conftest import RunningServer
from tests.serve.fake_engine import FakeEngineClient
from tests.serve.waiting import PATIENCE_S, wait_until

MAX_LOOP_S = 0.02
"""Of the loop's processor time, for a body of MAX_BYTES."""
MAX_BYTES = 4096
HI = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}


def filled(before: str, item: str, after: str, num_bytes: int = MAX_BYTES) -> bytes:
    """A body of at most so many bytes, with as many items in a list as fit."""
    num = (num_bytes - len(before) - len(after)) // (len(item) + 1)
    return (before + ",".join([item] * num) + after).encode()


CHAT = '{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],'
SMALL_BODIES = {
    "messages": filled('{"max_tokens":1,"messages":[', '{"role":"user","content":""}', "]}"),
    "parts": filled(
        '{"max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":""}',
        "]}]}",
    ),
    "calls": filled(
        '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
        '{"function":{"name":"","arguments":"[[]]"}}',
        "]}]}",
    ),
    "tools": filled(CHAT + '"tool_choice":"none","tools":[', '{"function":{"name":"f"}}', "]}"),
    "enum": filled(CHAT + '"tools":[{"function":{"name":"f","parameters":{"enum":[', "1", "]}}}]}"),
    "lists": filled('{"max_tokens":1,"prompt":[', "[1]", "]}"),
    "texts": filled('{"max_tokens":1,"prompt":[', '"a"', "]}"),
    "choices": b'{"max_tokens":1,"n":128,"prompt":["a","b","c","d","e","f","g","h"]}',
    "logprobs": b'{"max_tokens":4,"n":64,"logprobs":20,"prompt":"a"}',
    "words": filled('{"max_tokens":1,"prompt":"a","bad_words":[', '"ab"', "]}"),
    "deep": b'{"prompt":"a","x":' + b"[" * 2000 + b"]" * 2000 + b"}",
}


@pytest.fixture
def loop_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], float]]:
    """The most processor time that a callback of the server's loop took; not the fake engine's."""
    taken: list[float] = []
    of_engine = [0.0]
    run, submit = asyncio.events.Handle._run, FakeEngineClient.submit

    def timed(handle: asyncio.events.Handle) -> None:
        of_engine[0], started = 0.0, time.thread_time()
        run(handle)
        if "FakeEngine" not in repr(handle):
            taken.append(time.thread_time() - started - of_engine[0])

    def timed_submit(*arguments: object, **options: object) -> object:
        started = time.thread_time()
        stream = submit(*arguments, **options)
        of_engine[0] += time.thread_time() - started
        return stream

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    monkeypatch.setattr(FakeEngineClient, "submit", timed_submit)

    def worst() -> float:
        result = max(taken, default=0.0)
        taken.clear()
        return result

    return worst


@pytest.mark.parametrize("name", SMALL_BODIES)
def test_a_small_body_costs_the_loop_little(
    server: RunningServer, loop_s: Callable[[], float], name: str
) -> None:
    body = SMALL_BODIES[name]
    assert len(body) <= MAX_BYTES
    is_chat = b'"messages"' in body
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    times = []
    for _ in range(5):  # the least of some: other work on the machine takes its caches
        assert server.client.post(path, content=body, headers=JSON).status_code in (200, 400)
        times.append(loop_s())
    assert min(times) < MAX_LOOP_S


def test_a_body_in_tiny_chunks_costs_the_loop_little(
    server: RunningServer, loop_s: Callable[[], float]
) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON['content-type']}\r\n"
    body = b'{"max_tokens":1,"prompt":"' + b"x" * 40_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    times = []
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
            sock.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks)
            assert sock.recv(4096).startswith(b"HTTP/1.1 ")
        times.append(loop_s())
    assert min(times) < MAX_LOOP_S


NUM_CONTAINERS = MAX_VALUES // (CONTAINER_COST + 3)
MAX_BODY = 8 << 20
LARGE_BODIES = {
    "ids": (CompletionRequest, filled('{"prompt":[', "1234", "]}", 5 * (1 << 18))),
    "text": (CompletionRequest, b'{"prompt":"' + b"word " * (MAX_BODY // 5) + b'"}'),
    "escapes": (CompletionRequest, b'{"prompt":"' + rb"\u00e9" * (MAX_BODY // 6) + b'"}'),
    "enum": (
        ChatCompletionRequest,
        filled(CHAT + '"tools":[{"function":{"name":"f","parameters":{"enum":[', '"ab"', "]}}}]}",
               5 * (MAX_VALUES - 200)),
    ),
    "parts": (
        ChatCompletionRequest,
        filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}",
               27 * NUM_CONTAINERS),
    ),
    "blocks": (
        MessagesRequest,
        filled('{"max_tokens":1,"messages":[{"role":"user","content":[',
               '{"type":"text","text":"a"}', "]}]}", 27 * NUM_CONTAINERS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_no_step_of_reading_a_large_body_holds_others_up(name: str) -> None:
    model, body = LARGE_BODIES[name]
    gc.collect()
    gc.freeze()
    try:
        value = json.loads(body)
        kept = model.model_validate(value)
        steps = (
            lambda: num_values(body),
            lambda: json.loads(body),
            lambda: json.dumps(value, ensure_ascii=False).encode(),
            lambda: model.model_validate(value),
            gc.collect,
        )
        assert parse(model, body) == kept
        for step in steps:
            assert min(map(thread_s, [step] * 3)) < 0.05
    finally:
        gc.unfreeze()


def thread_s(work: Callable[[], object]) -> float:
    """Processor time of `work`, without collecting what the tests before left behind."""
    gc.disable()
    try:
        started = time.thread_time()
        work()
        return time.thread_time() - started
    finally:
        gc.enable()


def test_too_many_values_are_refused() -> None:
    for item in ("1", "[]", "{}", '""', "[[]]"):
        with pytest.raises(RequestError, match=f"over {MAX_VALUES} values"):
            parse(CompletionRequest, filled('{"prompt":"a","x":[', item, "]}", MAX_BODY))
    assert num_values(rb'{"a":"[,{\",","b":[1,2]}') == 2 * CONTAINER_COST + 2


def test_conversations_in_many_parts_are_joined_once() -> None:
    text, num = "x" * 800, 8000  # 6.4 MB
    block = {"type": "text", "text": text}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for role, blocks in (("user", [block]), ("assistant", [block, use])):
        given = [{"role": role, "content": blocks * num}, {"role": "user", "content": "a"}]
        body = MessagesRequest(max_tokens=1, messages=given)
        assert thread_s(lambda body=body: chat_of_messages(body)) < 1
        first = chat_of_messages(body).messages[0]
        joined = "\n".join([text] * num)
        assert first.content == (joined if role == "assistant" else joined + "\na")
        assert len(first.tool_calls or ()) == (num if role == "assistant" else 0)
    items = [{"role": "developer", "content": text}] * 2000
    items += [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}] * 2000
    response = ResponsesRequest(input=items)
    assert thread_s(lambda: chat_of_responses(response)) < 1
    system, answer = chat_of_responses(response).messages
    assert system.content == "\n\n".join([text] * 2000) and len(answer.tool_calls) == 2000


@pytest.mark.parametrize("arguments", ['{"a": NaN}', "[Infinity]", '{"a": 1e400}', '{"a":1,"a":2}'])
def test_arguments_that_readers_understand_differently(
    server: RunningServer, arguments: str
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HI, {"role": "assistant", "tool_calls": [call]}]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = server.error(path, messages=messages)
        assert error["param"] == "messages" and "arguments of a call" in error["message"]
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    assert server.error("/v1/responses", input=[item])["param"] == "input"


def test_arguments_count_as_values(server: RunningServer) -> None:
    arguments = "[" + ",".join(["[]"] * (MAX_VALUES // CONTAINER_COST // 2)) + "]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for num, expected in ((1, "context length"), (2, f"over {MAX_VALUES} values")):
        messages = [HI, {"role": "assistant", "tool_calls": [call] * num}]
        error = server.error("/v1/chat/completions", messages=messages)
        assert expected in error["message"], error


def test_requests_count_until_their_prompts_are_ready(
    start_server: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server({"max_num_seqs": 3}, max_num_queued_reqs=0)
    pool, context = server.context.text_pool, server.context
    render, may_go = pool.render, threading.Event()

    async def waiting(request: bytes) -> object:
        await asyncio.get_running_loop().run_in_executor(None, may_go.wait)
        return await render(request)

    monkeypatch.setattr(pool, "render", waiting)
    body = {"messages": [{"role": "user", "content": "hi " * 10}], "max_tokens": 1, "x": "y" * 5000}
    with ThreadPoolExecutor(3) as threads:
        answers = [
            threads.submit(server.client.post, "/v1/chat/completions", json=body) for _ in range(3)
        ]
        wait_until(lambda: context.num_preparing == 3)
        assert context.body_bytes.taken > 15_000, "held until the prompt is ready"
        refusal = server.client.post("/v1/chat/completions", json=body)
        assert refusal.status_code == 503 and int(refusal.headers["retry-after"]) >= 1
        assert server.client.post("/tokenize", json={"prompt": "a"}).status_code == 503
        may_go.set()
        assert [answer.result(PATIENCE_S).status_code for answer in answers] == [200] * 3
    assert context.num_preparing == context.body_bytes.taken == 0


def test_a_running_request_does_not_keep_its_body(start_server) -> None:
    server = start_server({"step_s": 0.02})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"MARK": "x"}}}]
    messages = [{"role": "user", "content": "MARK"}]
    bodies = {
        "/v1/completions": {"prompt": "MARK " * 20},
        "/v1/chat/completions": {"messages": messages, "tools": tools, "unknown": ["MARK"] * 9},
    }
    with ThreadPoolExecutor(2) as threads:
        for path, body in bodies.items():
            threads.submit(server.client.post, path, json={**body, "max_tokens": 900})
        wait_until(lambda: server.context.lifecycle.num_jobs == 2)
        kept = [
            one
            for one in gc.get_objects()
            if isinstance(one, CompletionRequest | ChatCompletionRequest)
        ]
        assert len(kept) >= 2 and not any("MARK" in repr(one) for one in kept)
        server.call(server.context.lifecycle.abort_all)


def test_small_texts_do_not_wait_for_large_ones(server: RunningServer) -> None:
    may_go = threading.Event()

    async def run() -> None:
        pool = server.context.text_pool
        large = [asyncio.create_task(pool.run(SMALL + 1, may_go.wait)) for _ in range(6)]
        await asyncio.wait_for(pool.run(SMALL, lambda: None), PATIENCE_S)
        assert not any(one.done() for one in large)
        may_go.set()
        await asyncio.gather(*large)

    asyncio.run_coroutine_threadsafe(run(), server.loop).result(PATIENCE_S)


def test_a_response_repeats_its_tools_at_little_cost(
    server: RunningServer, loop_s: Callable[[], float]
) -> None:
    function = {"type": "function", "name": "f", "parameters": {"description": "é" * 1_000_000}}
    body = {"input": "hi", "tools": [function], "tool_choice": "none", "max_output_tokens": 1}
    times = []
    for _ in range(3):
        loop_s()
        response = server.client.post("/v1/responses", json={**body, "stream": True})
        assert response.status_code == 200 and response.text.count('"description":"é') == 3
        times.append(loop_s())
    assert min(times) < 2 * MAX_LOOP_S
