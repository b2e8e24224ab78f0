"""Endpoints that describe the server, the tokenizer's endpoints, abort and flush."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import httpx
import msgspec
import pytest

import openspec
from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig
from openspec.serve.server.app import shown_path
from tests.serve.conftest import MODEL_NAME, RunningServer
from tests.serve.fake_model import MAX_POSITIONS
from tests.serve.waiting import PATIENCE_S, wait_until


def get(server: RunningServer, path: str) -> dict:
    response = server.client.get(path)
    assert response.status_code == 200, response.text
    return response.json()


def test_models(server: RunningServer) -> None:
    models = server.openai.models.list().data
    assert [model.id for model in models] == [MODEL_NAME]
    assert models[0].model_extra["max_model_len"] == server.engine.info.max_model_len
    assert server.openai.models.retrieve(MODEL_NAME).owned_by == "openspec"
    listing = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listing["first_id"], listing["last_id"], listing["has_more"]) == (MODEL_NAME,) * 2 + (
        False,
    )
    card = listing["data"][0]
    assert (card["type"], card["display_name"]) == ("model", MODEL_NAME)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert listing["models"] == [], "Codex asks for this array"
    response = server.client.get("/v1/models/other/name")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_health_and_ready(server: RunningServer) -> None:
    for path in ("/health", "/ready"):
        response = server.client.get(path)
        assert response.status_code == 200 and response.content == b""
        assert server.client.head(path).status_code == 200


def test_health_tells_when_the_engine_is_gone(start_server) -> None:
    server = start_server({"step_s": 0.01})
    failures: list[int] = []

    def ask() -> None:
        body = {"prompt": "a", "max_tokens": 2000}
        response = server.client.post("/v1/completions", json=body)
        failures.append(response.status_code)
        assert "0x" not in response.text and "dead" not in response.text

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: server.engine.requests)
    server.call(server.engine.die)
    thread.join(PATIENCE_S)
    assert failures == [500]
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        response = client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and response.headers["retry-after"]
        assert client.get("/metrics").status_code == 200


def test_versions_and_descriptions(server: RunningServer) -> None:
    assert get(server, "/version") == {"version": openspec.__version__}
    info = get(server, "/server_info")
    assert info == get(server, "/get_server_info")
    assert info["method"] == "ngram" and info["num_speculative_tokens"] == 4
    assert info["max_draft_tokens"] == server.engine.info.max_draft_tokens == 4
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    model = get(server, "/model_info")
    assert model == get(server, "/get_model_info")
    assert model["is_generation"] and model["preferred_sampling_params"]["top_k"] == 20
    # Padding of the vocabulary is no prompt token.
    num_tokens = get(server, "/tokenizer_info")["vocab_size"]
    assert model["num_token_ids"] == num_tokens < model["vocab_size"]


def test_load(server: RunningServer) -> None:
    assert get(server, "/load") == {"server_load": 0}
    loads = get(server, "/v1/loads?include=core,disagg,queues,memory")
    assert loads["loads"][0]["num_running_reqs"] == 0
    assert "memory" in loads["loads"][0] and "speculative" not in loads["loads"][0]
    assert "speculative" in get(server, "/v1/loads")["loads"][0]
    assert loads["aggregate"]["total_reqs"] == 0


@pytest.mark.parametrize("text", ["", "one two", "naïve 😀", "<|im_start|>user", "x" * 20_000])
def test_tokenize_and_back(server: RunningServer, text: str) -> None:
    response = server.client.post(
        "/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert response["tokens"] == server.ids(text)
    assert response["count"] == len(response["tokens"]) == len(response["token_strs"])
    back = server.client.post("/detokenize", json={"tokens": response["tokens"]}).json()
    assert back == {"prompt": text}


def test_tokenize_a_chat(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    server.chat(messages=messages, max_tokens=1)
    assert tokens == server.engine.requests[-1].prompt_token_ids
    server.error("/tokenize")
    server.error("/tokenize", prompt="a", messages=messages)


def test_detokenize_refuses_unknown_ids(server: RunningServer) -> None:
    for tokens in ([10**6], [-1], "abc", [1.5], None):
        assert server.error("/detokenize", tokens=tokens)["param"] == "tokens"


def test_tokenizer_info_as_lm_eval_reads_it(server: RunningServer) -> None:
    info = get(server, "/tokenizer_info")
    assert info["eos_token"] == "<|im_end|>"
    tokens = server.client.post(
        "/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}
    ).json()["tokens"]
    assert tokens == [info["eos_token_id"]]


def test_openapi_describes_the_real_requests(server: RunningServer) -> None:
    document = get(server, "/openapi.json")
    post = document["paths"]["/v1/completions"]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    completion = schemas[reference.rpartition("/")[2]]
    assert completion["required"] == ["prompt"]
    assert completion["properties"]["logprobs"]["anyOf"][0]["maximum"] == 20
    assert "SpeculativeField" in schemas
    text = json.dumps(document)
    for reference in set(text.split('"$ref": "')[1:]):
        name = reference.partition('"')[0].removeprefix("#/components/schemas/")
        assert name in schemas
    assert "/v1/chat/completions" in document["paths"] and "/metrics" in document["paths"]


def test_every_operation_is_described(server: RunningServer) -> None:
    paths = get(server, "/openapi.json")["paths"]
    ids = [one["operationId"] for methods in paths.values() for one in methods.values()]
    assert len(set(ids)) == len(ids)
    assert all(one["summary"] for methods in paths.values() for one in methods.values())
    # What the page proposes to send is a request that is served.
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        assert server.client.post(path, json=content["example"]).status_code == 200, path


def test_root_names_the_endpoints(server: RunningServer) -> None:
    answer = get(server, "/")
    assert answer["version"] == openspec.__version__
    assert answer["pages"] == ["/ui", "/docs"]
    for operation, text in answer["endpoints"].items():
        method, _, path = operation.partition(" ")
        assert text and path in get(server, "/openapi.json")["paths"]
        kept = server.openai.responses.create(model=MODEL_NAME, input="hi", max_output_tokens=1)
        path = path.replace("{model_id}", MODEL_NAME).replace("{response_id}", kept.id)
        response = server.client.request(method, path)
        assert response.status_code not in (404, 405), operation


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_the_health(server: RunningServer, method: str) -> None:
    response = server.client.request(method, "/ping")
    assert response.status_code == 200 and response.content == b""


def test_head_has_no_body(server: RunningServer) -> None:
    for path in ("/v1/models", "/metrics", "/docs"):
        response = server.client.head(path)
        assert response.status_code == 200 and response.content == b""
        assert int(response.headers["content-length"]) > 0
    assert server.client.head("/v1/completions").status_code == 405


def test_the_page_needs_no_other_host(server: RunningServer) -> None:
    response = server.client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"//[\w-]+\.|@import|<link|<script src|<img", response.text)
    assert "openapi.json" in response.text


def test_pages_can_be_left_out(start_server) -> None:
    client = start_server(pages=False).client
    for path in ("/openapi.json", "/docs", "/ui"):
        assert client.get(path).status_code == 404
        assert "/v1" in client.get(path).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/no/such/path?key=secret", "/no/such/path"),
        ("/v1/models/a%0ab", "/v1/models/a%0ab"),
        ("/" + "x" * 300, "/" + "x" * 199),
    ],
)
def test_the_access_log_has_the_path_that_was_asked_for(
    start_server, caplog: pytest.LogCaptureFixture, path: str, shown: str
) -> None:
    caplog.set_level("INFO", "openspec.serve.access")
    start_server(access_log=True).client.get(path, headers={"x-request-id": "mine"})
    wait_until(lambda: caplog.messages)  # it comes after the answer
    (line,) = caplog.messages
    assert line.startswith(f"mine GET {shown} 404 ")


def test_control_characters_do_not_reach_the_log() -> None:
    scope = {"path": "", "raw_path": b"/a\r\nb\x1b[31m\xe9"}
    assert shown_path(scope) == r"/a\r\nb\x1b[31m\xe9"


def test_flush_cache(server: RunningServer) -> None:
    assert server.client.post("/flush_cache?timeout=5").status_code == 200
    assert server.engine.num_resets == 1
    assert server.client.get("/flush_cache").status_code == 405


def test_an_echo_aborted_before_its_prompt_is_computed(start_server) -> None:
    server = start_server({"step_s": 0.2, "max_num_seqs": 1})
    answers: list[httpx.Response] = []
    bodies = [
        {"prompt": "a", "max_tokens": 2000},
        {"prompt": "b c", "echo": True, "logprobs": 1, "n": 2},
    ]

    def ask(body: dict) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            answers.append(client.post("/v1/completions", json=body))

    threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
    threads[0].start()
    wait_until(lambda: len(server.engine.requests) == 1)
    threads[1].start()
    wait_until(lambda: len(server.engine.requests) == 3)
    assert server.client.post("/abort_request", json={"abort_all": True}).status_code == 200
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200, 200]
    for choice in max((answer.json()["choices"] for answer in answers), key=len):
        assert choice["finish_reason"] == "abort"
        assert choice["text"] == "b c"
        assert set(choice["logprobs"]["token_logprobs"]) == {None}


@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_abort_by_either_id(start_server, name: str) -> None:
    server = start_server({"step_s": 0.01})
    answers: list[dict] = []

    def ask() -> None:
        headers = {"x-request-id": "mine"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
            body = {"prompt": "a", "max_tokens": 2000, "n": 2}
            answers.append(client.post("/v1/completions", json=body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(server.engine.requests) == 2)
    assert get(server, "/load") == {"server_load": 1}
    assert server.client.post("/abort_request", json={name: "mine"}).json() == {"num_aborted": 1}
    thread.join(PATIENCE_S)
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort"] * 2
    assert server.client.post("/abort_request", json={name: "mine"}).json() == {"num_aborted": 0}
    server.error("/abort_request")
    assert server.client.post("/abort_request", json={"abort_all": True}).status_code == 200


@pytest.mark.parametrize(
    "date", ["today", "2026-1-1", "2026-02-30", "20260101", "2026-01-01T10:00"]
)
def test_dates_that_are_none(date: str) -> None:
    with pytest.raises(ConfigError, match="expected YYYY-MM-DD"):
        ServeConfig(template_date=date).check()


def test_template_and_date_of_ones_own(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    settings = {"chat_template": str(template), "template_date": "2026-03-01"}
    ServeConfig(**settings).check()
    server = start_server(**settings)
    answer = server.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    ids = answer.json()["tokens"]
    assert server.context.tokenizer.decode(ids) == "01 Mar 2026: x"
    info = server.client.get("/tokenizer_info").json()
    assert (info["tokenizer_class"], info["add_bos_token"]) == ("Qwen2Tokenizer", False)


def test_what_routers_read(server: RunningServer) -> None:
    """Recorded from SMG 1.13, vllm-router 0.1.17, llm-d's endpoint picker: see docs/scale.md."""
    [card] = get(server, "/v1/models")["data"]
    assert card["owned_by"] == "openspec" and card["max_model_len"] == MAX_POSITIONS
    assert card["id"] == card["root"] == MODEL_NAME
    info = get(server, "/server_info")
    expected = {
        "model": MODEL_NAME,
        "served_model_name": MODEL_NAME,
        "context_length": MAX_POSITIONS,
        "max_total_tokens": 1024 * 16,
        "max_running_requests": 16,
        "kv_block_size": 16,
        "tp_size": 1,
        "dp_size": 1,
    }
    assert {name: info[name] for name in expected} == expected
    lines = server.client.get("/metrics").text.splitlines()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        [sample] = [line for line in lines if line.startswith(f"vllm:{name}{{")]
        assert float(sample.rpartition(" ")[2]) == 0
    [cache] = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="16"' in cache and 'num_gpu_blocks="1024"' in cache


def test_how_many_ranks_an_engine_has(start_server: Callable[..., RunningServer]) -> None:
    server = start_server({"tensor_parallel_size": 4})
    info = get(server, "/server_info")
    assert (info["tp_size"], info["tensor_parallel_size"]) == (4, 4)
    assert re.search(
        r'^openspec:engine_info\{.*tensor_parallel_size="4"',
        server.client.get("/metrics").text,
        re.M,
    )


def test_where_kv_events_are(server: RunningServer) -> None:
    assert get(server, "/kv_event_sources") == {}
    source: dict[str, str | int | bool | None] = {
        "data_parallel_rank": 2,
        "endpoint": "tcp://127.0.0.1:5559",
        "replay_endpoint": None,
        "topic": "",
    }
    plain = server.engine.info
    server.engine.info = msgspec.structs.replace(plain, kv_events=source)
    assert get(server, "/kv_event_sources") == {"2": source}
    server.engine.info = plain
