"""Models by their ids on the hub, with the real client and a server that answers like it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from openspec.checkpoint.draft_model import open_draft_checkpoint
from openspec.checkpoint.folder import downloaded, hub_id_of, is_hub_id, split_revision
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EMBEDDED_MODEL, EngineConfig, config_from_settings
from openspec.errors import ConfigError
from openspec.tools import convert_drafter
from tests.unit.fake_hub import OTHER_TOKEN, TOKEN, FakeHub, running_hub

MODEL = "org/tiny"
HEADS = sorted(path.name for path in EMBEDDED_MODEL.iterdir() if path.is_dir())
FILES = {
    path.relative_to(EMBEDDED_MODEL).as_posix(): path.read_bytes()
    for path in EMBEDDED_MODEL.rglob("*")
    if path.is_file()
}
OWN = {name for name in FILES if "/" not in name}
SURPLUS = {
    "README.md": b"words",
    "pytorch_model.bin": b"a pickle",
    "original/model.safetensors": b"the same again",
    "onnx/config.json": b"{}",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        url = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in ("constants", "file_download"):  # the latter in versions before 1.0
            name = f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE"
            monkeypatch.setattr(name, url, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        server.add(MODEL, {**FILES, **SURPLUS})
        yield server


def failure(**settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_settings(dict(settings)).with_folders()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_files_needed_and_no_others(hub: FakeHub) -> None:
    config = config_from_settings({"model": MODEL}).with_folders()
    assert hub.wanted() == OWN
    assert ModelConfig.from_folder(config.model_path).num_layers == 4
    assert {path.name for path in config.model_path.iterdir()} == OWN
    for name in OWN:
        assert (config.model_path / name).read_bytes() == FILES[name]
    assert hub_id_of(config.model_path) == MODEL
    config.check()
    assert config.with_folders() == config
    hub.requests.clear()
    assert config_from_settings({"model": MODEL}).with_folders() == config
    assert not hub.wanted()


@pytest.mark.parametrize("method", HEADS)
def test_a_head_beside_the_model(hub: FakeHub, method: str) -> None:
    given = EngineConfig(model=MODEL, method=method, num_speculative_tokens=2)
    config = given.with_folders()
    assert hub.wanted() == OWN | {f"{method}/config.json", f"{method}/model.safetensors"}
    assert config.draft_model_path == config.model_path / method
    assert open_draft_checkpoint(config.model_path / method).tensors


def test_a_draft_model_of_the_hub(hub: FakeHub) -> None:
    method = HEADS[0]
    head = {Path(name).name: FILES[name] for name in FILES if name.startswith(f"{method}/")}
    hub.add("org/head", {**head, **SURPLUS})
    hub.add("org/head", {**head, "config.json": b"{}"}, "v2")
    settings = {"method": method, "draft_model": "org/head"}
    config = config_from_settings(settings).with_folders()
    assert config.model is None and config.draft_model is not None
    assert {path.name for path in Path(config.draft_model).iterdir()} == set(head)
    other = config_from_settings({**settings, "draft_model": "org/head@v2"}).with_folders()
    assert other.draft_model != config.draft_model
    other.check()


def test_revisions(hub: FakeHub) -> None:
    repo = hub.add(MODEL, {"config.json": b"{}"}, "old")
    for revision in ("old", repo.revisions["old"]):
        folder = downloaded(MODEL, revision)
        assert (folder / "config.json").read_bytes() == b"{}"
    assert downloaded(MODEL, None) != folder
    config = config_from_settings({"model": f"{MODEL}@old"})
    assert config == config_from_settings({"model": MODEL, "revision": "old"})
    assert config.with_folders().model == str(downloaded(MODEL, "old"))
    assert "no revision follows the @" in failure(model=f"{MODEL}@")
    message = failure(model=f"{MODEL}@new")
    assert f"model {MODEL}@new: there is no such revision; name a branch, tag or commit" in message


def test_a_folder_wins_over_an_id(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / MODEL).mkdir(parents=True)
    assert not is_hub_id(MODEL)
    config = config_from_settings({"model": MODEL})
    assert config.with_folders() == config and not hub.requests
    assert "is a folder, and only models of the hub have revisions" in failure(
        model=MODEL, revision="main"
    )
    folder = str(tmp_path / MODEL)
    assert f"model {folder} is a folder, and only models of the hub have revisions" in failure(
        model=folder, revision="main"
    )
    assert "revision main is of no model: none is named" in failure(revision="main")
    other = tmp_path / "org" / "other@v2"
    other.mkdir()
    assert split_revision("org/other@v2") == ("org/other@v2", None)
    assert split_revision("org/other@v3") == ("org/other", "v3")


@pytest.mark.parametrize("source", ["a" * 300, "a" * 300 + "@main"])
def test_a_name_that_no_disk_takes(hub: FakeHub, source: str) -> None:
    assert f"model folder {source}: cannot be opened" in failure(model=source)


@pytest.mark.parametrize("name", ["gpt2", "./org/tiny", "/org/tiny", "a/b/c", "org/", "org/ tiny"])
def test_what_is_no_id(hub: FakeHub, name: str) -> None:
    assert f"model folder {name} does not exist; give a local folder, or an id" in failure(
        model=name
    )
    assert not hub.requests


def test_gated(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].is_gated = True
    message = failure(model=MODEL)
    assert message == (
        f"model {MODEL}: access is gated; accept its terms at {hub.url}/{MODEL} and set HF_TOKEN "
        "to a token of the same account"
    )
    monkeypatch.setenv("HF_TOKEN", OTHER_TOKEN)
    assert failure(model=MODEL) == message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert f"{hub.url} refuses access (HTTP 401); check HF_TOKEN" in failure(model=MODEL)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert config_from_settings({"model": MODEL}).with_folders().model_path.is_dir()


@pytest.mark.parametrize(("status", "words"), [(403, "refuses access (HTTP 403)"), (500, "failed")])
def test_a_hub_that_refuses(hub: FakeHub, status: int, words: str) -> None:
    hub.broken_status = status
    message = failure(model=MODEL)
    assert words in message and str(status) in message


def test_unknown_and_private(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"neither a folder here nor a model that {hub.url} shows; check the spelling"
    assert f"model org/tony: {words}" in failure(model="org/tony")
    hub.repos[MODEL].is_private = True
    assert "HF_TOKEN if it is private" in failure(model=MODEL)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert words in failure(model="org/tony")
    assert config_from_settings({"model": MODEL}).with_folders().model_path.is_dir()


def test_without_a_network(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as nobody:  # bound, so that nothing else listens there
        nobody.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        assert f"{closed} cannot be reached, and the hub's cache" in failure(model=MODEL)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        folder = downloaded(MODEL, None)
        monkeypatch.setattr(constants, "ENDPOINT", closed)
        assert downloaded(MODEL, None) == folder


def test_offline(hub: FakeHub) -> None:
    folder = downloaded(MODEL, None)
    hub.requests.clear()
    code = f"""
from openspec.checkpoint.folder import downloaded
print(downloaded({MODEL!r}, None))
downloaded("org/other", None)
"""
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(folder)
    words = f"model org/other: not in the hub's cache, {constants.HF_HUB_CACHE}, or only in part"
    assert words in done.stderr
    assert "HF_HUB_OFFLINE is set; unset it, or give a folder" in done.stderr
    assert not hub.requests


def test_a_cache_laid_out_by_hand(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine filled it: refs, snapshots of links, blobs."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repo, commit = Path(constants.HF_HUB_CACHE) / "models--org--copied", "a" * 40
    for path in (repo / "refs", repo / "blobs", repo / "snapshots" / commit / HEADS[0]):
        path.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    for index, name in enumerate(
        name for name in FILES if name in OWN or name.startswith(HEADS[0])
    ):
        blob, link = repo / "blobs" / f"{index:040}", repo / "snapshots" / commit / name
        blob.write_bytes(FILES[name])
        link.symlink_to(os.path.relpath(blob, link.parent))
    config = EngineConfig(model="org/copied", method=HEADS[0]).with_folders()
    assert config.model_path == repo / "snapshots" / commit
    assert ModelConfig.from_folder(config.model_path).num_layers == 4
    assert open_draft_checkpoint(config.model_path / HEADS[0]).tensors


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    message = failure(model=MODEL)
    assert f"no space is left for the hub's cache, {constants.HF_HUB_CACHE}; free some" in message


def test_a_pickled_head_is_converted_by_its_id(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    torch.save({"a": torch.ones(2)}, tmp_path / "file")
    pickled = (tmp_path / "file").read_bytes()
    hub.add("org/head", {"config.json": b"{}", "pytorch_model.bin": pickled, "optimizer.pt": b"x"})
    folder = downloaded("org/head", None, "draft model")
    command = r"convert it once: python -m openspec\.convert_drafter org/head NEW_FOLDER"
    with pytest.raises(ConfigError, match=f"pytorch_model.bin is not read.*{command}"):
        open_draft_checkpoint(folder)
    assert hub.wanted() == {"config.json"}
    assert convert_drafter.main(["org/head", str(tmp_path / "new")]) == 0
    assert hub.wanted() == {"config.json", "pytorch_model.bin"}
    checkpoint = open_draft_checkpoint(tmp_path / "new")
    assert checkpoint.values("a").tolist() == [1.0, 1.0]
    assert convert_drafter.main(["org/none", str(tmp_path / "newer")]) == 2
    assert "error: draft model org/none: neither a folder" in capsys.readouterr().err
    config = json.dumps({"draft_vocab_size": 3}).encode()
    hub.add(
        "org/head", {"config.json": config, "model.safetensors": FILES["model.safetensors"]}, "st"
    )
    arguments = ["org/head", str(tmp_path / "newer"), "--revision", "st"]
    assert convert_drafter.main(arguments) == 0


@pytest.mark.slow
def test_an_id_is_served_under_its_name(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openspec.bench.server import started_server
    from openspec.llm import LLM

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with started_server({"model": MODEL, "kv_cache_memory": "16MiB"}) as server:
        assert server.model == MODEL
    with LLM(MODEL, kv_cache_memory="16MiB") as llm:
        assert hub_id_of(llm.config.model_path) == MODEL
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("serve", ["--model", "org/tony"]),
        ("convert_drafter", ["org/tony", "new"]),
        *(
            pytest.param(name, ["--model", "org/tony"], marks=pytest.mark.full)
            for name in ("doctor", "bench", "demo")
        ),
    ],
)
def test_commands_take_ids(hub: FakeHub, tmp_path: Path, name: str, arguments: list[str]) -> None:
    """The environment's variables alone, in processes of their own."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", f"openspec.{name}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "org/tony: neither a folder here nor a model" in done.stderr
    assert "Traceback" not in done.stderr
