"""Disconnects, slow readers, the queue's limit, drain: in process, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from openspec.serve.generation import chat_prompt
from tests.serve.conftest import RunningServer
from tests.serve.sse import parse_events
from tests.serve.waiting import PATIENCE_S, wait_until

JSON = "content-type: application/json"


def num_handled(server: RunningServer, path: str) -> float:
    """Requests that the server is through with, answered or not."""
    lines = server.client.get("/metrics").text.splitlines()
    wanted = [line for line in lines if line.startswith("openspec:http_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in wanted if f'path="{path}"' in line)


def post(server: RunningServer, path: str, body: dict) -> socket.socket:
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{JSON}\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_disconnect_aborts_within_a_step(start_server, path: str, stream: bool) -> None:
    server = start_server({"step_s": 0.1})
    body = {"stream": stream, "n": 3, "max_tokens": 2000, "ignore_eos": True}
    body |= (
        {"prompt": "a"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    sock = post(server, path, body)
    wait_until(lambda: len(server.engine.requests) == 3)
    if stream:
        assert sock.recv(100)
    sock.close()
    # Counted in steps: what holds up the server's loop holds up the engine's steps in it too.
    before = server.engine._stats.num_steps
    wait_until(lambda: len(server.engine.aborted) == 3)
    assert server.engine._stats.num_steps - before < 4
    wait_until(lambda: server.context.lifecycle.num_jobs == 0)
    assert server.context.num_sequences == 0
    assert server.complete(prompt="a", max_tokens=2)


def test_disconnect_while_waiting_for_a_place(start_server) -> None:
    server = start_server({"step_s": 0.02, "max_num_seqs": 1})
    first = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2000})
    wait_until(lambda: len(server.engine.requests) == 1)
    second = post(server, "/v1/completions", {"prompt": "b", "stream": True})
    wait_until(lambda: len(server.engine.requests) == 2)
    second.close()
    wait_until(lambda: len(server.engine.aborted) == 1)
    assert server.engine.aborted == [server.engine.requests[1].request_id]
    first.close()


def test_many_disconnects_leave_nothing_behind(start_server) -> None:
    server = start_server({"step_s": 0.001})
    for number in range(200):
        sock = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
        if number % 2:
            sock.recv(10)
        sock.close()
    # All of them: between two requests there may be a moment with none.
    wait_until(lambda: num_handled(server, "/v1/completions") == 200)
    assert server.context.num_sequences == 0
    wait_until(lambda: server.call(lambda: len(asyncio.all_tasks())) < 10)
    assert server.client.get("/load").json() == {"server_load": 0}


def test_a_slow_reader_stalls_nobody(start_server) -> None:
    server = start_server({"step_s": 0.002})
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "n": 8, "logprobs": 20}
    slow = post(server, "/v1/completions", body)
    wait_until(lambda: len(server.engine.requests) == 8)
    started = time.monotonic()
    for _ in range(5):
        server.complete(prompt="b", max_tokens=20)
    assert time.monotonic() - started < PATIENCE_S, "stalled, it would take for ever"
    # The engine has long finished; what was not read was joined, and nothing is lost.
    wait_until(lambda: not server.engine._running)
    answer = bytearray()
    while b"[DONE]" not in answer[-100:]:
        chunk = slow.recv(1 << 20)
        assert chunk
        answer += chunk
    num_tokens = answer.count(b'"finish_reason":"length"')
    assert num_tokens == 8
    slow.close()


def test_queue_limit(start_server) -> None:
    server = start_server({"step_s": 0.02, "max_num_seqs": 2}, max_num_queued_reqs=3)
    socks = [post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2000}) for _ in range(5)]
    wait_until(lambda: len(server.engine.requests) == 5)
    response = server.client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["type"] == "service_unavailable"
    assert len(server.engine.requests) == 5
    label = 'model_name="fake",reason="queue_full"'
    metrics = server.client.get("/metrics").text
    assert f"vllm:admission_rejections_total{{{label}}} 1.0" in metrics
    for sock in socks:
        sock.close()
    wait_until(lambda: server.context.num_sequences == 0)
    assert server.complete(prompt="a", max_tokens=1)
    assert server.complete(prompt=["a"] * 5, max_tokens=1), "as many as fit at a time"
    num_before = len(server.engine.requests)
    for body in ({"prompt": ["a"] * 6}, {"prompt": "a", "n": 6}, {"prompt": ["a"] * 3, "n": 2}):
        error = server.error("/v1/completions", 400, **body)
        assert "6 sequences" in error["message"] and "up to 5" in error["message"]
    sock = post(server, "/v1/completions", {"prompt": ["a"] * 3, "max_tokens": 2000})
    wait_until(lambda: server.context.num_sequences == 3)
    error = server.error("/v1/completions", 503, prompt=["a"] * 3)
    assert "3 of 5 sequences" in error["message"] and "needs 3" in error["message"]
    assert len(server.engine.requests) == num_before + 3, "all of a request or nothing"
    sock.close()


def test_budget_of_bodies_under_way(start_server) -> None:
    server = start_server(max_body_bytes=100_000)
    server.context.body_bytes.most = 250_000
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"content-length: 100000\r\n\r\n"
    socks = []
    for number in range(1, 3):
        socks.append(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
        socks[-1].sendall(head + b" " * 99_999)
        wait_until(lambda n=number: server.context.body_bytes.taken == n * 99_999)
    padded = b'{"prompt": "a", "max_tokens": 1' + b" " * 60_000 + b"}"
    kind = {"content-type": "application/json"}
    refusal = server.client.post("/v1/completions", content=padded, headers=kind)
    assert refusal.status_code == 503 and int(refusal.headers["retry-after"]) >= 1
    message = refusal.json()["error"]["message"]
    assert "taken 199998 of 250000 bytes of bodies" in message
    assert server.client.get("/health").status_code == 200
    for sock in socks:
        sock.close()
    wait_until(lambda: server.context.body_bytes.taken == 0)
    assert server.client.post("/v1/completions", content=padded, headers=kind).status_code == 200


def test_budgets_of_logprobs_and_allowed_ids(start_server) -> None:
    server = start_server({"step_s": 0.02})
    server.context.logprobs.most = 1000
    body = {"prompt": [5] * 50, "n": 4, "prompt_logprobs": 3, "max_tokens": 2000}
    sock = post(server, "/v1/completions", body)
    wait_until(lambda: server.context.logprobs.taken == 800)
    error = server.error("/v1/completions", 503, **body)
    assert "800 of 1000 log-probabilities" in error["message"]
    assert server.complete(prompt="a", max_tokens=1)
    error = server.error("/v1/completions", 400, **{**body, "n": 8})
    assert "1600 log-probabilities" in error["message"] and "up to 1000" in error["message"]
    sock.close()
    wait_until(lambda: server.context.logprobs.taken == 0)
    for answers in ({"max_tokens": 126}, {"max_tokens": 63, "n": 2}):
        error = server.error("/v1/completions", 400, prompt="a", logprobs=7, **answers)
        assert "1008 log-probabilities" in error["message"]
    assert server.complete(prompt="a", logprobs=7, max_tokens=125)

    server.context.allowed_ids.most = 600
    allowed = {"allowed_token_ids": list(range(300)), "max_tokens": 1}
    assert server.complete(prompt=["a"] * 2, **allowed)
    error = server.error("/v1/completions", 400, prompt=["a"] * 3, **allowed)
    assert "900 allowed_token_ids" in error["message"]


def test_limit_of_queued_tokens(start_server) -> None:
    num_kv_tokens = 1024 * 16
    server = start_server({"step_s": 0.02}, max_num_queued_tokens=100)
    prompt = [5] * 1500
    body = {"prompt": [prompt] * 10, "n": 2, "max_tokens": 2000}
    sock = post(server, "/v1/completions", body)
    wait_until(lambda: server.context.num_sequences == 20)
    assert server.context.num_prompt_tokens == 15000, "a prompt counts once"
    error = server.error("/v1/completions", 503, prompt=[5] * 1485)
    assert f"15000 of {num_kv_tokens + 100} prompt tokens" in error["message"]
    assert server.complete(prompt=[5] * 1000, max_tokens=1)
    error = server.error("/v1/completions", 400, prompt=[prompt] * 11)
    assert "16500 prompt tokens" in error["message"]
    sock.close()
    wait_until(lambda: server.context.num_prompt_tokens == 0)
    assert server.complete(prompt=prompt, max_tokens=1)


def test_load_beyond_the_limit_loses_nothing(start_server) -> None:
    # Slow enough that a busy client has sent more than the limit before the first is done.
    server = start_server({"step_s": 0.03, "max_num_seqs": 4}, max_num_queued_reqs=4)
    statuses: list[int] = []

    async def run() -> None:
        limits = httpx.Limits(max_connections=100)
        options = {"limits": limits, "timeout": PATIENCE_S}
        async with httpx.AsyncClient(base_url=server.url, **options) as client:

            async def one() -> None:
                body = {"prompt": "a", "max_tokens": 30}
                response = await client.post("/v1/completions", json=body)
                statuses.append(response.status_code)
                if response.status_code == 200:
                    assert response.json()["usage"]["completion_tokens"] == 30

            await asyncio.gather(*(one() for _ in range(100)))

    asyncio.run(run())
    assert set(statuses) == {200, 503}
    assert statuses.count(200) == len(server.engine.requests) >= 8


def test_drain(start_server) -> None:
    server = start_server({"step_s": 0.01})
    bodies: dict[str, bytes] = {}

    def read(name: str, max_tokens: int) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            body = {
                "prompt": "a",
                "max_tokens": max_tokens,
                "stream": True,
                "return_token_ids": True,
                "speculative": {"enabled": False},
            }
            bodies[name] = client.post("/v1/completions", json=body).content

    threads = [
        threading.Thread(target=read, args=("short", 30)),
        threading.Thread(target=read, args=("long", 2000)),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(server.engine.requests) == 2)
    lifecycle = server.context.lifecycle
    # Ten times what the short one takes, a fifth of what the long one would take.
    drain = asyncio.run_coroutine_threadsafe(lifecycle.drain(0.0, 4.0), server.loop)
    wait_until(lambda: lifecycle.is_refusing)
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    response = server.client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] and response.headers["connection"] == "close"
    drain.result(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    short, long = parse_events(bodies["short"]), parse_events(bodies["long"])
    assert short[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in short) == 30
    assert long[-1]["choices"][0]["finish_reason"] == "abort"


def test_grace_period_still_accepts(start_server) -> None:
    server = start_server()
    lifecycle = server.context.lifecycle
    # One period that does not end during the request, and one that nobody has to wait for.
    drain = asyncio.run_coroutine_threadsafe(lifecycle.drain(600.0, 1.0), server.loop)
    wait_until(lambda: lifecycle.is_draining)
    assert server.client.get("/ready").status_code == 503
    assert server.complete(prompt="a", max_tokens=1)
    assert drain.cancel()
    drain = asyncio.run_coroutine_threadsafe(lifecycle.drain(0.1, 1.0), server.loop)
    drain.result(PATIENCE_S)
    assert server.client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_silence_is_filled_with_comments(start_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.serve.generation.answer.KEEP_ALIVE_S", 0.1)
    server = start_server({"step_s": 0.35})
    body = {"prompt": "a", "max_tokens": 12, "stream": True}
    content = server.client.post("/v1/completions", json=body).content
    assert b"\n\n: keep-alive\n\n" in content
    assert parse_events(content)[-1]["choices"][0]["finish_reason"] == "length"


def test_large_prompts_do_not_hold_up_others(start_server) -> None:
    server = start_server()
    big = {"prompt": "the quick brown fox " * 100_000}
    thread = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/tokenize", json=big, timeout=PATIENCE_S)
    )
    began = time.monotonic()
    thread.start()
    worst = 0.0
    while thread.is_alive():
        started = time.monotonic()
        assert server.client.get("/health").status_code == 200
        worst = max(worst, time.monotonic() - started)
    # Held up, one would wait for about all of it.
    assert worst < (time.monotonic() - began) / 2


BIG = "the quick brown fox " * 1000
HI = {"role": "user", "content": "hi"}
BIG_TOOL = {"function": {"name": "x", "description": BIG}}
BIG_CALL = {"function": {"name": "x", "arguments": BIG}}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": BIG}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": BIG}]}]},
        {"messages": [HI], "tools": [BIG_TOOL]},
        {"messages": [HI, {"role": "assistant", "tool_calls": [BIG_CALL]}]},
        {"messages": [HI, {"role": "assistant", "content": "a", "reasoning": BIG}]},
    ],
    ids=["text", "parts", "tools", "calls", "reasoning"],
)
def test_large_chats_are_read_in_a_thread(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict
) -> None:
    render_request, threads = chat_prompt._render_request, []

    def noting(*arguments: object) -> bytes:
        threads.append(threading.current_thread().name)
        return render_request(*arguments)

    monkeypatch.setattr(chat_prompt, "_render_request", noting)
    server.client.post(path, json={**body, "max_tokens": 1})
    assert len(threads) == 1 and threads[0].startswith("openspec-text")


def test_an_error_within_a_stream_becomes_its_last_event(start_server) -> None:
    server = start_server({"step_s": 0.02})
    sock = post(server, "/v1/completions", {"prompt": "a", "max_tokens": 2000, "stream": True})
    wait_until(lambda: len(server.engine.requests) == 1)
    sock.recv(10)
    server.call(server.engine.die)
    answer = b""
    while b"[DONE]" not in answer:
        chunk = sock.recv(65536)
        assert chunk
        answer += chunk
    assert b'data: {"error":{"message":' in answer and b"0x7fff" not in answer
    sock.close()


def test_small_writes_are_not_delayed() -> None:
    from openspec.serve.config import ServeConfig
    from openspec.serve.server.listening import bound_socket

    # asyncio sets TCP_NODELAY on connections only if the socket says that it is TCP.
    with bound_socket(ServeConfig(port=0)) as sock:
        assert sock.proto == socket.IPPROTO_TCP
