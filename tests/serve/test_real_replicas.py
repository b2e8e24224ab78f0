"""Two engine processes behind one server: the text of one, whatever happens to the other."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from tests.serve.real_server import (
    TIMED,
    RealServer,
    children_of,
    is_running,
    real_server,
    run_to_its_end,
)
from tests.serve.real_server import command as server_command
from tests.serve.sse import parse_events
from tests.serve.waiting import wait_until

FLAGS = ("--kv-cache-memory", "48MiB", "--num-threads", "1", "--max-num-seqs", "16")
BACK_S = 10.0
"""From its end until an engine is back, on a machine that starts a server at once."""
WORDS = "one two three four five six seven the quick brown fox jumps over a lazy dog".split()


@pytest.fixture(scope="module")
def pair() -> Iterator[RealServer]:
    with real_server(*FLAGS, "--replicas", "2", "--shutdown-timeout", "60", **TIMED) as server:
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def single() -> Iterator[RealServer]:
    with real_server(*FLAGS) as server:
        yield server


@pytest.fixture
def num_streams(request: pytest.FixtureRequest) -> int:
    """Of a load. With `--full` as many as two engines take at once."""
    return 32 if request.config.getoption("--full") else 16


def engines(server: RealServer) -> list[dict]:
    return server.client.get("/server_info").json()["engines"]


def pids(server: RealServer) -> list[int]:
    """Of the engines, in order."""
    return [one["pid"] for one in engines(server)]


def standbys(server: RealServer) -> list[int]:
    """Processes that wait to become engines."""
    children = children_of(server.process.pid, "openspec.engine.processes.process")
    return [pid for pid in children if pid not in pids(server)]


def mixed_request(number: int) -> tuple[str, dict]:
    draw = random.Random(number)
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 60)))
    body: dict = {"max_tokens": draw.randint(1, 60), "seed": number, "return_token_ids": True}
    body["temperature"] = draw.choice([0.0, 0.0, 0.7, 1.0])
    for name, value in (("top_p", 0.9), ("repetition_penalty", 1.1), ("n", 2), ("logprobs", 2)):
        if draw.random() < 0.2:
            body[name] = value
    if draw.random() < 0.2:
        body["stop"] = ["e"]
    if draw.random() < 0.4:
        if "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": 2}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}
    return "/v1/completions", {
        "prompt": [text, text[::-1]] if draw.random() < 0.2 else text,
        **body,
    }


def choices_of(server: RealServer, numbers: range) -> list[object]:
    def ask(number: int) -> object:
        path, body = mixed_request(number)
        response = server.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, numbers))


def test_the_text_is_that_of_one_server(
    pair: RealServer, single: RealServer, request: pytest.FixtureRequest
) -> None:
    numbers = range(200 if request.config.getoption("--full") else 40)
    assert choices_of(pair, numbers) == choices_of(single, numbers)
    tokens = [one["num_generation_tokens"] for one in engines(pair)]
    assert min(tokens) > 0.2 * sum(tokens), "both have worked"
    assert "engine 0: ready in" in pair.log and "engine 1: ready in" in pair.log
    assert ": 1 CPU threads each" not in pair.log, "they are set"


def conversation(server: RealServer, number: int, num_turns: int) -> int:
    """Cached tokens of all turns."""
    messages = [{"role": "system", "content": " ".join(WORDS * 3)}]
    num_cached = 0
    for turn in range(num_turns):
        question = " ".join(random.Random(100 * number + turn).choices(WORDS, k=30))
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": f"answer {number} {turn}"})
    return num_cached


def test_conversations_keep_their_prefix_hits(pair: RealServer, single: RealServer) -> None:
    def run(server: RealServer) -> int:
        server.client.post("/flush_cache")
        with ThreadPoolExecutor(8) as pool:
            return sum(pool.map(lambda number: conversation(server, number, 6), range(16)))

    two, one = run(pair), run(single)
    assert two >= 0.95 * one > 1000
    hits = [engine["prefix_cache_hits"] for engine in engines(pair)]
    assert min(hits) > 0


def streamed(server: RealServer, number: int, max_tokens: int = 600) -> tuple[str, str]:
    """How a stream ends, and its text."""
    body = {"prompt": f"{number} {WORDS[number % 9]}", "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"seed": number, "stream": True, "temperature": number % 2}
    response = server.client.post("/v1/completions", json=body)
    if response.status_code != 200:
        return str(response.json()["error"]["code"]), ""
    events = parse_events(response.content)
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    if "error" in events[-1]:
        return str(events[-1]["error"]["code"]), text
    return "done", text


def test_a_killed_engine_under_load(pair: RealServer, num_streams: int) -> None:
    with ThreadPoolExecutor(num_streams) as pool:
        expected = list(pool.map(lambda number: streamed(pair, number), range(num_streams)))
        assert {end for end, _ in expected} == {"done"}
        wait_until(lambda: standbys(pair))
        killed, [standby] = pids(pair)[1], standbys(pair)
        results = [pool.submit(streamed, pair, number) for number in range(num_streams)]
        held = "num_running", "num_waiting"
        wait_until(lambda: sum(one[n] for one in engines(pair) for n in held) == num_streams)
        num_before = [one["num_restarts"] for one in engines(pair)]
        num_held = [sum(one[name] for name in held) for one in engines(pair)]
        assert min(num_held) > num_streams / 4
        os.kill(killed, signal.SIGKILL)
        dead_since = time.monotonic()
        assert pair.client.get("/health").status_code == 200
        wait_until(lambda: pids(pair)[1] != killed and engines(pair)[1]["is_alive"])
        seconds = time.monotonic() - dead_since
        ends = [result.result() for result in results]
    failed = [number for number, (end, _) in enumerate(ends) if end != "done"]
    assert len(failed) == num_held[1], "its own, all of them and no others"
    assert {ends[number][0] for number in failed} == {"engine_dead"}
    for number, (end, text) in enumerate(ends):
        assert (
            text == expected[number][1] if end == "done" else expected[number][1].startswith(text)
        )
    assert seconds < BACK_S + pair.seconds_to_ready
    assert [one["num_restarts"] for one in engines(pair)] == [num_before[0], num_before[1] + 1]
    assert pids(pair)[1] == standby and "starting engine 1 again at once" in pair.log
    assert choices_of(pair, range(4)) and not is_running(killed)


def test_a_rolling_restart_under_load(pair: RealServer) -> None:
    before, end = pids(pair), time.monotonic() + 120
    with ThreadPoolExecutor(4) as pool:
        expected = list(pool.map(lambda number: streamed(pair, number, 100), range(4)))

        def ask_until_done(number: int) -> int:
            num_answers = 0
            while "rolling restart: done" not in pair.log:
                assert time.monotonic() < end
                assert streamed(pair, number, 100) == expected[number]
                num_answers += 1
                time.sleep(0.2)
            return num_answers

        os.kill(pair.process.pid, signal.SIGHUP)
        assert min(pool.map(ask_until_done, range(4))) > 0
    assert len(pids(pair)) == 2 and not set(pids(pair)) & set(before)


SCHEMA = {
    "type": "object",
    "properties": {
        "apples": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 30},
    },
    "required": ["apples", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
ASKED: list[dict] = [
    {"response_format": FORMAT},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "response_format": FORMAT},
]


def structured_answer(server: RealServer, number: int) -> tuple[object, ...]:
    """An answer to one of several schemas: checked against it where it was not cut short."""
    asked = ASKED[number % 3]
    question = f"{number} {WORDS[number % len(WORDS)]}: {number} apples and 4 more. How many?"
    body: dict = {"messages": [{"role": "user", "content": question}], "seed": number, **asked}
    body |= {"temperature": number % 2, "max_tokens": 200}
    body["chat_template_kwargs"] = {"enable_thinking": False}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    if choice["finish_reason"] != "length":
        assert calls or "response_format" in asked, "a call is required"
        for text in [one["arguments"] for one in calls] or [message["content"]]:
            jsonschema.validate(json.loads(text), SCHEMA)
    return choice["finish_reason"], message["content"], calls


def structured_answers(server: RealServer, numbers: range) -> list[tuple[object, ...]]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda number: structured_answer(server, number), numbers))


def assert_structured(pair: RealServer, expected: list[tuple[object, ...]]) -> None:
    """Both engines of the pair give the answers."""
    before = [one["num_generation_tokens"] for one in engines(pair)]
    assert structured_answers(pair, range(len(expected))) == expected
    after = [one["num_generation_tokens"] for one in engines(pair)]
    num_tokens = [new - old for new, old in zip(after, before, strict=True)]
    assert min(num_tokens) > 0.1 * sum(num_tokens) > 0, "both have worked"


def test_structured_output_of_engines_that_come_and_go(
    pair: RealServer, single: RealServer
) -> None:
    """Also of one that takes the place of a killed one, and of those of a rolling restart."""
    expected = structured_answers(single, range(24))
    ends = [end for end, *_ in expected]
    assert {"stop", "tool_calls"} <= set(ends) and ends.count("length") <= 0.3 * len(ends)
    assert_structured(pair, expected)
    wait_until(lambda: standbys(pair))
    killed, [standby] = pids(pair)[0], standbys(pair)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pids(pair)[0] == standby and engines(pair)[0]["is_alive"])
    assert_structured(pair, expected)
    before, num_done = pids(pair), pair.log.count("rolling restart: done")
    os.kill(pair.process.pid, signal.SIGHUP)
    wait_until(lambda: pair.log.count("rolling restart: done") > num_done)
    assert not set(before) & set(pids(pair))
    assert_structured(pair, expected)


def num_arrived(server: RealServer) -> float:
    """Requests of one sequence, running or ended."""
    names = "openspec:server_load", "openspec:request_success_total"
    return sum(map(server.metric, names))


def test_drain_loses_nothing(pair: RealServer, num_streams: int) -> None:
    """Ends the server: the last test with it."""
    all_pids, num_before = pids(pair) + standbys(pair), num_arrived(pair)
    with ThreadPoolExecutor(num_streams) as pool:
        results = [pool.submit(streamed, pair, number) for number in range(num_streams)]
        wait_until(lambda: num_arrived(pair) == num_before + num_streams)
        assert pair.stop() == 0
        assert {result.result()[0] for result in results} == {"done"}
    assert not any(is_running(pid) for pid in all_pids)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    flags = ["--replicas", "64", "--device", "cpu", "--kv-cache-memory", "64GiB"]
    flags += ["--max-num-seqs", "16384"]
    status, errors, _ = run_to_its_end(server_command(flags))
    last = errors.strip().splitlines()[-1]
    assert status == 1 and last.startswith("openspec.serve: engine 0: not enough memory: weights ")
    assert last.endswith("or run fewer --replicas") and "KV 64.00 GiB" in last


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--replicas", "2", "--min-replicas", "3", "--device", "cpu"], "min_replicas (3) is more"),
        (["--devices", "0"], "--device cuda: "),
    ],
)
def test_wrong_settings(flags: list[str], says: str) -> None:
    if flags == ["--devices", "0"] and os.path.exists("/dev/nvidia0"):
        pytest.skip("there is such a device")
    status, errors, _ = run_to_its_end(server_command(flags))
    last = errors.strip().splitlines()[-1]
    assert status == 1 and last.startswith("openspec.serve: ") and says in last, errors
    assert "Traceback" not in errors
