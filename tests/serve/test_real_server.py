"""The whole thing: server process, engine process, embedded model, real clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from openspec.engine.processes.replica import STATS_MAX_AGE_S
from tests.serve.real_server import TIMED, RealServer, import_cpu_s, real_server, resident_bytes
from tests.serve.sse import parse_events, stream
from tests.serve.waiting import wait_until

MAX_READY_COST = 6.0
"""In imports of the front process, of which both processes take 4."""
MAX_READY_S = 60.0
"""3 on an idle machine."""
MAX_IDLE_BYTES = 700e6
"""With a CUDA build of torch, which takes 100 MB more than a CPU build."""
REPEAT = "one two three four five six seven eight nine ten. " * 6


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    # Whether drafts pay depends on the machine's pace, and that there are drafts is tested here.
    arguments = ("--kv-cache-memory", "128MiB", "--no-adaptive-speculation")
    with real_server(*arguments) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_ready_in_time_and_small() -> None:
    with real_server("--kv-cache-memory", "128MiB", **TIMED) as server:
        assert server.seconds_to_ready < MAX_READY_S
        assert server.cpu_s_to_ready < MAX_READY_COST * import_cpu_s()
        used = resident_bytes(server.process.pid) + resident_bytes(server.engine_pid)
        assert used < MAX_IDLE_BYTES


def test_chat_with_speculation_statistics(real: RealServer) -> None:
    answer = real.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}],
        max_tokens=64,
        temperature=0,
    )
    message = answer.choices[0].message
    assert (message.content or "") + (message.model_extra["reasoning_content"] or "")
    stats = answer.model_extra["metrics"]["speculative_decoding"]
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"] == stats["num_drafts"]
    assert len(stats["acceptance_histogram"]) == len(stats["num_accepted_tokens_per_pos"]) + 1
    assert 0 < stats["num_steps"] <= answer.usage.completion_tokens


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}])
def test_speculation_changes_nothing_but_speed(real: RealServer, sampling: dict) -> None:
    texts = []
    for speculative in ({"enabled": False}, {"method": "ngram"}, {"num_speculative_tokens": 1}):
        body = {
            "prompt": [REPEAT, "def add(a, b):"],
            "max_tokens": 60,
            "logprobs": 2,
            "speculative": speculative,
            **sampling,
        }
        answer = real.client.post("/v1/completions", json=body).json()
        texts.append(answer["choices"])
        drafts = answer["metrics"]["speculative_decoding"]["num_drafts"]
        assert (drafts == 0) == (speculative.get("enabled") is False)
    assert texts[0] == texts[1] == texts[2]


def test_stop_string_within_an_accepted_run(real: RealServer) -> None:
    body = {"prompt": REPEAT, "max_tokens": 100, "temperature": 0}
    free = real.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = free[40:46]
    cut = real.client.post("/v1/completions", json={**body, "stop": stop}).json()["choices"][0]
    assert cut["text"] == free[: free.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    chunks = stream(real.client, "/v1/completions", {**body, "stop": stop})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut["text"]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_steps"] > 0


def test_loglikelihood_as_lm_eval_asks_for_it(real: RealServer) -> None:
    client = real.client
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"]

    def ids(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return client.post("/tokenize", json=body).json()["tokens"]

    context = ids("Question: What is 2 + 2?\nAnswer:")
    body = {"prompt": context, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    greedy = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    other = ids(" zebra purple")
    answer = client.post(
        "/v1/completions",
        json={
            "prompt": [context + greedy, context + other],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
        },
    ).json()
    for choice, continuation, is_greedy in zip(
        answer["choices"], (greedy, other), (True, False), strict=True
    ):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(values) == len(continuation)
        equal = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
        assert all(equal) == is_greedy
        assert all(value <= 0 for value in values)


def test_generated_logprobs_are_floats_of_their_own_candidates(real: RealServer) -> None:
    body = {"prompt": REPEAT, "max_tokens": 30, "temperature": 0, "logprobs": 3}
    logprobs = real.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 3


@pytest.mark.parametrize("chat", [False, True])
def test_stream_as_vllm_bench_reads_it(real: RealServer, chat: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict = {
        "model": "tiny",
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": REPEAT}]}]
        body["max_completion_tokens"] = 40
    else:
        body |= {"prompt": REPEAT, "max_tokens": 40, "logprobs": None}
    buffer, text, usage, num_chunks = "", "", None, 0
    with real.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        for piece in response.iter_text():
            buffer += piece
            while "\n\n" in buffer:
                message, buffer = buffer.split("\n\n", 1)
                if message.startswith(":") or message == "data: [DONE]":
                    continue
                data = json.loads(message.removeprefix("data: "))
                if choices := data.get("choices"):
                    if chat:
                        delta = choices[0]["delta"]
                        content = delta.get("content") or delta.get("reasoning")
                    else:
                        content = choices[0].get("text")
                    num_chunks += bool(content)
                    text += content or ""
                elif data.get("usage"):
                    usage = data["usage"]
    assert usage["completion_tokens"] == 40 and text
    assert 0 < num_chunks <= 40


def test_echo_offsets_point_into_a_prompt_that_the_tokenizer_composes(real: RealServer) -> None:
    body = {"prompt": "e\u0301e\u0301 hello", "max_tokens": 2, "temperature": 0, "echo": True}
    plain = real.client.post("/v1/completions", json=body).json()["choices"][0]
    assert plain["text"].startswith(str(body["prompt"]))
    choice = real.client.post("/v1/completions", json={**body, "logprobs": 0}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("\u00e9\u00e9 hello")
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_prefix_cache_shows_in_the_usage(real: RealServer) -> None:
    body = {"prompt": "a cache test. " + REPEAT, "max_tokens": 1, "cache_salt": "x"}
    first = real.client.post("/v1/completions", json=body).json()
    second = real.client.post("/v1/completions", json=body).json()
    other = real.client.post("/v1/completions", json={**body, "cache_salt": "y"}).json()
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, other)]
    assert cached[0] == cached[2] == 0 < cached[1]
    real.client.post("/flush_cache")
    third = real.client.post("/v1/completions", json=body).json()
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_every_form_of_a_chat_has_the_same_text(real: RealServer) -> None:
    text = "Tom has 3 apples and buys 4 more. How many?"
    common = {"temperature": 0, "cache_salt": "forms"}
    messages = [{"role": "user", "content": text}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 48},
        "/v1/responses": {"input": text, "max_output_tokens": 48},
        "/v1/messages": {"messages": messages, "max_tokens": 48},
    }
    chat, response, message = (
        real.client.post(path, json={**body, **common}).json() for path, body in bodies.items()
    )
    first = chat["choices"][0]["message"]
    assert first["content"] or first["reasoning_content"]
    for kind, key, expected in (
        ("text", "text", first["content"]),
        ("thinking", "thinking", first["reasoning_content"]),
    ):
        found = [block[key] for block in message["content"] if block["type"] == kind]
        assert found == ([expected] if expected else [])
    parts = [item["content"][0]["text"] for item in response["output"]]
    assert "".join(parts) == (first["reasoning_content"] or "") + (first["content"] or "")
    usage = message["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_metrics_follow_the_engine(real: RealServer) -> None:
    before = real.metric("vllm:generation_tokens_total")
    real.client.post(
        "/v1/completions",
        json={"prompt": REPEAT, "max_tokens": 32, "temperature": 0, "ignore_eos": True},
    )
    wait_until(lambda: real.metric("vllm:generation_tokens_total") - before >= 32)
    assert real.metric("vllm:generation_tokens_total") - before == 32
    assert real.metric("vllm:spec_decode_num_drafts_total") > 0
    assert real.metric("openspec:num_requests_running") == 0
    info = real.client.get("/server_info").json()
    assert info["internal_states"][0]["avg_spec_accept_length"] > 1


def test_the_metrics_of_prompts_and_answers_count_once(real: RealServer) -> None:
    """Cached prompts, several completions of one, and answers that a stop string ends."""
    names = ("prompt_tokens", "prefix_cache_hits", "generation_tokens")

    def read() -> dict[str, float]:
        time.sleep(1.5 * STATS_MAX_AGE_S)
        totals = {name: real.metric(f"vllm:{name}_total") for name in names}
        return {**totals, "computed": real.metric("openspec:prompt_tokens_total")}

    before = read()
    counts = [(7 * index) % 1000 + 300 for index in range(312)]
    body = {"prompt": counts, "n": 2, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    text = real.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stopped = real.client.post("/v1/completions", json={**body, "stop": text[4:8]}).json()
    after = read()
    new = {name: after[name] - before[name] for name in after}
    assert new["prompt_tokens"] == 4 * 312 == new["computed"] + new["prefix_cache_hits"]
    assert new["computed"] <= 312 + 3 * 16
    assert new["generation_tokens"] == 24 + stopped["usage"]["completion_tokens"]


def test_limits_that_leave_nothing_are_refused(real: RealServer) -> None:
    body = {"prompt": "the cat sat", "allowed_token_ids": [4074], "max_tokens": 5}
    assert real.client.post("/v1/completions", json=body).status_code == 200
    refused = real.client.post("/v1/completions", json={**body, "min_tokens": 3})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


def test_disconnect_frees_the_engine(real: RealServer) -> None:
    body = {"prompt": "a", "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with real.client.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert real.client.get("/load").json() == {"server_load": 1}
    gauges = ("openspec:num_requests_running", "openspec:server_load")
    wait_until(lambda: not any(real.metric(name) for name in gauges))
    assert real.metric("openspec:kv_cache_usage_perc") <= 1


def test_many_streams_at_once(real: RealServer) -> None:
    async def run() -> list[list[dict]]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=real.url, limits=limits, timeout=300) as client:

            async def one(number: int) -> list[dict]:
                body = {
                    "prompt": f"{number} bottles of beer on the wall, {number}",
                    "max_tokens": 24,
                    "seed": number,
                    "stream": True,
                    "ignore_eos": True,
                    "stream_options": {"include_usage": True},
                }
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200
                return parse_events(response.content)

            return await asyncio.gather(*(one(number) for number in range(100)))

    answers = asyncio.run(run())
    assert all(chunks[-1]["usage"]["completion_tokens"] == 24 for chunks in answers)


def test_requests_the_engine_cannot_serve_are_the_clients_fault(real: RealServer) -> None:
    limit = real.client.get("/v1/models").json()["data"][0]["max_model_len"]
    for stream_ in (False, True):
        body = {"prompt": [5] * limit, "stream": stream_}
        response = real.client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_echo_alone(real: RealServer) -> None:
    body = {"prompt": "one two three", "echo": True, "max_tokens": 0}
    for extra in ({}, {"logprobs": 1}):
        answer = real.client.post("/v1/completions", json={**body, **extra}).json()
        assert answer["choices"][0]["text"] == "one two three"
        assert answer["usage"]["completion_tokens"] == 0
