"""Hidden states for other trainers: what they ask, what lies in the files, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openspec import LLM
from openspec.adapt import states
from openspec.adapt.replay import Replay
from openspec.adapt.target import answering_config
from openspec.config import config_from_settings
from openspec.errors import ConfigError

TOKENS = [5, 6, 7, 8, 9, 10, 11] * 6


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {
        "num_threads": 1,
        "max_model_len": 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 32,
    }
    config = answering_config(config_from_settings(settings))
    with LLM(**dataclasses.asdict(config)) as made:
        yield made


def made(llm: LLM, folder: Path, **more: Any) -> states.States:
    given = {"hidden_state_layers": "1,2,3", **more}
    return states.States(llm, states.StatesConfig(hidden_states_dir=str(folder), **given))


@pytest.fixture
def url(llm: LLM, tmp_path: Path) -> Iterator[str]:
    handler = type("Handler", (states.Handler,), {"states": made(llm, tmp_path / "states")})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def asked(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer EMPTY"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_what_a_trainer_asks(llm: LLM, url: str) -> None:
    """The outputs of layers 0, 1 and 2 and of the last one, of every token, bit for bit."""
    status, models = asked(f"{url}/v1/models")
    assert status == 200 and models["data"][0]["max_model_len"] == 64
    body = {"model": models["data"][0]["id"], "prompt": TOKENS, "max_tokens": 1}
    status, answer = asked(f"{url}/v1/completions", {**body, "return_token_ids": True})
    assert status == 200 and answer["choices"][0]["prompt_token_ids"] == TOKENS
    path = Path(answer["kv_transfer_params"]["hidden_states_path"])
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert Path(f"{path}.lock").exists()
    found = load_file(path)
    assert found["token_ids"].tolist() == TOKENS
    expected = Replay(llm, [0, 1, 2, 3], torch.empty(0, dtype=torch.bfloat16)).texts([TOKENS])[0]
    assert found["hidden_states"].shape == (len(TOKENS), 4, 320)
    assert torch.equal(found["hidden_states"].flatten(1), expected)
    message = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    status, rendered = asked(f"{url}/v1/chat/completions/render", message)
    status, answer = asked(f"{url}/v1/chat/completions", {**message, "max_tokens": 1})
    assert status == 200 and answer["prompt_token_ids"] == rendered["token_ids"]


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("completions", {"prompt": "text"}, "prompt must be a list"),
        ("completions", {"prompt": []}, "0 tokens, expected 1 to 64"),
        ("completions", {"prompt": [5] * 65}, "65 tokens, expected 1 to 64"),
        ("completions", {"prompt": [4096]}, "4096"),
        ("completions", [], "must be an object"),
        ("chat/completions", {"messages": [], "continue_final_message": True}, "drop it"),
        ("embeddings", {}, "/v1/completions"),
    ],
)
def test_what_is_refused(url: str, route: str, body: Any, message: str) -> None:
    status, answer = asked(f"{url}/v1/{route}", body)
    assert status == (404 if route == "embeddings" else 400)
    assert message in answer["error"]["message"]


def test_files_that_nobody_takes(llm: LLM, tmp_path: Path) -> None:
    """They fill their room, and go after some minutes."""
    one = made(llm, tmp_path, hidden_states_bytes=2 * len(TOKENS) * 4 * 320 + 1000)
    path = Path(one.file_of(TOKENS))
    with pytest.raises(states.Full):
        one.file_of(TOKENS)
    os.utime(path, (0, 0))
    other = one.file_of(TOKENS)
    assert not path.exists() and not Path(f"{path}.lock").exists() and Path(other).exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_state_layers": "1,5"}, "--hidden-state-layers: expected rising ids"),
        ({"hidden_state_layers": "2,1"}, "--hidden-state-layers: expected rising ids"),
        ({}, "--hidden-state-layers: expected rising ids"),  # 2, 2 and 1 of four layers
        ({"hidden_states_dir": None}, "--hidden-states-dir is needed"),
        ({"hidden_states_dir": "/proc/x"}, "--hidden-states-dir /proc/x: "),
    ],
)
def test_settings_that_cannot_be(
    llm: LLM, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"hidden_states_dir": str(tmp_path), **settings}
    if "hidden_states_dir" in settings:
        given["hidden_state_layers"] = "1,2"
    with pytest.raises(ConfigError, match=message):
        states.States(llm, states.StatesConfig(**given))
