"""`python -m bench.measure`: its sides, its cases, and that its servers end."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from bench.measure import grammar_cases, servers
from bench.measure.__main__ import main
from bench.measure.servers import Side, sides_of, started
from bench.measure.task_prompts import KINDS

from openspec.errors import ConfigError
from openspec.llm import LLM

STUBBORN = """
import http.server, signal, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "stub"}]}')

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A server with a child that ends on SIGKILL only."""


def is_alive(pid: int) -> bool:
    """Zombies, which whoever adopted them may not have reaped yet, are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sides_are_builds_with_flags_and_commands(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name / "openspec").mkdir(parents=True)
        (tmp_path / name / "openspec" / "__init__.py").touch()
    builds = [f"{name}={tmp_path / name}" for name in ("old", "new")]
    flags = ["plain=", "drafts=--method ngram --num-threads 1"]
    commands = ["other=A=1 B=x=y serve --flag"]
    sides = sides_of(builds, flags, commands, sys.executable)
    names = ["old plain", "old drafts", "new plain", "new drafts", "other"]
    assert [side.name for side in sides] == names
    assert sides[3].command[-4:] == ("--method", "ngram", "--num-threads", "1")
    assert sides[3].environment["PYTHONPATH"].split(":")[0] == str(tmp_path / "new")
    assert (sides[4].command, sides[4].environment) == (("serve", "--flag"), {"A": "1", "B": "x=y"})
    [alone] = sides_of([], [], [], "python")
    assert alone == Side("this", ("python", "-m", "openspec.serve"), {})
    with pytest.raises(ConfigError, match="finds openspec at"):
        sides_of([f"empty={tmp_path}"], [], [], sys.executable)
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        sides_of(["old"], [], [], sys.executable)
    with pytest.raises(ConfigError, match="same name"):
        sides_of([], [], ["a=x", "a=y"], sys.executable)


def test_a_server_ends_with_its_processes_when_a_case_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 0.05)
    pid_file = tmp_path / "pid"
    side = Side("stub", (sys.executable, "-c", STUBBORN, str(pid_file)), {})
    with pytest.raises(ZeroDivisionError), started(side) as server:
        pids = [server.pid, int(pid_file.read_text())]
        assert all(map(is_alive, pids))
        raise ZeroDivisionError
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_a_server_that_does_not_come_up(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"bad={sys.executable} -c 'raise SystemExit(\"no such flag\")'"
    assert main(["ready", "--command", command]) == 2
    assert "no such flag" in capsys.readouterr().err


def measured(path: Path, *words: str) -> dict:
    """The record of a case."""
    assert main([*words, "--turns", "1", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record.pop("environment")["flags"]["turns"] == 1
    return record


def test_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether forced tokens pay depends on the machine.
    monkeypatch.setattr(grammar_cases, "LLM", partial(LLM, adaptive_speculation=False))
    record = measured(tmp_path / "masks", "masks")
    assert all(row["fill_us"]["most"] > 0 for row in record.values())
    words = ("forced", "--runs", "none", "--concurrency", "2", "--max-tokens", "24")
    [row] = measured(tmp_path / "forced", *words).values()
    assert row["is_equal"] and row["share_of_forced_tokens"] > 0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data sets of a few lines in the form of GSM8K and MT-bench."""
    questions = [{"question": f"Ann has {n} apples and eats 2. How many are left?"} for n in "5678"]
    talks = [{"turns": [f"Count to {n}.", "And back.", "Again."]} for n in range(3, 7)]
    for name, rows in (("gsm8k_test", questions), ("mt_bench", talks)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_prompts_of_tasks_are_different_and_the_same_again(data: Path) -> None:
    for name, kind in KINDS.items():
        asked = list(islice(kind(data), 4))
        assert asked == list(islice(kind(data), 4))
        assert len({turns[0] for turns in asked}) == 4
        assert {len(turns) for turns in asked} == {2 if name == "two_turns" else 1}


@pytest.mark.full
def test_tasks(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--threads", "1", "--concurrency", "1", "4", "--singles", "1", "--max-tokens", "12")
    record = measured(
        data / "tasks", "tasks", "--data", str(data), "--only", "two_turns", "copy", *sizes
    )
    assert len(record) == 4
    for row in record.values():
        assert row["ratio"]["this"]["median"] > 0 and row["tokens"] > 0
        assert row["last_turn"]["plain"]["drafted"] == 0 < row["last_turn"]["plain"]["steps"]
    assert main(["tasks"]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.full
def test_servers(tmp_path: Path) -> None:
    both = ("--with", "plain=--num-threads 1", "--with", "drafts=--num-threads 1 --method ngram")
    names = {"this plain", "this drafts"}
    record = measured(tmp_path / "ready", "ready", *both)
    assert record["ready_s"].keys() == names and record["ready_s"]["this drafts"]["ratio"]
    [row] = measured(tmp_path / "prompts", "prompts", *both, "--lengths", "32").values()
    assert row.keys() == names
    lengths = ("--agents", "3", "--system", "700", "--own", "20")
    record = measured(tmp_path / "agents", "agents", *both, *lengths)
    assert record.keys() == names and record["this plain"]["ratio"]["median"] > 0
    sent = ("--concurrency", "2", "--max-tokens", "16", "--temperature", "1")
    [row, _] = measured(
        tmp_path / "turns", "turns", *both, *sent, "--workload", "random", "repeat"
    ).values()
    # Of two requests, and of prompts in steps of their own.
    assert all(0.5 < length["median"] <= 10 for length in row["tokens_per_step"].values())
    assert row["answers_equal_to_the_first_sides"] == dict.fromkeys(names, row["answers"])
    assert row["processor_us_per_token"]["this plain"]["median"] > 0
