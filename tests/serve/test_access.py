"""API keys, path tricks, CORS, headers."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig
from openspec.serve.generation.context import key_of
from tests.serve.conftest import RunningServer
from tests.serve.waiting import PATIENCE_S, wait_until

KEY, ADMIN = "sk-secret", "sk-admin"
GUARDED = [
    "/",
    "/v1/models",
    "/v1/models/fake",
    "/version",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/load",
    "/v1/loads",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/kv_event_sources",
    "/tokenizer_info",
    "/openapi.json",
    "/v1/capture",
    "/v1/drafter",
    "/weight_info",
]
POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/abort_request",
    "/flush_cache",
    "/v1/capture",
    "/v1/drafter/load",
    "/v1/drafter/rollback",
    "/update_weights_from_disk",
    "/init_weight_transfer_engine",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
]
PUBLIC = {"/health", "/ping", "/ready", "/metrics", "/docs", "/ui"}


@pytest.fixture(scope="module")
def guarded(fake_model):
    from tests.serve.conftest import run_fake_server

    with run_fake_server(fake_model, api_key=["other", KEY], admin_api_key=ADMIN) as server:
        yield server


def raw(server: RunningServer, request: bytes) -> bytes:
    """Sends bytes as they are; returns everything until the server closes, or pauses after it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        data = b""
        try:
            sock.sendall(request)
            while chunk := sock.recv(65536):
                data += chunk
                sock.settimeout(1.0 if is_whole(data) else PATIENCE_S)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        return data


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return length is not None and len(body) >= int(length[1])


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_every_route_is_guarded_but_six(guarded: RunningServer) -> None:
    from openspec.serve.server.app import GET_ROUTES, POST_ROUTES, ROUTES

    for path in GET_ROUTES:
        path = path.replace("{model_id}", "fake")
        assert guarded.client.get(path).status_code == (200 if path in PUBLIC else 401), path
    deletes = [path for path, handlers in ROUTES.items() if "DELETE" in handlers]
    assert set(deletes) == {"/v1/responses/{response_id}", "/v1/capture"}
    assert {guarded.client.delete(path).status_code for path in deletes} == {401}
    for path in POST_ROUTES.keys() - PUBLIC:
        response = guarded.client.post(path, json={"prompt": "a"})
        assert response.status_code == 401, path
        error = response.json()["error"]
        as_anthropic = path.startswith("/v1/messages")
        assert as_anthropic or error["code"] == "invalid_api_key"
        assert not as_anthropic or error["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert {path.replace("{model_id}", "fake") for path in GET_ROUTES} == PUBLIC | set(GUARDED)
    assert set(POST_ROUTES) == {*POSTS, "/ping"}


def test_the_key_opens(guarded: RunningServer) -> None:
    for key in (KEY, "other", ADMIN):
        headers = {"authorization": f"Bearer {key}"}
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
        headers = {"authorization": f"bearer  {key}"}
        assert guarded.client.get("/v1/models", headers=headers).status_code == 200
        assert guarded.client.get("/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer wrong",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY.upper()}",
        f"Bearer {KEY} x",
        "Bearer",
    ],
)
def test_wrong_keys(guarded: RunningServer, value: str) -> None:
    if value != KEY:  # which is right under the other name
        headers = {"x-api-key": value}
        assert guarded.client.get("/v1/models", headers=headers).status_code == 401
    response = guarded.client.get("/v1/models", headers={"authorization": value})
    assert response.status_code == 401
    assert KEY not in response.text
    # By which LiteLLM knows it from a bad request.
    assert response.json()["error"]["message"].startswith("Incorrect API key provided")


@pytest.mark.parametrize("name", [b"authorization: Bearer ", b"x-api-key: "])
def test_two_headers_with_keys_are_refused(guarded: RunningServer, name: bytes) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
    answer = raw(guarded, head + name + b"x\r\n" + name + KEY.encode() + b"\r\n\r\n")
    assert status(answer) == 401


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/%2fv1/models",
        "/v1%2fmodels",
        "/health%2f..%2fv1/models",
        "/health;/v1/models",
        "/health?/../v1/models",
        "/health#/v1/models",
        "/metrics/",
        "/health/",
        "/HEALTH",
        "/v1/models/",
        "/v1/models?x=/health",
        "http://127.0.0.1/v1/models",
        "http://health/v1/models",
        "/v1/models%00",
        "/\\v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "TRACE"])
def test_path_tricks(guarded: RunningServer, method: str, target: str) -> None:
    length = b"content-length: 0\r\n" if method in ("POST", "PUT") else b""
    request = f"{method} {target} HTTP/1.1\r\nhost: health\r\nconnection: close\r\n".encode()
    answer = raw(guarded, request + length + b"\r\n")
    assert b"max_model_len" not in answer
    code = status(answer)
    if code == 200:
        # Only the liveness check itself, whatever follows the question mark.
        assert target.startswith("/health?") and method in ("GET", "HEAD")
    else:
        assert code in (400, 401, 405), answer


def test_admin_endpoints_need_the_admin_key(guarded: RunningServer) -> None:
    user = {"authorization": f"Bearer {KEY}"}
    admin = {"authorization": f"Bearer {ADMIN}"}
    post = guarded.client.post
    assert post("/flush_cache", headers=user).status_code == 401
    assert post("/flush_cache", headers=admin).status_code == 200
    body = {"abort_all": True}
    assert post("/abort_request", json=body, headers=user).status_code == 401
    assert post("/abort_request", json=body, headers=admin).status_code == 200
    body = {"request_id": "x"}
    assert post("/abort_request", json=body, headers=user).status_code == 200


def test_the_engine_is_told_whose_a_request_is(
    guarded: RunningServer, server: RunningServer
) -> None:
    """Answers are copied for their owner alone, so each key is another one, and names no key."""
    owners = []
    for key in (KEY, "other", KEY):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "a", "max_tokens": 1, "cache_salt": "shared"}
        assert guarded.client.post("/v1/completions", json=body, headers=headers).is_success
        owners.append(guarded.engine.requests[-1].owner)
    assert owners[0] == owners[2] != owners[1]
    assert "" not in owners and not {KEY, "other"} & set(owners)
    server.complete(prompt="a", max_tokens=1)
    assert server.engine.requests[-1].owner == ""


def test_a_request_is_aborted_by_its_own_key(start_server) -> None:
    server = start_server({"step_s": 0.02}, api_key=[KEY, "other"])
    one, other = ({"authorization": f"Bearer {key}"} for key in (KEY, "other"))
    body = {"prompt": "a", "max_tokens": 2000, "request_id": "mine"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.post, "/v1/completions", json=body, headers=one)
        wait_until(lambda: server.context.lifecycle.num_jobs == 1)
        own_id = next(iter(server.context.lifecycle._jobs))
        for name in ("mine", own_id):
            unknown = server.client.post(
                "/abort_request", json={"request_id": name}, headers=other
            ).json()
            assert unknown == {"num_aborted": 0}, "as for an id that nobody has"
        aborted = server.client.post("/abort_request", json={"request_id": "mine"}, headers=one)
        assert aborted.json() == {"num_aborted": 1}
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ["/flush_cache", "/ping"])
def test_pages_of_other_sites_cannot_post(server: RunningServer, start_server, path: str) -> None:
    own = server.url
    for headers, expected in (
        ({}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:9"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": own}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": own}, 200),
        ({"content-type": "text/plain", "origin": "https://evil.example"}, 403),
    ):
        response = server.client.post(path, headers=headers)
        assert response.status_code == expected, (headers, response.text)
    allowed = start_server(allowed_origins=["https://app.example"])
    headers = {"sec-fetch-site": "cross-site", "origin": "https://app.example"}
    assert allowed.client.post(path, headers=headers).status_code == 200


def test_openai_client_with_a_key(guarded: RunningServer) -> None:
    import openai

    url = f"{guarded.url}/v1"
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    assert client.completions.create(model="fake", prompt="a", max_tokens=1).choices
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="no", max_retries=0).models.list()


def test_cors_is_off_unless_asked_for(server: RunningServer, start_server) -> None:
    preflight = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization,x-stainless-retry-count",
    }
    response = server.client.options("/v1/completions", headers=preflight)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers
    allowed = start_server(allowed_origins=["https://app.example"], api_key=[KEY])
    response = allowed.client.options("/v1/completions", headers=preflight)
    assert response.status_code == 200, response.text
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    evil = {**preflight, "origin": "https://evil.example"}
    response = allowed.client.options("/v1/completions", headers=evil)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_bodies_must_say_that_they_are_json(
    server: RunningServer, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    response = server.client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 415
    response = server.client.post(
        "/v1/completions",
        content=b'{"prompt":"a","max_tokens":1}',
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )
    assert response.status_code == 200


def test_body_limits(start_server) -> None:
    server = start_server(max_body_bytes=10_000)
    headers = {"content-type": "application/json"}
    big = b'{"prompt":"' + b"a" * 20_000 + b'"}'
    assert server.client.post("/tokenize", content=big, headers=headers).status_code == 413
    chunks = (big[i : i + 1000] for i in range(0, len(big), 1000))
    assert server.client.post("/tokenize", content=chunks, headers=headers).status_code == 413
    zipped = {**headers, "content-encoding": "gzip"}
    assert server.client.post("/tokenize", content=b"\x1f\x8b", headers=zipped).status_code == 415


def test_head_limits(server: RunningServer) -> None:
    many = {f"x-{number}": "y" for number in range(200)}
    assert server.client.get("/version", headers=many).status_code == 431
    assert server.client.get("/version?" + "a" * 9000).status_code == 414
    huge = b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n"
    answer = raw(server, huge)  # may be lost to a reset, as the server does not read on
    assert not answer or status(answer) in (400, 431)
    assert server.client.get("/version").status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_400(server: RunningServer, request_: bytes) -> None:
    answer = raw(server, request_)
    assert status(answer) in (400, 501)
    assert b'"invalid_request_error"' in answer


def test_smuggled_second_request_is_not_served(guarded: RunningServer) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = raw(
        guarded,
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: "
        + str(len(inner) + 5).encode()
        + b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        + inner,
    )
    assert status(answer) == 400 and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"api_key": []}, "api_key"),
        ({"api_key": [""]}, "API key"),
        ({"api_key": [KEY], "admin_api_key": ""}, "admin_api_key"),
        ({"admin_api_key": ""}, "admin_api_key"),
        ({"admin_api_key": "a b"}, "API key"),
        ({"host": ""}, "host"),
    ],
)
def test_what_is_empty_opens_nothing(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServeConfig(**settings).check()
    assert key_of([(b"authorization", b"Bearer")], [b""]) is None


def test_slow_heads_and_bodies_are_cut_off(start_server) -> None:
    server = start_server(request_timeout_s=1.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost:")
        assert sock.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as sock:
        sock.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert status(sock.recv(1000)) == 408


def test_errors_tell_nothing_about_the_machine(server: RunningServer) -> None:
    from openspec.serve.shapes.wire import sanitise

    assert sanitise("cannot open /srv/models/x.json at 0x7ffdeadbeef0") == (
        "cannot open <path> at <address>"
    )
    trace = "boom\nTraceback (most recent call last):\n  File x"
    assert sanitise(trace) == "boom\ninternal error"
    assert sanitise("POST /v1 and 3/4 of a/b") == "POST /v1 and 3/4 of a/b"
    assert len(sanitise("x" * 10_000)) < 3000
    sanitise("\ud800")
