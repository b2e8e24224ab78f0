"""Blocks of docs/examples.md and docs/structured_output.md: run where that can be, else parsed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.real_server import RealServer, environment, real_server
from tests.serve.waiting import PATIENCE_S

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = [
    block
    for page in ("examples.md", "structured_output.md")
    for block in re.findall(r"^```(\w+)\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
]
PYTHON = [text for language, text in BLOCKS if language == "python"]
CURLS = [text for language, text in BLOCKS if language == "sh" and text.startswith("curl ")]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server("--default-max-tokens", "64") as running:
        yield running


def modules_of(text: str) -> set[str]:
    return set(re.findall(r"^(?:from|import) (\w+)", text, re.M))


@pytest.mark.parametrize("text", PYTHON, ids=lambda text: " ".join(sorted(modules_of(text))))
def test_python(text: str, server: RealServer) -> None:
    compile(text, "an example", "exec")
    if not all(map(importlib.util.find_spec, modules_of(text))):
        return
    done = subprocess.run(
        [sys.executable, "-c", text.replace(ADDRESS, server.url)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("text", CURLS, ids=["schema", "tool", "pattern"])
def test_curl(text: str, server: RealServer) -> None:
    url, *options = shlex.split(text)[1:]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert set(given) == {"-H", "-d"}
    name, _, value = given["-H"].partition(": ")
    answer = httpx.post(
        url.replace(ADDRESS, server.url),
        content=given["-d"],
        headers={name: value},
        timeout=PATIENCE_S,
    ).json()
    [choice] = answer["choices"]
    if "regex" in given["-d"]:
        assert re.fullmatch(r"At [0-2]\d:[0-5]\d\.", choice["message"]["content"])
    elif "tools" in given["-d"]:
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    else:
        assert set(json.loads(choice["message"]["content"])) == {"apples", "is_enough"}


def test_strict_schemas(server: RealServer) -> None:
    [schemas] = [text.splitlines() for language, text in BLOCKS if language == "jsonl"]
    answers = [
        httpx.post(
            f"{server.url}/v1/chat/completions",
            json={
                "messages": [{"role": "user", "content": "Hi"}],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": json.loads(schema)},
                },
            },
            timeout=PATIENCE_S,
        )
        for schema in schemas
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    refusals = [answer.json()["error"]["message"] for answer in answers[1:]]
    assert "required" in refusals[0] and "object" in refusals[1]


def test_the_other_blocks() -> None:
    """Settings of clients that are not here name the server and parse."""
    languages = {language for language, _ in BLOCKS}
    assert languages == {"python", "sh", "js", "toml", "json", "jsonl"}
    for language, text in BLOCKS:
        if language == "jsonl":
            continue
        assert ADDRESS in text or "LLM()" in text
        if language == "json":
            [provider] = json.loads(text)["provider"].values()
            assert provider["options"]["baseURL"] == f"{ADDRESS}/v1"
        elif language == "toml":
            tomllib = pytest.importorskip("tomllib")  # Python 3.11
            settings = tomllib.loads(text)
            provider = settings["model_providers"][settings["model_provider"]]
            assert provider["base_url"] == f"{ADDRESS}/v1" and provider["wire_api"] == "responses"
        elif language == "js":
            assert text.count("{") == text.count("}") and text.count("(") == text.count(")")
        elif language == "sh":
            assert shlex.split(text)
