"""The README's commands bring what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import httpx

from tests.readme import COMMANDS, shows
from tests.serve.real_server import command, environment, real_server
from tests.serve.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ".venv/bin/python"  # the tests' own interpreter takes its place
SERVE = f"{PYTHON} -m openspec.serve"


def test_shows() -> None:
    assert shows("a\n...\n12 at 3.5 tok/s: yes", "a\nb\nc\n7 at 40.25 tok/s: yes\n")
    assert not shows("...\n12 at 3.5 tok/s: yes", "a\n12 at 3.5 tok/s: NO\n")


def test_the_readme_has_four_commands() -> None:
    assert len(COMMANDS) == 4


def test_setup_and_demo() -> None:
    """The setup before the demo is what made the environment that runs this test."""
    line, *_ = COMMANDS
    *setup, demo = line.split(" && ")
    install = f"{os.path.dirname(PYTHON)}/pip install"
    assert setup[0] == "python3 -m venv .venv" and setup[-1] == f"{install} ."
    assert all(part.startswith(install) for part in setup[1:])
    assert demo.startswith(PYTHON)
    arguments = [command([])[0], *shlex.split(demo)[1:]]
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=4 * PATIENCE_S,
        check=True,
    )
    assert shows(COMMANDS[line], done.stdout), done.stdout


def test_tests_run() -> None:
    """It is what runs this test."""
    assert "tests/run" in COMMANDS
    assert os.access(ROOT / "tests" / "run", os.X_OK)


def test_tests_run_says_what_it_left_out(tmp_path: Path) -> None:
    """On one line, with the commands that run it."""
    script = (ROOT / "tests" / "run").read_text()
    functions = [
        part + "}"
        for name in ("num_skipped", "print_left_out")
        for part in re.findall(rf"^({name}\(\) {{.*?)^}}", script, re.M | re.S)
    ]
    assert len(functions) == 2
    log = (
        "SKIPPED [20] tests/ui/conftest.py:43: needs Playwright\n"
        "SKIPPED [2] tests/ui/conftest.py:43: needs a browser\n"
        "SKIPPED [7] tests/gpu/test_logits.py:33: no CUDA: none here\n"
    )
    said = {}
    for part, text in (("all", log), ("full", "9 passed in 3.00s\n")):
        (tmp_path / "pytest.log").write_text(text)
        lines = [f"LOGS={shlex.quote(str(tmp_path))} part={part}", *functions, "print_left_out"]
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            check=True,
        )
        [said[part]] = done.stdout.splitlines()
    assert said["all"].startswith("left out: 22 tests in a browser (")
    assert "; 7 on a GPU (bench/gpu_check.sh); " in said["all"]
    assert (
        said["full"] == "left out: real clients and routers (tests/clients/run, tests/routers/run)"
    )
    for path in re.findall(r"(?:tests|bench)/[\w./]+", said["all"]):
        assert (ROOT / path).exists()


def test_server_and_request() -> None:
    request = next(line for line in COMMANDS if line.startswith("curl "))
    url, *options = shlex.split(request)[1:]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert set(given) == {"-H", "-d"}
    assert SERVE in COMMANDS
    with real_server() as server:
        assert shows(COMMANDS[SERVE], server.log), server.log
        name, _, value = given["-H"].partition(": ")
        answer = httpx.post(
            url.replace("http://127.0.0.1:8000", server.url),
            content=given["-d"],
            headers={name: value},
            timeout=PATIENCE_S,
        )
    assert shows(COMMANDS[request], answer.text), answer.text
