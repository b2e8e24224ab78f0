"""/v1/completions against the scripted engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openspec.text.tokenizer import Tokenizer
from tests.serve.conftest import MODEL_NAME, RunningServer, run_fake_server
from tests.serve.fake_engine import CYCLE
from tests.serve.fake_model import write_fake_model
from tests.serve.sse import stream

PATH = "/v1/completions"


def test_answer_has_the_openai_shape(server: RunningServer) -> None:
    answer = server.openai.completions.create(model=MODEL_NAME, prompt="one two", max_tokens=12)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.model == MODEL_NAME
    choice = answer.choices[0]
    assert choice.text == server.context.tokenizer.decode(server.ids(CYCLE)[:12])
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(server.ids("one two"))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "id lists"])
def test_prompt_forms(server: RunningServer, kind: str) -> None:
    ids = server.ids("one two")
    prompt = {
        "text": "one two",
        "texts": ["one two", "three"],
        "ids": ids,
        "id lists": [ids, server.ids("three")],
    }[kind]
    answer = server.complete(prompt=prompt, max_tokens=3)
    expected = [ids, server.ids("three")] if kind in ("texts", "id lists") else [ids]
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 3 * len(expected)


def test_n_orders_choices_by_prompt_and_seeds_them_apart(server: RunningServer) -> None:
    answer = server.complete(prompt=["one", "two"], n=3, seed=7, max_tokens=2, best_of=3)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [request.sampling.seed for request in server.engine.requests] == [7, 8, 9] * 2
    prompts = [request.prompt_token_ids for request in server.engine.requests]
    assert prompts == [server.ids("one")] * 3 + [server.ids("two")] * 3


def test_stop_string_within_an_accepted_run(server: RunningServer) -> None:
    for stop in ("three", ["three"], ["zzz", "thre"]):
        answer = server.complete(prompt="a", max_tokens=60, stop=stop, return_token_ids=True)
        choice = answer["choices"][0]
        assert choice["text"] == "one two "
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (stop[-1] if isinstance(stop, list) else stop)
        # No token beyond the one that completed the stop string.
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
        text = server.context.tokenizer.decode(choice["token_ids"])
        assert "thre" in text and "thre" not in server.context.tokenizer.decode(
            choice["token_ids"][:-1]
        )
    kept = server.complete(prompt="a", max_tokens=60, stop="three", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "one two three"


def test_stop_token(server: RunningServer) -> None:
    three = server.ids(" three")
    assert len(three) == 1
    answer = server.complete(prompt="a", max_tokens=60, stop_token_ids=three)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["stop_reason"] == three[0]


def test_end_of_sequence_is_the_models_unless_ignored(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids("one two<|im_end|>three")
    answer = server.complete(prompt="a", max_tokens=60)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    assert choice["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == len(server.ids("one two")) + 1
    stops = server.engine.requests[-1].sampling.stop_token_ids
    assert set(stops) == set(server.context.model.eos_token_ids)
    ignored = server.complete(prompt="a", max_tokens=20, ignore_eos=True)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert "three" in ignored["choices"][0]["text"]
    shown = server.complete(prompt="a", max_tokens=20, ignore_eos=True, skip_special_tokens=False)
    assert "<|im_end|>" in shown["choices"][0]["text"]


def test_the_tokenizers_end_token_ends_too(tmp_path: Path) -> None:
    """As in models tuned for chats that kept the base model's generation_config.json."""
    model = write_fake_model(tmp_path / "model")
    base = Tokenizer.from_folder(model).special_tokens["<|endoftext|>"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": base}))
    with run_fake_server(model) as server:
        server.engine.script = lambda _: server.ids("one two<|im_end|>three")
        choice = server.complete(prompt="a", max_tokens=60)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
        assert choice["stop_reason"] is None


def test_null_means_default(server: RunningServer) -> None:
    fields = (
        "stop logprobs echo n best_of seed temperature top_p top_k min_p presence_penalty "
        "frequency_penalty repetition_penalty logit_bias stop_token_ids ignore_eos min_tokens "
        "stream stream_options suffix user prompt_logprobs max_tokens model allowed_token_ids "
        "speculative guided_json bad_words"
    )
    answer = server.complete(prompt="a", **dict.fromkeys(fields.split()))
    assert answer["usage"]["completion_tokens"] == 16


def test_unknown_fields_are_ignored(server: RunningServer) -> None:
    server.complete(
        prompt="a",
        max_tokens=1,
        no_such_field={"deep": [1, 2]},
        return_hidden_states=False,
        no_stop_trim=False,
        use_beam_search=False,
        spaces_between_special_tokens=True,
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("guided_json", {"not": {}}),
        ("prompt_embeds", "AAAA"),
        ("length_penalty", 0.5),
        ("logits_processors", ["x"]),
        ("response_format", {"type": "xml"}),
        ("max_completion_tokens", 3),
        ("tools", [{"type": "function", "function": {"name": "x"}}]),
        ("no_repeat_ngram_size", 2),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 1.5),
        ("n", "1"),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("max_tokens", 1.5),
        ("logprobs", 21),
        ("logprobs", True),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": 2, "01": 1}),
        ("logit_bias", [1]),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("stop", "x" * 1025),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [*range(1025)]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", "it"),
        ("min_tokens", 17),
        ("prompt_logprobs", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**31),
        ("speculative", {"method": "eagle9"}),
        ("speculative", {"num_speculative_tokens": -1}),
        ("speculative", True),
    ],
)
def test_refusals_name_the_field(server: RunningServer, field: str, value: object) -> None:
    error = server.error(PATH, prompt="a", **{field: value})
    assert error["param"] == field, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        ["a", ""],
        ["a", 1],
        [[1], "a"],
        {"a": 1},
        5,
        [-1],
        [2**70],
        [1.5],
        [True],
    ],
)
def test_bad_prompts(server: RunningServer, prompt: object) -> None:
    assert server.error(PATH, prompt=prompt)["param"] == "prompt"


def test_prompt_ids_without_a_token_are_refused(server: RunningServer) -> None:
    num_tokens = server.context.tokenizer.num_tokens
    assert num_tokens < server.engine.info.vocab_size
    assert "outside" in server.error(PATH, prompt=[num_tokens])["message"]


def test_context_limit(server: RunningServer) -> None:
    limit = server.engine.info.max_model_len
    error = server.error(PATH, prompt=[5] * limit)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    # By which LiteLLM and others know what is wrong.
    assert error["message"].startswith(f"This model's maximum context length is {limit} tokens.")
    answer = server.complete(prompt=[5] * (limit - 3), max_tokens=100)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    cut = server.complete(prompt=[5] * (limit + 50), max_tokens=1, truncate_prompt_tokens=10)
    assert cut["usage"]["prompt_tokens"] == 10


def test_too_many_sequences(server: RunningServer) -> None:
    assert server.error(PATH, prompt=["a"] * 20, n=100)["param"] == "n"
    assert server.error(PATH, prompt=["a"] * 1025)["param"] == "prompt"


def test_unknown_model(server: RunningServer) -> None:
    error = server.error(PATH, status=404, prompt="a", model="gpt-17")
    assert error["code"] == "model_not_found"


def test_stream_equals_the_whole_answer(server: RunningServer) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 25, "logprobs": 2, "echo": False}
    whole = server.complete(**body)
    texts, finish, logprobs = [""] * 4, [None] * 4, [{} for _ in range(4)]
    for chunk in stream(server.client, PATH, body):
        assert chunk["object"] == "text_completion" and "usage" not in chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            assert finish[index] is None, "a chunk after the end"
            texts[index] += choice["text"]
            finish[index] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                logprobs[index].setdefault(name, []).extend(values)
    for index, choice in enumerate(whole["choices"]):
        assert texts[index] == choice["text"]
        assert finish[index] == choice["finish_reason"]
        assert logprobs[index] == choice["logprobs"]


def test_usage_in_streams(server: RunningServer) -> None:
    body = {"prompt": "one two", "max_tokens": 20}
    chunks = stream(server.client, PATH, {**body, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 20
    assert last["metrics"]["speculative_decoding"]["num_drafts"] > 0
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server.client, PATH, {**body, "stream_options": both})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 20 and counts[0] < 20
    chunks = stream(server.client, PATH, body)
    assert "metrics" in chunks[-1] and not any("metrics" in chunk for chunk in chunks[:-1])


def test_one_chunk_carries_all_tokens_of_a_step(server: RunningServer) -> None:
    chunks = stream(
        server.client, PATH, {"prompt": "a", "max_tokens": 40, "return_token_ids": True}
    )
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert sum(sizes) == 40 and max(sizes) > 1
    assert chunks[0]["choices"][0]["prompt_token_ids"] == server.ids("a")
    assert "prompt_token_ids" not in chunks[1]["choices"][0]


def test_stop_string_is_not_streamed(server: RunningServer) -> None:
    chunks = stream(server.client, PATH, {"prompt": "a", "max_tokens": 60, "stop": ["three fo"]})
    assert "".join(c["choices"][0]["text"] for c in chunks) == "one two "
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "three fo")
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_steps"] > 0


def test_characters_are_never_cut(server: RunningServer) -> None:
    text = "naïve «quotes» 😀 日本語"
    server.engine.script = lambda _: text
    num = len(server.ids(text))
    body = {"prompt": "a", "max_tokens": num}
    whole = server.complete(**body)["choices"][0]["text"]
    pieces = [c["choices"][0]["text"] for c in stream(server.client, PATH, body)]
    assert whole == text == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_no_event_has_more_lines_than_one(server: RunningServer) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n\u2014é"
    server.engine.script = lambda _: text + "<|im_end|>"
    body = {"prompt": "a", "max_tokens": 50, "stream": True}
    # As httpx cuts lines, and who builds on it.
    with server.client.stream("POST", PATH, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_request_error_before_a_stream_is_no_stream(server: RunningServer) -> None:
    response = server.client.post(PATH, json={"prompt": "", "stream": True})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


def test_sampling_reaches_the_engine(server: RunningServer) -> None:
    server.complete(
        prompt="a",
        max_tokens=9,
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"3": -100, "4": 1.5},
        allowed_token_ids=[1, 2, 1, 3, 4, 4],
        bad_words=["it"],
        min_tokens=2,
        stop_token_ids=[9],
        logprobs=0,
        logprobs_mode="processed_logprobs",
        priority=-3,
        cache_salt="salt",
        seed=-5,
    )
    request = server.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.5,
        5,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.2
    assert sampling.logit_bias == {3: -100.0, 4: 1.5}
    assert sampling.allowed_token_ids == [1, 2, 3, 4]
    assert server.ids("it") in sampling.bad_word_ids
    assert sampling.stop_token_ids[0] == 9
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, -5)
    assert (sampling.logprobs, sampling.logprobs_mode) == (0, "processed")
    assert (request.priority, request.cache_salt) == (-3, "salt")


def test_models_own_sampling_defaults(server: RunningServer, start_server) -> None:
    server.complete(prompt="a")
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    server.complete(prompt="a", temperature=0)
    assert server.engine.requests[-1].sampling.temperature == 0
    neutral = start_server(generation_config="openspec")
    neutral.complete(prompt="a")
    sampling = neutral.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("field", "enabled", "num"),
    [
        (None, True, None),
        ({}, True, None),
        ({"enabled": False}, False, None),
        ({"method": "none"}, False, None),
        ({"method": "ngram", "num_speculative_tokens": 2}, True, 2),
        ({"num_speculative_tokens": 0}, False, None),
        ({"enabled": True, "num_speculative_tokens": 1000}, True, 1000),
    ],
)
def test_a_requests_say_in_speculation(
    server: RunningServer, field: object, enabled: bool, num: int | None
) -> None:
    answer = server.complete(prompt="a", max_tokens=30, speculative=field)
    speculative = server.engine.requests[-1].speculative
    assert (speculative.enabled, speculative.num_speculative_tokens) == (enabled, num)
    stats = answer["metrics"]["speculative_decoding"]
    assert (stats["num_drafts"] > 0) == enabled


def test_speculation_statistics(server: RunningServer) -> None:
    answer = server.complete(prompt=["a", "b"], max_tokens=100)
    stats = answer["metrics"]["speculative_decoding"]
    assert stats["method"] == "ngram"
    assert stats["num_draft_tokens"] == 4 * stats["num_drafts"]
    assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"]
    assert stats["num_drafts_per_pos"] == [stats["num_drafts"]] * 4
    histogram = stats["acceptance_histogram"]
    assert len(histogram) == 5 and sum(histogram) == stats["num_spec_steps"] == stats["num_drafts"]
    assert sum(k * n for k, n in enumerate(histogram)) == stats["num_accepted_tokens"]
    expected = 1 + stats["num_accepted_tokens"] / stats["num_drafts"]
    assert stats["mean_acceptance_length"] == pytest.approx(expected)
    assert answer["metrics"]["time_to_first_token_ms"] > 0


def test_the_end_does_not_wait_for_the_engine(server: RunningServer) -> None:
    """A stop string ends the answer; that the engine stops too is not the client's matter."""
    server.engine.script = lambda _: server.ids("one two three four five six seven eight")
    server.engine.abort = lambda *_: None
    answer = server.complete(prompt=["a", "b"], max_tokens=2000, n=2, stop=["four"])
    assert [choice["text"] for choice in answer["choices"]] == ["one two three "] * 4


def test_speculation_step_by_step(server: RunningServer) -> None:
    answer = server.complete(prompt="a", max_tokens=100, speculative={"detailed": True})
    stats = answer["metrics"]["speculative_decoding"]
    assert len(stats["num_accepted_tokens_per_step"]) == stats["num_steps"]
    plain = server.complete(prompt="a")["metrics"]["speculative_decoding"]
    assert "num_accepted_tokens_per_step" not in plain


def test_request_ids(server: RunningServer) -> None:
    response = server.client.post(
        PATH, json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "mine-17"}
    )
    assert response.headers["x-request-id"] == "mine-17"
    response = server.client.post(
        PATH, json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "bad id\x7f"}
    )
    assert len(response.headers["x-request-id"]) == 32
