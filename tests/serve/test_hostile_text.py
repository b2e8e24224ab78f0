"""Templates without end, texts without end: the server stays, and so does everybody else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from openspec.text.json_reader import MAX_VALUES
from openspec.text.worker import RENDER_BYTES
from tests.serve.real_server import (
    PACKAGE_ROOT,
    RealServer,
    children_of,
    cpu_s,
    is_running,
    real_server,
    resident_bytes,
)
from tests.serve.waiting import PATIENCE_S, wait_until

MAX_HEALTH_S = 0.5
"""Of 99 in 100 /health, on a machine that is busy with other tests; a stall takes seconds."""
MAX_BODY = 8 * 1024 * 1024 - 1000
TEMPLATE = """\
{%- set text = messages[-1].content -%}
{%- if text == 'sort' -%}
{%- for i in range(9) -%}{{ (range(99999)|list*100)|map('string')|sort|length }}{%- endfor -%}
{%- elif text == 'loop' -%}
{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif text == 'replace' -%}{{ ('x' * 999999)|replace('x', 'y' * 20000)|length }}
{%- elif text == 'join' -%}{{ range(20000)|join('y' * 999999)|length }}
{%- elif text == 'times' -%}{{ 'y' * 20000000000 }}
{%- endif -%}
{{ '<|im_start|>user\\n' + text + '<|im_end|>\\n<|im_start|>assistant\\n' }}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that does what the last message says."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(Path(PACKAGE_ROOT) / "openspec" / "models" / "tiny", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def arguments(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--kv-cache-memory", "64MiB", "--num-threads", "1")


@pytest.fixture(scope="module")
def real(model: Path) -> Iterator[RealServer]:
    with real_server(*arguments(model)) as server:
        yield server
        workers = workers_of(server)
        assert server.stop() == 0
        wait_until(lambda: not any(map(is_running, workers)))
        assert "Traceback" not in server.log


def workers_of(server: RealServer) -> list[int]:
    return children_of(server.process.pid, "openspec.text.worker")


def worker_of(server: RealServer) -> int:
    """The one that renders, before the first large chat."""
    wait_until(lambda: len(workers_of(server)) == 1)
    return workers_of(server)[0]


def chat(server: RealServer, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return server.client.post("/v1/chat/completions", json=body)


def message(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


@contextlib.contextmanager
def under_way(work: Callable[[], httpx.Response]) -> Iterator[Callable[[], httpx.Response]]:
    """Runs a request in a thread; what is yielded waits for its answer."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()

    def answer() -> httpx.Response:
        thread.join(PATIENCE_S)
        return answers[0]

    yield answer
    thread.join(PATIENCE_S)


def health_s(server: RealServer, num: int = 200) -> float:
    """The time that 99 % of probes take at most."""
    times = []
    with server.client as client:
        for _ in range(num):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
            time.sleep(0.005)
    return sorted(times)[num * 99 // 100 - 1]


@pytest.mark.parametrize("text", ["sort", pytest.param("loop", marks=pytest.mark.full)])
def test_a_template_without_end_stalls_nobody(real: RealServer, text: str) -> None:
    worker = worker_of(real)
    with under_way(lambda: chat(real, text)) as answer:
        assert health_s(real) < MAX_HEALTH_S
        assert message(answer()) == "the chat template takes too long"
    assert chat(real, "hi").status_code == 200
    assert worker_of(real) != worker


@pytest.mark.parametrize("text", ["replace", "join", "times"])
def test_a_template_that_asks_for_all_memory(real: RealServer, text: str) -> None:
    worker = worker_of(real)
    assert message(chat(real, text)) == "the chat is too large for its template"
    peak = Path(f"/proc/{worker}/status").read_text().partition("VmHWM:")[2].split()[0]
    assert int(peak) * 1024 < RENDER_BYTES
    assert chat(real, "hi").status_code == 200
    assert worker_of(real) == worker


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_renderer_that_ends_or_stands_still_is_replaced(real: RealServer, number: int) -> None:
    worker = worker_of(real)
    os.kill(worker, signal.SIGSTOP)
    with under_way(lambda: chat(real, "hi")) as answer:
        time.sleep(0.3)
        os.kill(worker, number)
        assert answer().status_code == 200, "it is sent once more"
    assert worker_of(real) != worker
    idle = worker_of(real)
    os.kill(idle, signal.SIGKILL)
    wait_until(lambda: not is_running(idle))
    assert chat(real, "hi").status_code == 200


def test_a_chat_whose_renderers_end_is_refused_for_now(real: RealServer) -> None:
    with under_way(lambda: chat(real, "sort")) as answer:
        for _ in range(2):
            wait_until(lambda: workers_of(real) and cpu_s(workers_of(real)[0]) > 0.3)
            ended = worker_of(real)
            os.kill(ended, signal.SIGKILL)
            wait_until(lambda pid=ended: not is_running(pid))
        refusal = answer()
    assert "process that prepares texts ended" in message(refusal, 503)
    assert int(refusal.headers["retry-after"]) >= 1
    assert refusal.json()["error"]["code"] == "text_process_ended"
    assert chat(real, "hi").status_code == 200


def test_who_leaves_does_not_end_the_renderer_of_others(real: RealServer) -> None:
    worker = worker_of(real)
    content = "x" * 5000
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    for _ in range(20):
        send(real, "/v1/chat/completions", body).close()
    assert chat(real, "hi").status_code == 200
    assert worker_of(real) == worker


def test_no_renderer_outlives_the_server(model: Path) -> None:
    with real_server(*arguments(model)) as server:
        worker = worker_of(server)
        body = json.dumps({"messages": [{"role": "user", "content": "sort"}]}).encode()
        with send(server, "/v1/chat/completions", body):
            wait_until(lambda: resident_bytes(worker) > 40e6)
            server.process.kill()
            wait_until(lambda: not is_running(worker))


@pytest.mark.full
def test_a_signal_ends_a_server_whose_template_does_not_end(model: Path) -> None:
    with real_server(*arguments(model), "--shutdown-timeout", "1") as server:
        body = json.dumps({"messages": [{"role": "user", "content": "sort"}]}).encode()
        worker = worker_of(server)
        with send(server, "/v1/chat/completions", body):
            wait_until(lambda: resident_bytes(worker) > 40e6)
            assert server.stop() == 0


def send(server: RealServer, path: str, body: bytes) -> socket.socket:
    """A connection on which this request has gone out."""
    url = httpx.URL(server.url)
    sock = socket.create_connection((url.host, url.port), timeout=PATIENCE_S)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return sock


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_cannot_fit_is_not_encoded(real: RealServer, path: str) -> None:
    text = "the quick brown fox " * (MAX_BODY // 20)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [user(text)]}
    before = resident_bytes(real.process.pid)
    with under_way(lambda: real.client.post(path, json=body)) as answer:
        assert health_s(real) < MAX_HEALTH_S
        error = answer().json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 16384 tokens. ")
    assert "characters resulted in 39" in error["message"], "17 letters a token at most"
    assert resident_bytes(real.process.pid) - before < 200e6


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_encoding_ends_when_its_client_leaves(real: RealServer) -> None:
    body = json.dumps({"prompt": "a b " * (MAX_BODY // 4)}).encode()
    renderers = set(workers_of(real))
    sock = send(real, "/tokenize", body)
    wait_until(lambda: set(workers_of(real)) - renderers)
    [encoder] = set(workers_of(real)) - renderers
    wait_until(lambda: resident_bytes(encoder) > 100e6)
    sock.close()
    closed = time.monotonic()
    wait_until(lambda: not is_running(encoder))
    assert time.monotonic() - closed < 3, "all of it takes 10 s and more"


def test_a_huge_text_is_encoded_as_a_small_one(real: RealServer) -> None:
    piece = "naïve café <|im_start|> 日本語 \n"
    small = real.client.post("/tokenize", json={"prompt": piece}).json()["tokens"]
    prompt = piece * (1 + (1 << 20) // len(piece))
    huge = real.client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    assert huge == small * (len(huge) // len(small))


def test_more_ids_than_can_be_read_at_once(real: RealServer) -> None:
    body = b'{"prompt":[' + b",".join([b"1"] * (MAX_BODY // 2)) + b"]}"
    headers = {"content-type": "application/json"}
    with under_way(
        lambda: real.client.post("/v1/completions", content=body, headers=headers)
    ) as answer:
        assert health_s(real) < MAX_HEALTH_S
        assert f"over {MAX_VALUES} values" in message(answer())
