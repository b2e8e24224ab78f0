"""`"speculative": {"detailed": true}`: the same steps in every kind of answer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from openspec import LLM, SamplingParams
from openspec.engine.processes.replica import STATS_MAX_AGE_S
from openspec.messages import SpeculativeOptions
from tests.serve.conftest import RunningServer
from tests.serve.real_server import RealServer, real_server
from tests.serve.sse import stream

DETAILED = {"detailed": True}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Repeat: one two three four five six seven eight nine."}]


def steps_of(chunks: list[dict], index: int = 0) -> list[dict]:
    return [
        step
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
        for step in choice.get("steps", ())
    ]


def joined(steps: list[dict], field: str) -> list:
    return [value for step in steps for value in step[field]]


def without_times(steps: list[dict]) -> list[dict]:
    return [{k: v for k, v in step.items() if not k.endswith("time_ms")} for step in steps]


def test_completions(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 50, "speculative": DETAILED, "return_token_ids": True}
    choice = server.complete(**body)["choices"][0]
    assert joined(choice["steps"], "token_ids") == choice["token_ids"]
    assert "".join(joined(choice["steps"], "tokens")) == choice["text"]
    for step in choice["steps"]:
        assert len(step["tokens"]) == len(step["token_ids"])
        tokenizer = server.context.tokenizer
        assert step["draft_tokens"] == [tokenizer.token_text(t) for t in step["draft_token_ids"]]
        assert "draft_scores" not in step and "wait_time_ms" not in step
        assert step["accepted"] == list(range(len(step["accepted"])))
    assert any(step["accepted"] for step in choice["steps"])
    plain = server.complete(**{**body, "speculative": None})["choices"][0]
    assert "steps" not in plain and plain["text"] == choice["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streams_of_several_choices(server: RunningServer, path: str) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": QUESTION}
    body = {**prompt, "n": 3, "max_tokens": 40, "speculative": DETAILED, "return_token_ids": True}
    chunks = stream(server.client, path, body)
    for index in range(3):
        ids = [
            token
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == index
            for token in choice.get("token_ids", ())
        ]
        assert joined(steps_of(chunks, index), "token_ids") == ids and len(ids) == 40


def test_a_stop_string_cuts_the_last_step(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 200, "stop": ["lazy"], "return_token_ids": True}
    for _ in range(8):  # a step ends at the stop string by chance
        choice = server.complete(**body, speculative=DETAILED)["choices"][0]
        assert choice["stop_reason"] == "lazy"
        assert joined(choice["steps"], "token_ids") == choice["token_ids"]
        last = choice["steps"][-1]
        assert len(last["token_ids"]) > 0 and len(last["accepted"]) <= len(last["token_ids"])
        assert "".join(joined(choice["steps"], "tokens")).startswith(choice["text"])


@pytest.fixture(scope="module")
def real() -> Iterator[RealServer]:
    arguments = ("--kv-cache-memory", "64MiB", "--no-adaptive-speculation", "--method", "eagle3")
    # What earlier requests were like has a say in whether copies are taken.
    options = ("--method-option", "draft_top_k=3", "--no-copied-drafts")
    with real_server(*arguments, *options) as server:
        yield server


def test_forced_drafts(real: RealServer) -> None:
    """What a grammar leaves no choice of stands first among the drafts and is accepted."""
    sentence = "The answer to the question is forty-two."
    body = {
        "prompt": "Question: what is six times seven?\nAnswer:",
        "max_tokens": 60,
        "structured_outputs": {"choice": [sentence]},
        "speculative": DETAILED,
    }
    choice = real.client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["text"] == sentence
    steps = choice["steps"]
    assert all(0 <= step["num_forced_tokens"] <= len(step["draft_tokens"]) for step in steps)
    assert sum(step["num_forced_tokens"] for step in steps) >= 4
    for step in steps:
        forced = "".join(step["draft_tokens"][: step["num_forced_tokens"]])
        forced = forced.split("<|")[0]  # the end may be forced
        assert forced in sentence
    free = {**body, "structured_outputs": None}
    steps = real.client.post(COMPLETIONS, json=free).json()["choices"][0]["steps"]
    assert not any(step["num_forced_tokens"] for step in steps)
    time.sleep(1.5 * STATS_MAX_AGE_S)
    counted = real.client.get("/server_info").json()["spec_decode"]
    assert 4 <= counted["num_accepted_forced_tokens"] <= counted["num_forced_tokens"]
    line = f"num_forced_tokens_total.* {counted['num_forced_tokens']}.0$"
    assert re.search(line, real.client.get("/metrics").text, re.M)


def test_the_engine_adds_up_the_times(real: RealServer) -> None:
    """The counters rise by what the steps themselves report."""

    def read() -> dict[str, float]:
        time.sleep(1.5 * STATS_MAX_AGE_S)
        told = real.client.get("/server_info").json()
        assert told["engines"][0]["step_seconds"] == told["step_seconds"]
        pattern = r'^openspec:engine_step_seconds_total\{.*part="(\w+)".*\} (\S+)$'
        shown = re.findall(pattern, real.client.get("/metrics").text, re.M)
        assert {part: float(value) for part, value in shown} == told["step_seconds"]
        return told["step_seconds"]

    before = read()
    body = {"prompt": "def total(values):", "max_tokens": 60, "speculative": DETAILED}
    steps = real.client.post(COMPLETIONS, json=body).json()["choices"][0]["steps"]
    after = read()
    new = {part: 1e3 * (after[part] - before[part]) for part in after}
    whole, device, draft = (
        sum(step[name] for step in steps) for name in ("time_ms", "device_time_ms", "draft_time_ms")
    )
    rounding = 0.002 * len(steps)
    assert new["draft"] == pytest.approx(draft, abs=rounding) and draft > 0
    assert new["verify"] == pytest.approx(device - draft, abs=rounding) and new["verify"] > 0
    assert new["draft_and_verify"] == 0  # on CPU each step is timed
    assert sum(new.values()) == pytest.approx(whole, abs=rounding)


def test_statistics_end_where_the_text_does(real: RealServer) -> None:
    """Of the step in which a stop string ends the answer, its tokens up to there count."""
    counting = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4,", "max_tokens": 60}
    body = {**counting, "temperature": 0, "speculative": DETAILED}
    text = real.client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    has_cut = False
    for end in range(2, 20, 2):
        stop = text[end : end + 3]
        answer = real.client.post(COMPLETIONS, json={**body, "stop": stop}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        steps = answer["choices"][0]["steps"]
        stats = answer["metrics"]["speculative_decoding"]
        accepted = [len(step["accepted"]) for step in steps]
        assert stats["num_accepted_tokens_per_step"] == accepted
        assert stats["num_accepted_tokens"] == sum(accepted)
        assert stats["num_steps"] == len(steps)
        drafted = [step for step in steps if step["draft_tokens"]]
        num_tokens = sum(len(step["token_ids"]) for step in drafted)
        assert stats["mean_acceptance_length"] == pytest.approx(num_tokens / len(drafted))
        has_cut = has_cut or len(steps[-1]["accepted"]) == len(steps[-1]["token_ids"])
        chunks = stream(real.client, COMPLETIONS, {**body, "stop": stop})
        streamed = next(chunk["metrics"] for chunk in reversed(chunks) if "metrics" in chunk)
        assert streamed["speculative_decoding"] == stats
    assert has_cut, "a stop string within the accepted drafts"


def test_the_same_everywhere(real: RealServer) -> None:
    """Trees with scores: stream, whole answer and LLM agree but for the times."""
    body = {"messages": QUESTION, "max_tokens": 40, "temperature": 0, "speculative": DETAILED}
    streamed = steps_of(stream(real.client, CHAT, body))
    response = real.client.post(CHAT, json=body).json()
    whole = response["choices"][0]["steps"]
    # The first step has more rows where nothing of the prompt was cached.
    streamed[0]["num_rows"] = whole[0]["num_rows"] = 0
    assert without_times(whole) == without_times(streamed)
    assert any(step["draft_parents"] != sorted(set(step["draft_parents"])) for step in whole)
    assert all(len(step["draft_scores"]) == len(step["draft_tokens"]) for step in whole[1:])
    for step in whole:
        assert 0 <= step["draft_time_ms"] <= step["device_time_ms"] <= step["time_ms"]
        assert step["num_sequences"] == 1
    usage = response["usage"]["completion_tokens"]
    assert len(joined(whole, "token_ids")) == usage
    stats = response["metrics"]["speculative_decoding"]
    assert [len(step["accepted"]) for step in whole] == stats["num_accepted_tokens_per_step"]
    off = real.client.post(CHAT, json={**body, "speculative": {}}).json()["choices"][0]
    assert off["message"] == response["choices"][0]["message"]

    settings = {"kv_cache_memory": "64MiB", "adaptive_speculation": False, "method": "eagle3"}
    with LLM(**settings, method_options={"draft_top_k": 3}) as llm:
        output = llm.chat(
            QUESTION,
            SamplingParams(max_tokens=40, temperature=0.0),
            use_tqdm=False,
            speculative=SpeculativeOptions(detailed=True),
        )[0].outputs[0]
    assert output.steps is not None
    for field in ("token_ids", "draft_token_ids", "draft_parents", "accepted"):
        assert [getattr(step, field) for step in output.steps] == [step[field] for step in whole]
    assert output.token_texts == joined(whole, "tokens")
