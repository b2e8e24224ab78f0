"""From a server's traffic to the head that it drafts with, while it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import openspec
from openspec.adapt.__main__ import main
from openspec.adapt.cycle import run
from tests.golden import trainable
from tests.serve.real_server import RealServer, real_server

SHIPPED = Path(openspec.__file__).parent / "models" / "tiny" / "eagle3"
QUESTIONS = [f"Tom has {n} apples and buys {n + 2} more. How many has he?" for n in range(24)]
RUN = (
    "--method eagle3 --num-threads 1 --max-model-len 160 --max-num-seqs 8 --text-length 128 "
    "--batch-rows 1 --answer-tokens 48 --minutes 0.2 --max-steps 1 --watch-s 0.5"
).split()


def answers(server: RealServer) -> list[str]:
    found = []
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = server.client.post("/v1/chat/completions", json={**body, "max_tokens": 40})
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["message"]["content"])
    return found


def drafter(server: RealServer) -> dict[str, Any]:
    answer = server.client.get("/v1/drafter", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.full
@pytest.mark.parametrize("is_better", [False, True])
def test_a_server_takes_the_head_that_its_traffic_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, is_better: bool,
) -> None:  # fmt: skip
    """Texts stay, whichever head drafts; where nothing is gained, nothing is swapped."""
    heads, records, new = tmp_path / "heads", tmp_path / "records", tmp_path / "heads" / "new"
    monkeypatch.setattr(run, "CHANGED", run.CHANGED if is_better else ())
    if is_better:
        trainable.write_without(torch.arange(400), heads / "old")
    else:
        shutil.copytree(SHIPPED, heads / "old")
    arguments = {
        "method": "eagle3",
        "draft-model": heads / "old",
        "drafter-dir": heads,
        "capture-dir": records,
        "admin-api-key": "secret",
        "max-model-len": 256,
        "max-num-seqs": 4,
    }
    given = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with real_server(*given) as server:
        before = answers(server)
        assert drafter(server)["counters"]["num_drafts"] > 0
        more = [
            "--records",
            str(records),
            "--out",
            str(new),
            *(["--force"] if is_better else ["--rate", "1e-12"]),
        ]
        where = ["--server", server.url, "--server-admin-key", "secret"]
        assert main(["run", *RUN, *more, *where]) == 0
        said, now = capsys.readouterr().out, drafter(server)
        assert "your traffic: " in said
        if is_better:
            assert now["version"] == 2 and now["folder"] == str(new)
            assert "drafts with it as version 2" in said
            assert json.loads((new / "expected.json").read_text())["length"] > 1
        else:
            assert now["version"] == 1 and not new.exists()
            assert "nothing is written, nothing is swapped" in said
        assert answers(server) == before
        assert main(["erase", "--records", str(records)]) == 0
