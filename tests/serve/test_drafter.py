"""Another draft head over HTTP: our paths, SGLang's and vLLM's, and who may use them."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from openspec.config import EMBEDDED_MODEL, EngineConfig
from openspec.errors import ConfigError
from openspec.serve.config import ServeConfig, check_drafter_access
from tests.heads.other import make
from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.real_server import real_server

ADMIN = "sk-admin"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


def post(server: RunningServer, route: str, status: int = 200, **body: object) -> dict[str, Any]:
    response = server.client.post(route, json=body) if body else server.client.post(route)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def get(server: RunningServer, path: str) -> dict[str, Any]:
    answer: dict[str, Any] = server.client.get(path).json()
    return answer


def speculation(server: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = server.complete(prompt="a")["metrics"]["speculative_decoding"]
    return found


def test_load_and_roll_back(start_server) -> None:
    server = start_server()
    first = get(server, "/v1/drafter")
    assert first["version"] == 1
    assert first["previous"] is None
    assert first["mean_acceptance_length"] == 1.0
    assert speculation(server)["drafter_version"] == 1
    answer = post(server, "/v1/drafter/load", path="new", weight_version="mine")
    assert (answer["version"], answer["folder"], answer["weight_version"]) == (2, "new", "mine")
    assert speculation(server)["drafter_version"] == 2
    assert answer["previous"]["version"] == 1
    assert answer["previous"]["mean_acceptance_length"] == 1.0
    assert [one["engine"] for one in answer["engines"]] == [0]
    assert server.engine.num_resets == 0
    # Nobody but the admin learns where it lies.
    shown = get(server, "/server_info")["drafter"]
    assert shown == {"version": 2, "name": "new", "method": "fake"}
    metrics = server.client.get("/metrics").text
    assert 'openspec:drafter_version{engine="0",model_name="fake"} 2.0' in metrics
    assert 'openspec:drafter_swaps_total{engine="0",model_name="fake"} 1.0' in metrics
    assert post(server, "/v1/drafter/rollback")["version"] == 1
    post(server, "/v1/drafter/load", path="third", flush_prefix_cache=True)
    assert server.engine.num_resets == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("drafter_swap_off", 404),
        ("drafter_outside", 400),
        ("drafter_unreadable", 400),
        ("drafter_other_shape", 409),
        ("drafter_busy", 409),
        ("drafter_not_finite", 422),
        ("drafter_sha256", 422),
    ],
)
def test_refusals(code: str, status: int, server: RunningServer) -> None:
    error = post(server, "/v1/drafter/load", status, path=code)["error"]
    assert (error["code"], error["param"]) == (code, "path")
    assert get(server, "/v1/drafter")["version"] == 1


def test_nothing_to_go_back_to(start_server) -> None:
    server = start_server()
    error = post(server, "/v1/drafter/rollback", 409)["error"]
    assert error["code"] == "no_previous_drafter"


@pytest.mark.parametrize(
    "body", [{}, {"path": 3}, {"path": None}, {"path": "x", "sha256": 1}, {"path": ["x"]}]
)
def test_bodies_that_are_none(body: dict[str, object], server: RunningServer) -> None:
    response = server.client.post("/v1/drafter/load", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("path", "sha256")


def test_the_admin_key(fake_model: Path) -> None:
    with run_fake_server(fake_model, api_key=["user"], admin_api_key=ADMIN) as server:
        for key in (None, "user", "wrong"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            for path in ("/v1/drafter", "/weight_info"):
                assert server.client.get(path, headers=headers).status_code == 401
            for path, body in (
                ("/v1/drafter/load", {"path": "new"}),
                ("/v1/drafter/rollback", {}),
                ("/update_weights_from_disk", {"model_path": "new", "update_draft_model": True}),
                ("/init_weight_transfer_engine", {}),
                ("/start_draft_weight_update", {}),
                ("/update_weights", {"update_info": {"path": "new"}}),
                ("/finish_weight_update", {}),
            ):
                response = server.client.post(path, json=body, headers=headers)
                assert response.status_code == 401, path
        assert server.engine.drafter.version == 1
        assert server.client.get("/v1/drafter", headers=AS_ADMIN).status_code == 200
        answer = server.client.post("/v1/drafter/load", json={"path": "new"}, headers=AS_ADMIN)
        assert answer.json()["version"] == 2


@pytest.mark.parametrize("path", ["/v1/drafter/rollback", "/finish_weight_update"])
def test_pages_of_other_sites(path: str, server: RunningServer) -> None:
    response = server.client.post(path, headers={"origin": "https://elsewhere.example"})
    assert response.status_code == 403


def test_an_open_server_needs_the_admin_key() -> None:
    engine = EngineConfig(drafter_dir=".")
    for host in ("127.0.0.1", "localhost", "::1"):
        check_drafter_access(ServeConfig(host=host), engine)
    check_drafter_access(ServeConfig(uds="socket", host="0.0.0.0"), engine)
    check_drafter_access(ServeConfig(host="0.0.0.0", admin_api_key="key"), engine)
    check_drafter_access(ServeConfig(host="0.0.0.0"), EngineConfig())
    with pytest.raises(ConfigError, match="--admin-api-key"):
        check_drafter_access(ServeConfig(host="0.0.0.0", api_key=["key"]), engine)


def test_sglangs_path(start_server) -> None:
    server = start_server()
    path = "/update_weights_from_disk"
    answer = post(server, path, model_path="new", update_draft_model=True, weight_version="v7")
    assert answer["success"] is True
    assert get(server, "/v1/drafter")["weight_version"] == "v7"
    post(server, path, model_path="newer", is_draft_model=True, load_format="auto")
    for body, param in (
        ({}, "update_draft_model"),
        ({"update_draft_model": False}, "update_draft_model"),
        ({"update_draft_model": True, "load_format": "pt"}, "load_format"),
        ({"update_draft_model": True, "is_async": True}, "is_async"),
    ):
        error = post(server, path, 400, model_path="newest", **body)["error"]
        assert error["param"] == param
    assert get(server, "/v1/drafter")["version"] == 3
    assert server.engine.num_resets == 0
    post(server, path, model_path="newest", update_draft_model=True, flush_cache=True)
    assert server.engine.num_resets == 1


def test_vllms_paths(start_server) -> None:
    server = start_server()
    info = {"path": "new"}
    for path, body in (("/update_weights", {"update_info": info}), ("/finish_weight_update", {})):
        error = post(server, path, 400, **body)["error"]
        assert "only draft heads" in error["message"]
    post(server, "/start_draft_weight_update")
    error = post(server, "/finish_weight_update", 409)["error"]
    assert error["code"] == "no_previous_drafter"
    for wrong in ({}, {"path": 1}, {"names": ["fc.weight"], "dtype_names": ["bfloat16"]}):
        error = post(server, "/update_weights", 400, update_info=wrong)["error"]
        assert error["param"] == "update_info"
    error = post(server, "/init_weight_transfer_engine", 400, init_info={})["error"]
    assert "NCCL" in error["message"]
    post(server, "/update_weights", update_info=info)
    assert get(server, "/v1/drafter")["version"] == 1
    post(server, "/finish_weight_update", weight_version="v2")
    answer = get(server, "/weight_info")
    assert answer["weight_version"] == "v2"
    assert answer["drafter"]["version"] == 2


def test_all_engines_of_a_server(fake_model: Path) -> None:
    with run_fake_server(fake_model, num_engines=2, max_restarts=1) as server:
        answer = post(server, "/v1/drafter/load", path="new")
        assert [one["version"] for one in answer["engines"]] == [2, 2]
        # One that is started again gets what the others have; but not what they had before.
        server.call(server.engines[1].die)
        while len(server.engines) < 3 or server.engines[2].drafter.version < 2:
            time.sleep(0.01)
        assert server.engines[2].drafter.folder == "new"
        server.call(lambda: setattr(server.engines[2].drafter.previous, "sha256", "0" * 64))
        error = post(server, "/v1/drafter/rollback", 409)["error"]
        assert error["code"] == "no_previous_drafter"
        assert post(server, "/v1/drafter/load", path="other")["version"] == 3


@pytest.mark.full
def test_a_real_server(tmp_path: Path) -> None:
    """Streams go on over swaps, with the texts that they had, and wait for none."""
    make(EMBEDDED_MODEL / "eagle3", tmp_path / "noisy")
    arguments = ["--method", "eagle3", "--drafter-dir", str(tmp_path), "--max-model-len", "1024"]
    body = {"prompt": "Tom has 3 apples", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with real_server(*arguments, "--num-threads", "1", "--admin-api-key", ADMIN) as server:
        client = server.client

        def answer() -> tuple[str, float]:
            """The text, and the longest time between two of its pieces."""
            text, times = "", []
            for chunk in server.openai.completions.create(
                model=client.get("/v1/models").json()["data"][0]["id"],
                stream=True,
                extra_body={"ignore_eos": True},
                **{key: value for key, value in body.items() if key != "ignore_eos"},
            ):
                text += chunk.choices[0].text
                times.append(time.monotonic())
            return text, max(b - a for a, b in itertools.pairwise(times))

        expected, usual = min((answer() for _ in range(3)), key=lambda one: one[1])
        is_over = threading.Event()
        versions: list[int] = []

        def swap() -> None:
            while not is_over.is_set():
                loaded = client.post("/v1/drafter/load", json={"path": "noisy"}, headers=AS_ADMIN)
                back = client.post("/v1/drafter/rollback", headers=AS_ADMIN)
                versions.extend(one.json()["version"] for one in (loaded, back))

        thread = threading.Thread(target=swap)
        thread.start()
        answers = [answer() for _ in range(3)]
        is_over.set()
        thread.join()
        assert [text for text, _ in answers] == [expected] * 3
        assert len(versions) > 6
        assert set(versions[1::2]) == {1}
        longest = max(gap for _, gap in answers)
        print(f"longest gap {1000 * longest:.1f} ms, usual {1000 * usual:.1f} ms")
        refused = client.post("/v1/drafter/load", json={"path": "../x"}, headers=AS_ADMIN)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "drafter_outside"
