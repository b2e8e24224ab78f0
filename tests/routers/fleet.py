"""What all routers are asked: servers behind them, requests, and what became of those."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from tests.serve.real_server import RealServer, children_of, is_running, real_server

from openspec.serve.generation.metrics import PAGE_MAX_AGE_S

PATIENCE_S = 120.0
ENGINE = "openspec.engine.processes.process"
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron".split()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.1)


@contextlib.contextmanager
def servers(number: int, *arguments: str) -> Iterator[list[RealServer]]:
    common = (
        "--kv-cache-memory",
        "64MiB",
        "--num-threads",
        "1",
        "--shutdown-timeout",
        "300",
        "--access-log",
        *arguments,
    )
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(number) as pool:
        starts = [pool.submit(stack.enter_context, real_server(*common)) for _ in range(number)]
        yield [start.result() for start in starts]


@contextlib.contextmanager
def process(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines: list[bytes] = []
    assert started.stdout
    reader = threading.Thread(target=lambda: lines.extend(started.stdout or ()), daemon=True)
    reader.start()
    try:
        yield started
    except BaseException:
        sys.stdout.write(b"".join(lines[-60:]).decode(errors="replace"))
        raise
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@dataclass(frozen=True)
class Ask:
    """One request, in any of the ways that clients ask."""

    path: str
    body: dict[str, object]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def mixed(number: int, seed: int = 1) -> list[Ask]:
    """Completions and chats, greedy and sampled, whole and streamed."""
    chance = random.Random(seed)
    asks = []
    for i in range(number):
        text = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(3, 60)))
        body: dict[str, object] = {
            "model": "tiny",
            "max_tokens": chance.randrange(4, 60),
            "temperature": 0 if i % 2 else 0.9,
            "seed": i,
            "stream": i % 3 != 0,
        }
        if i % 4 < 2:
            asks.append(Ask("/v1/completions", {**body, "prompt": text, "ignore_eos": True}))
        else:
            messages = [{"role": "user", "content": text}]
            asks.append(Ask("/v1/chat/completions", {**body, "messages": messages}))
    return asks


def text_of(choice: dict[str, object]) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    assert isinstance(part, dict)
    texts = (choice.get("text"), part.get("reasoning_content"), part.get("content"))
    return "".join(text for text in texts if isinstance(text, str))


def answer(url: str, ask: Ask, on_text: Callable[[], None] = lambda: None) -> str:
    """The whole text; raises httpx.HTTPError for an answer that is refused or broken off."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        if not ask.is_stream:
            whole = client.post(ask.path, json=ask.body, headers=ask.headers)
            whole.raise_for_status()
            return text_of(whole.json()["choices"][0])
        text, is_done = "", False
        with client.stream("POST", ask.path, json=ask.body, headers=ask.headers) as stream:
            if stream.status_code != 200:
                stream.read()
                stream.raise_for_status()
            for line in stream.iter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        raise httpx.RemoteProtocolError(f"an error in the stream: {line}")
                    text += "".join(text_of(choice) for choice in event["choices"])
                    on_text()
        if not is_done:
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")
        return text


def answers(url: str, asks: Sequence[Ask], at_a_time: int = 8) -> list[str]:
    with ThreadPoolExecutor(at_a_time) as pool:
        return list(pool.map(lambda ask: answer(url, ask), asks))


def load_of(server: RealServer) -> int:
    """Requests that it has in flight."""
    load: int = server.client.get("/load").json()["server_load"]
    return load


def num_generations(server: RealServer) -> float:
    time.sleep(2 * PAGE_MAX_AGE_S)  # the page of before is served for so long
    text = server.client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("openspec:http_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if "/v1/c" in line)


@contextlib.contextmanager
def counted(behind: Sequence[RealServer]) -> Iterator[list[float]]:
    """Requests that each server answered within."""
    before = [num_generations(server) for server in behind]
    counts: list[float] = []
    yield counts
    counts += [num_generations(server) - old for server, old in zip(behind, before, strict=True)]


LONG = {"model": "tiny", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Stream(threading.Thread):
    """A long answer that is under way."""

    def __init__(self, url: str, seed: int, **more: object) -> None:
        super().__init__(daemon=True)
        self.ask = Ask("/v1/completions", {**LONG, "seed": seed, **more})
        self.url, self.text, self.error = url, "", ""
        self.has_begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.text = answer(self.url, self.ask, self.has_begun.set)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            self.error = repr(error)
        self.has_begun.set()


def check_texts(url: str, expected: Sequence[str]) -> None:
    """`expected`: of `mixed`, from a server with one engine."""
    assert answers(url, mixed(len(expected))) == expected
    print(f"   {len(expected)} requests: texts equal to one server's, two of three streamed")


def check_passing_through(url: str, behind: Sequence[RealServer]) -> None:
    """Headers, errors and fields that only openspec knows."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        body = {"model": "tiny", "prompt": "one two one two one two", "max_tokens": 20}
        request_id = f"from-a-client-{random.getrandbits(32)}"
        headers = {"x-request-id": request_id}
        plain = client.post(
            "/v1/completions",
            json={**body, "temperature": 0, "speculative": {"enabled": False}},
            headers=headers,
        )
        assert plain.status_code == 200, plain.text
        assert plain.json()["metrics"]["speculative_decoding"]["num_drafts"] == 0
        assert plain.headers["x-request-id"] == request_id
        until(lambda: any(request_id in server.log for server in behind), "the id is in a log")
        wrong = client.post("/v1/completions", json={**body, "temperature": -1})
        assert wrong.status_code == 400, wrong.text
        assert wrong.json()["error"]["param"] == "temperature"
        models = client.get("/v1/models").json()
        assert "tiny" in [model["id"] for model in models["data"]]
    print("   x-request-id, own fields and errors pass; /v1/models lists the model")


def check_client_that_leaves(url: str, behind: Sequence[RealServer]) -> None:
    body = {**LONG, "max_tokens": 15_000}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as stream:
        lines = stream.iter_lines()  # kept: its end is that of the connection
        first = next(lines)
        loads = [load_of(server) for server in behind]
        assert sum(loads) == 1, (loads, stream.status_code, first)
    until(
        lambda: sum(load_of(server) for server in behind) == 0,
        "the server knows that the client left",
    )
    print("   a client that leaves ends its request in the server")


def engines(server: RealServer) -> list[dict[str, int]]:
    found: list[dict[str, int]] = server.client.get("/server_info").json()["engines"]
    return found


def check_killed_engine(url: str, behind: Sequence[RealServer]) -> None:
    """SIGKILL of one of a server's engines under load: its own streams fail; another one starts."""
    server, asks = behind[-1], mixed(30, seed=4)
    expected = answers(behind[0].url, asks)
    streams = [Stream(url, seed, prompt=f"{seed} {WORDS[seed % 15]}") for seed in range(20, 32)]
    for stream in streams:
        stream.has_begun.wait(PATIENCE_S)
    killed = engines(server)[1]
    num_lost = killed["num_running"] + killed["num_waiting"]
    assert 0 < num_lost < len(streams)
    os.kill(killed["pid"], signal.SIGKILL)
    assert answers(url, asks) == expected, "others go on meanwhile"
    for stream in streams:
        stream.join(PATIENCE_S)
    errors = [stream.error for stream in streams if stream.error]
    assert len(errors) == num_lost and all("engine_dead" in error for error in errors), errors
    for stream in streams:
        assert stream.error or stream.text == answer(behind[0].url, stream.ask)
    until(lambda: all(one["is_alive"] for one in engines(server)), "another engine")
    tokens = [one["num_generation_tokens"] for one in engines(server)]
    answers(url, mixed(40, seed=6))
    for old, one in zip(tokens, engines(server), strict=True):
        assert one["num_generation_tokens"] > old, "the new engine works, too"
    print(f"   a killed engine fails its {num_lost} of {len(streams)} streams, and is replaced")


def check_end(url: str, behind: list[RealServer]) -> None:
    """SIGTERM to all servers under load: every stream ends whole, and no process is left."""
    pids = [pid for server in behind for pid in children_of(server.process.pid, ENGINE)]
    assert len(pids) >= 2 * len(behind)
    streams = [Stream(url, seed) for seed in range(6)]
    for stream in streams:
        stream.has_begun.wait(PATIENCE_S)
    for server in behind:
        server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.join(PATIENCE_S)
        assert stream.text and not stream.error, stream.error
    assert [server.process.wait(PATIENCE_S) for server in behind] == [0] * len(behind)
    until(lambda: not any(is_running(pid) for pid in pids), "no process is left")
    behind.clear()
    print("   servers that end let their streams end, and leave no process")


def check_drain(url: str, behind: list[RealServer]) -> None:
    """SIGTERM to one server under load: nothing is lost."""
    drained = behind[-1]
    streams = [Stream(url, seed) for seed in range(6)]
    for stream in streams:
        stream.has_begun.wait(PATIENCE_S)
    assert load_of(drained) > 0, "a drain of an idle server shows little"
    drained.process.send_signal(signal.SIGTERM)
    asks = mixed(40, seed=2)
    expected = answers(behind[0].url, asks)
    assert answers(url, asks) == expected
    for stream in streams:
        stream.join(PATIENCE_S)
        assert stream.text == answer(behind[0].url, stream.ask), stream.error
    assert drained.process.wait(PATIENCE_S) == 0
    behind.pop()
    print("   a server that drains ends its streams, and others take what is new: nothing lost")


def check_kill(url: str, behind: list[RealServer]) -> None:
    """SIGKILL of one server under load: its own streams fail, and no others."""
    killed = behind[-1]
    streams = [Stream(url, seed) for seed in range(10, 18)]
    for stream in streams:
        stream.has_begun.wait(PATIENCE_S)
    num_lost = load_of(killed)
    assert 0 < num_lost < len(streams)
    engine = killed.engine_pid
    killed.process.kill()
    for stream in streams:
        stream.join(PATIENCE_S)
    failed = [stream for stream in streams if stream.error]
    assert len(failed) == num_lost, [stream.error for stream in streams]
    behind.pop()
    for stream in streams:
        assert stream.error or stream.text == answer(behind[0].url, stream.ask)
    until(lambda: not Path(f"/proc/{engine}").exists(), "the engine of a killed server ends")
    asks = mixed(30, seed=3)
    assert answers(url, asks) == answers(behind[0].url, asks)
    print(f"   a killed server fails its {num_lost} of {len(streams)} streams, and no others")
