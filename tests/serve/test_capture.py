"""--capture-dir: what of requests and answers is kept, and what is not."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from openspec.errors import ConfigError
from openspec.records.shards import read_records, target_identity
from openspec.serve.config import ServeConfig
from tests.serve.conftest import MODEL_NAME, RunningServer
from tests.serve.fake_engine import FakeEngineClient

TURN = [{"role": "user", "content": "one"}]
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two"}),
    ("/v1/chat/completions", {"messages": TURN}),
    ("/v1/messages", {"messages": TURN}),
    ("/v1/responses", {"input": "one"}),
]


def post(
    server: RunningServer, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    whole = {"model": MODEL_NAME, limit: 6, **body}
    answer = server.client.post(path, json=whole, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def kept(server: RunningServer, folder: Path) -> list[tuple[list[int], int]]:
    """What stands on disk once all of it does."""
    recorder = server.context.recorder
    assert recorder is not None
    recorder.close()
    found = read_records(folder, target_identity(server.context.model.folder))
    return [(record.tokens, record.prompt) for record in found]


def metric(server: RunningServer, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"openspec:{name}"))


@pytest.mark.parametrize("stream", [False, True])
def test_every_form_is_kept(
    start_server: Callable[..., RunningServer], tmp_path: Path, stream: bool
) -> None:
    folder = tmp_path / "records"
    server = start_server(capture_dir=str(folder))
    for path, body in FORMS:
        post(server, path, {**body, "stream": stream})
    requests = [list(request.prompt_token_ids) for request in server.engine.requests]
    num_tokens = metric(server, "capture_tokens_total")
    found = kept(server, folder)
    assert [tokens[:prompt] for tokens, prompt in found] == requests and len(requests) == 4
    assert [len(tokens) - prompt for tokens, prompt in found] == [6] * 4
    assert num_tokens == sum(len(tokens) for tokens, _ in found)
    assert metric(server, "capture_dropped_total") == 0


def test_each_sequence_is_a_text(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    server = start_server(capture_dir=str(folder))
    body = {"prompt": ["one", "two three"], "n": 2, "return_token_ids": True}
    choices = post(server, "/v1/completions", body).json()["choices"]
    expected = [
        ([*choice["prompt_token_ids"], *choice["token_ids"]], len(choice["prompt_token_ids"]))
        for choice in choices
    ]
    assert sorted(kept(server, folder)) == sorted(expected) and len(expected) == 4


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_who_says_no_is_not_kept(
    start_server: Callable[..., RunningServer], tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    folder = tmp_path / "records"
    server = start_server(capture_dir=str(folder))
    post(server, path, {**body, "store": False})
    post(server, path, {**body, "capture": False})
    post(server, path, body, {"X-OpenSpec-Capture": "0"})
    assert kept(server, folder) == []


def test_keys_whose_requests_are_kept(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    server = start_server(
        capture_dir=str(folder), api_key=["one", "two"], admin_api_key="three", capture_keys=["two"]
    )
    for number, key in enumerate(("one", "two", "three"), 1):
        prompt = {"prompt": [number, number]}
        post(server, "/v1/completions", prompt, {"Authorization": f"Bearer {key}"})
    assert [tokens[:prompt] for tokens, prompt in kept(server, folder)] == [[2, 2]]


@pytest.mark.parametrize("keys", [["other"], ["one", "admin"], []])
def test_keys_that_nobody_sends(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="capture_keys") as caught:
        ServeConfig(api_key=["one"], admin_api_key="admin", capture_keys=keys).check()
    assert "other" not in str(caught.value)


def test_what_is_beyond_the_rate_is_dropped(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    server = start_server(capture_dir=str(tmp_path / "records"), capture_rate=1.0)
    for _ in range(3):
        post(server, *FORMS[0])
    found = server.client.get("/v1/capture").json()
    assert found["tokens"] == 10 and found["dropped"] == 2
    assert metric(server, "capture_dropped_total") == 2
    assert len(kept(server, tmp_path / "records")) == 1


def test_nothing_is_kept_unless_asked_for(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    assert start_server().context.recorder is None
    server = start_server(capture_dir=str(tmp_path / "records"), capture_share=0.0)
    post(server, *FORMS[0])
    assert kept(server, tmp_path / "records") == []


def test_the_engine_does_nothing_for_it(
    start_server: Callable[..., RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told the same, as often, whether texts are kept or not; records cost few bytes."""
    counts: Counter[str] = Counter()
    for name in ("submit", "abort", "forget", "load_grammar", "drop_grammar", "reset_prefix_cache"):
        told = getattr(FakeEngineClient, name)

        def counted(*given: Any, _told: Any = told, _name: str = name, **more: Any) -> Any:
            counts[_name] += 1
            return _told(*given, **more)

        monkeypatch.setattr(FakeEngineClient, name, counted)
    found = []
    for folder in (None, tmp_path / "records"):
        server = start_server(capture_dir=None if folder is None else str(folder))
        counts.clear()
        for path, body in FORMS[:2] * 3:
            post(server, path, {**body, "seed": 7})
        requests = [(r.prompt_token_ids, r.sampling, r.speculative) for r in server.engine.requests]
        found.append((dict(counts), requests))
    assert found[0] == found[1] and found[0][0]["submit"] == 6
    assert folder is not None
    texts = kept(server, folder)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.ids"))
    assert num_bytes <= 4.2 * sum(len(tokens) for tokens, _ in texts) + 64 * len(texts)


def test_an_engine_process_knows_nothing_of_records() -> None:
    code = (
        "import sys, openspec.engine.processes.process\n"
        "assert not [name for name in sys.modules if name.startswith('openspec.records')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_switch_and_an_eraser(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    server = start_server(capture_dir=str(folder), admin_api_key="secret")
    client, admin = server.client, {"Authorization": "Bearer secret"}

    def state() -> dict[str, Any]:
        return dict(client.get("/v1/capture", headers=admin).json())

    assert client.get("/v1/capture").status_code == 401
    assert client.request("DELETE", "/v1/capture").status_code == 401
    post(server, *FORMS[0])
    while (found := state())["bytes"] == 0:
        assert found["enabled"]
    answer = client.request("DELETE", "/v1/capture", headers=admin)
    shown = {"enabled": True, "share": 1.0, "bytes": 0, "tokens": 10, "dropped": 0}
    assert answer.json() == {"files_removed": 1} and state() == shown

    def change(**body: object) -> httpx.Response:
        return client.post("/v1/capture", json=body, headers=admin)

    assert change(enabled=False).json() == {**shown, "enabled": False}
    post(server, *FORMS[0])
    assert change(share=0.0).json() == {**shown, "enabled": False, "share": 0.0}
    assert change(until_s=600).json() == {**shown, "share": 0.0}
    post(server, *FORMS[0])
    change(share=1.0, until_s=0)
    post(server, *FORMS[0])
    assert change(enabled=True).json() == shown
    post(server, *FORMS[1])
    assert len(kept(server, folder)) == 1
    for wrong in ({"share": 2}, {"until_s": -1}, {"until_s": 5, "enabled": False}, {"share": "1"}):
        assert change(**wrong).status_code == 400
    bare = start_server()
    answer = bare.client.get("/v1/capture")
    assert answer.status_code == 400 and "--capture-dir" in answer.json()["error"]["message"]
