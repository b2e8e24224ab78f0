"""Log-probabilities in every form, as evaluation harnesses read them."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter

import pytest

from openspec.serve.shapes.logprobs import completion_logprobs, finite, token_name
from tests.serve.conftest import RunningServer
from tests.serve.sse import stream

PATH = "/v1/completions"


def test_loglikelihood_as_lm_eval_asks_for_it(server: RunningServer) -> None:
    contexts = [server.ids("one two three"), server.ids("the quick")]
    continuations = [server.ids(" four five"), server.ids(" brown fox jumps")]
    answer = server.complete(
        prompt=[a + b for a, b in zip(contexts, continuations, strict=True)],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        echo=True,
        seed=1234,
    )
    for choice, context, continuation in zip(
        sorted(answer["choices"], key=lambda choice: choice["index"]),
        contexts,
        continuations,
        strict=True,
    ):
        logprobs = choice["logprobs"]
        length = len(context)
        values = logprobs["token_logprobs"][length:-1]
        tops = logprobs["top_logprobs"][length:-1]
        assert len(values) == len(tops) == len(continuation)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        # The scripted engine finds even ids most likely: "is greedy" by float equality.
        is_greedy = [value == max(top.values()) for value, top in zip(values, tops, strict=True)]
        assert is_greedy == [token % 2 == 0 for token in continuation]
        for token, value, top in zip(logprobs["tokens"][length:-1], values, tops, strict=True):
            assert top[token] == value


def test_echo_offsets_point_into_the_text(server: RunningServer) -> None:
    answer = server.complete(prompt="the naïve fox", echo=True, logprobs=2, max_tokens=8)
    choice = answer["choices"][0]
    assert choice["text"].startswith("the naïve fox")
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_without_generating(server: RunningServer, streamed: bool) -> None:
    body = {"prompt": server.ids("one two"), "echo": True, "max_tokens": 0, "logprobs": 1}
    if streamed:
        chunks = stream(server.client, PATH, body)
        assert len(chunks) == 1
        choice = chunks[0]["choices"][0]
    else:
        answer = server.complete(**body)
        assert answer["usage"]["completion_tokens"] == 0
        choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "length")
    assert len(choice["logprobs"]["tokens"]) == len(body["prompt"])


def test_echo_in_a_stream(server: RunningServer) -> None:
    body = {"prompt": ["one", "two"], "echo": True, "max_tokens": 9, "logprobs": 1}
    whole = server.complete(**body)["choices"]
    texts, tokens = ["", ""], [[], []]
    for chunk in stream(server.client, PATH, body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == [choice["text"] for choice in whole]
    assert tokens == [choice["logprobs"]["tokens"] for choice in whole]


def test_echo_with_n_gives_all_the_same_prompt(server: RunningServer) -> None:
    answer = server.complete(prompt="one two", n=2, echo=True, logprobs=1, max_tokens=2)
    first, second = (choice["logprobs"]["token_logprobs"] for choice in answer["choices"])
    num_prompt = len(server.ids("one two"))
    assert first[:num_prompt] == second[:num_prompt]
    wanted = [request.sampling.prompt_logprobs for request in server.engine.requests]
    assert wanted == [1, None]
    error = server.error(PATH, prompt="a", n=2, echo=True, logprobs=1, stream=True)
    assert error["param"] == "n"


def test_zero_logprobs_still_hold_the_token(server: RunningServer) -> None:
    logprobs = server.complete(prompt="a", logprobs=0, max_tokens=5)["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top == {token: value}


def test_prompt_logprobs(server: RunningServer) -> None:
    ids = server.ids("one two three")
    answer = server.complete(prompt=ids, prompt_logprobs=2, max_tokens=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert {"logprob", "rank", "decoded_token"} == set(entry[str(token_id)])
        assert 2 <= len(entry) <= 3
    chunks = stream(server.client, PATH, {"prompt": ids, "prompt_logprobs": 2, "max_tokens": 3})
    assert chunks[0]["choices"][0]["prompt_logprobs"] == entries
    assert "prompt_logprobs" not in chunks[-1]["choices"][0]


@pytest.mark.parametrize("streamed", [False, True])
def test_long_prompts_are_described_in_a_thread(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    tokenizer, threads = server.context.tokenizer, Counter()

    def token_text(token_id: int) -> str:
        threads[threading.current_thread().name.startswith("openspec-text")] += 1
        return type(tokenizer).token_text(tokenizer, token_id)

    monkeypatch.setattr(tokenizer, "token_text", token_text)
    body = {"prompt": [5] * 1000, "max_tokens": 1, "echo": True, "logprobs": 2}
    if streamed:
        stream(server.client, PATH, body)
    else:
        server.complete(**body)
    assert threads[True] >= 999 * 2 and threads[False] <= 3


def test_tokens_as_ids(server: RunningServer) -> None:
    logprobs = server.complete(
        prompt="a", logprobs=1, max_tokens=5, return_tokens_as_token_ids=True, return_token_ids=True
    )["choices"][0]
    ids = [f"token_id:{token_id}" for token_id in logprobs["token_ids"]]
    assert logprobs["logprobs"]["tokens"] == ids


def test_chat_logprobs(server: RunningServer) -> None:
    answer = server.chat(logprobs=True, top_logprobs=3, max_tokens=6, return_token_ids=True)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6 == len(choice["token_ids"])
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        named = {tuple(top["bytes"]): top["logprob"] for top in entry["top_logprobs"]}
        assert named[tuple(entry["bytes"])] == entry["logprob"]
    none = server.chat(logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], []]
    assert server.chat(max_tokens=2)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stop", [None, ["or so"]], ids=str)
def test_a_stream_with_logprobs_goes_token_by_token(
    server: RunningServer, stop: list[str] | None
) -> None:
    """Clients take a chunk's text from its logprobs where it has several."""
    server.engine.script = lambda _: server.ids("It is seven or so, über.<|im_end|>")
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, "stop": stop}
    whole = server.chat(**body, logprobs=True)["choices"][0]
    chunks = stream(server.client, "/v1/chat/completions", {**body, "logprobs": True})
    choices = [choice for chunk in chunks for choice in chunk["choices"]][1:]
    assert [choice["token_ids"] for choice in choices] == [[one] for one in whole["token_ids"]]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    contents = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(contents) == whole["message"]["content"]
    if stop is None:
        assert choices[-1]["delta"] == {} and entries[-1]["token"] == "<|im_end|>"
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


def test_token_names_are_unique() -> None:
    assert token_name(5, b"abc", as_id=False) == "abc"
    assert token_name(5, b"\xe2\x80", as_id=False) == "bytes:\\xe2\\x80"
    assert token_name(5, b"", as_id=False) == "token_id:5"
    assert token_name(5, b"abc", as_id=True) == "token_id:5"
    assert finite(-math.inf) == -9999.0 and finite(-1.25) == -1.25


def test_candidates_with_the_same_text_do_not_hide_each_other(server: RunningServer) -> None:
    from openspec.text.logprobs import Logprob

    tokenizer = server.context.tokenizer
    token = server.ids(" three")[0]
    twin = Logprob(-0.25, 1, " three", b" three")
    position = {token: Logprob(-0.5, 2, " three", b" three"), token + 1: twin}
    result = completion_logprobs(tokenizer, [token], lambda: [position], [0], 2, as_ids=False)
    tops = json.loads(bytes(result.top_logprobs))
    assert tops == [{" three": -0.5, f"token_id:{token + 1}": -0.25}]
