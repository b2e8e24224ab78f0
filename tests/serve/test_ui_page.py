"""The page `/ui` as it is served; `tests/ui` tries it in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from openspec.bench import palette
from openspec.serve.endpoints.ui_page import FOLDER, SCRIPTS
from openspec.tools.demo import DEFAULT_PROMPT
from tests.serve.conftest import RunningServer

MAX_BYTES = 80_000


def test_one_small_page_that_only_runs_its_own(server: RunningServer) -> None:
    response = server.client.get("/ui")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert len(response.content) < MAX_BYTES
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for name in ("style", "script"):
        texts = re.findall(rf"<{name}>(.*?)</{name}>", response.text, re.DOTALL)
        assert len(texts) == response.text.count(f"</{name}>") == 1
        digest = base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.[a-z]+)", response.text))
    assert hosts == {"www.w3.org"}, "the name of SVG, and nothing that is loaded"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", response.text
    )


def test_the_first_example_is_the_demos(server: RunningServer) -> None:
    assert f"chat: [{json.dumps(DEFAULT_PROMPT)}, " in server.client.get("/ui").text


def test_texts_in_the_scripts_are_served_as_they_are(server: RunningServer) -> None:
    """What makes the page small leaves alone what stands in double quotes."""
    served = server.client.get("/ui").text
    texts = [
        text
        for name in SCRIPTS
        for line in (FOLDER / name).read_text().splitlines()
        if not line.lstrip().startswith("//")
        for text in re.findall(r'"(?:\\.|[^"\\])*"', line)
    ]
    assert len(texts) > 500 and not [text for text in texts if text not in served]


def test_each_page_leads_to_the_other(server: RunningServer) -> None:
    """By addresses that a path prefix leaves alone, and in the same colours."""
    docs = server.client.get("/docs").text
    assert '<a href="ui">' in docs and 'href="docs"' in server.client.get("/ui").text
    style = (FOLDER / "style.css").read_text()
    for colour in re.findall(r"--(?:paper|card|ink|quiet|line): #\w+;", docs):
        assert colour in style


def test_every_file_is_in_the_page() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {*SCRIPTS, "page.html", "style.css", "README.md"}


def test_the_tints_are_those_of_terminal_and_report() -> None:
    style = (FOLDER / "style.css").read_text()
    colours = dict(re.findall(r"--(p\w): (#\w+);", style))
    names = ["p1", "p2", "p3", "p4", "p8"]
    assert [colours.pop(name) for name in names] == [tint.colour for tint in palette.POSITIONS]
    assert colours == {"pf": palette.GRAMMAR.colour}


def test_public(start_server) -> None:
    locked = start_server(api_key=["secret"])
    assert locked.client.get("/ui").status_code == 200
    assert locked.client.get("/server_info").status_code == 401
    assert locked.client.get("/ui/").status_code == 401
