"""The benchmark's HTML report in a browser: without network, without script, on a phone."""

from __future__ import annotations

import json
from pathlib import Path

from openspec.bench.document import as_document, read_document
from openspec.bench.html.page import report_page
from tests.ui.conftest import DESKTOP, PHONE, playwright_api

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
HOSTILE = '<script>document.title="pwned"</script><img src=x onerror=alert(1)>\u202e\x1b[2J'


def opened(
    browser: playwright_api.Browser, path: Path, **options: object
) -> tuple[playwright_api.Page, list[str], list[str]]:
    """A page with what it asked for and what it complained of."""
    page = browser.new_context(offline=True, **options).new_page()
    requests: list[str] = []
    messages: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    return page, requests, messages


def test_without_network_and_script(browser: playwright_api.Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    document = read_document(RESULTS / "h200-http-eagle3.json")
    path.write_text(report_page([document]))
    page, requests, messages = opened(
        browser, path, java_script_enabled=False, viewport=DESKTOP, color_scheme="dark"
    )
    fastest = max(document.runs, key=lambda run: run.speedup or 0)
    assert page.inner_text(".tile b") == f"{fastest.speedup:.2f}x"
    assert page.locator("svg.chart").count() >= 5
    for chart in page.locator("svg.chart").all():
        assert chart.bounding_box()["width"] > 150
    assert requests == [path.as_uri()] and not messages


def test_on_a_phone_nothing_but_tables_and_charts_scrolls(
    browser: playwright_api.Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(report_page([read_document(RESULTS / "h200-http-dspark-tree.json")] * 2))
    page, _, messages = opened(browser, path, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    # Charts keep their size, so that their words do, and scroll.
    is_small = "(e) => e.getBoundingClientRect().width < e.viewBox.baseVal.width - 1"
    assert page.eval_on_selector_all(".chart", f"all => all.filter({is_small}).length") == 0
    assert not messages


def test_on_paper_nothing_is_cut(browser: playwright_api.Browser, tmp_path: Path) -> None:
    """A4 within the margins of `@page`; in light colours, whatever the screen has."""
    path = tmp_path / "report.html"
    names = ("h200-http-eagle3", "h200-http-dspark-tree")
    path.write_text(report_page([read_document(RESULTS / f"{name}.json") for name in names]))
    paper = {"width": round((210 - 2 * 12) / 25.4 * 96), "height": 1000}
    page, _, messages = opened(browser, path, viewport=paper, color_scheme="dark")
    page.emulate_media(media="print")
    right = "all => Math.max(...all.map((e) => e.getBoundingClientRect().right))"
    assert page.eval_on_selector_all("table, svg, pre, dl", right) <= paper["width"]
    titles = "all => all.map((e) => e.getBBox().width - e.ownerSVGElement.viewBox.baseVal.width)"
    assert max(page.eval_on_selector_all(".chart .title", titles)) <= 0
    ground = page.eval_on_selector("body", "e => getComputedStyle(e).backgroundColor")
    assert ground == "rgb(255, 255, 255)" and not messages


def test_hostile_names_are_text(browser: playwright_api.Browser, tmp_path: Path) -> None:
    content = json.loads((RESULTS / "h200-http-eagle3.json").read_text())
    for run in content["runs"]:
        run["workload"] = HOSTILE
    content["environment"] |= {"cpu": HOSTILE, "gpu": [HOSTILE]}
    content["environment"]["server"] |= {"model": HOSTILE, HOSTILE: HOSTILE}
    path = tmp_path / "report.html"
    path.write_text(report_page([as_document(content)]))
    page, requests, messages = opened(browser, path, viewport=DESKTOP)
    assert "<img" in page.inner_text("h1") and page.title() != "pwned"
    assert page.locator("script, img").count() == 0
    assert requests == [path.as_uri()] and not messages
