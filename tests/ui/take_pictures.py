"""`python -m tests.ui.take_pictures` takes those of docs/ui.md, with Playwright and Pillow."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from openspec.tools.demo import DEFAULT_PROMPT
from tests.serve.real_server import real_server

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
NUM_COLOURS = 255
NUM_RACES = 7
DESKTOP, PHONE = {"width": 1360, "height": 860}, {"width": 390, "height": 844}
ARGUMENTS = ("--method", "eagle3", "--method-option=draft_top_k=3", "--num-speculative-tokens", "6")


def main() -> int:
    """Starts a server, visits its page and writes the pictures."""
    with (
        real_server(*ARGUMENTS, "--no-adaptive-speculation", "--kv-cache-memory", "256MiB") as tree,
        real_server("--no-adaptive-speculation", "--kv-cache-memory", "256MiB") as copied,
        sync_playwright() as playwright,
    ):
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = _open(browser, tree.url, "light", DESKTOP)
        _ask(page)
        _open_tree(page)
        _write(page.screenshot(), "ui-light")
        page = _open(browser, tree.url, "light", PHONE)
        _ask(page)
        _open_tree(page)
        _write(page.screenshot(), "ui-phone")
        page = _open(browser, copied.url, "dark", DESKTOP)
        page.click("[data-mode=race]")
        races: list[tuple[float, bytes]] = []
        for _ in range(1 + NUM_RACES):
            _ask(page)
            page.wait_for_selector('#play:text-is("▶")', timeout=60_000)
            page.eval_on_selector("#prompt", "e => e.blur()")
            factor = float(page.inner_text("#verdict").partition("\u00d7")[0])
            ratio = factor if "as fast" in page.inner_text("#verdict") else 1 / factor
            races.append((ratio, page.screenshot()))
        # Not the first, which warms the server up; the one in the middle of the others.
        _write(sorted(races[1:])[NUM_RACES // 2][1], "ui-dark")
        browser.close()
    return 0


def _open(browser: Browser, url: str, scheme: str, size: dict[str, int]) -> Page:
    page = browser.new_context(color_scheme=scheme, viewport=size).new_page()
    page.goto(f"{url}/ui")
    page.wait_for_timeout(2500)  # two readings of /metrics
    return page


def _ask(page: Page) -> None:
    page.fill("#prompt", DEFAULT_PROMPT)
    page.press("#prompt", "Enter")
    page.wait_for_selector('#send:text-is("Send")', timeout=60_000)
    page.wait_for_timeout(1500)


def _open_tree(page: Page) -> None:
    """The step that drafted a tree and had most of its drafts accepted."""
    found: list[tuple[int, int]] = []
    tokens = page.locator(".answer > .block .t")  # not those of the thinking, which is folded
    first, last = (int(one.get_attribute("data-s") or 0) for one in (tokens.first, tokens.last))
    for index in range(first, last + 1):
        page.eval_on_selector(f'.answer .t[data-s="{index}"]', "e => e.click()")
        if "a tree" in page.inner_text("#step-head"):
            num_accepted = page.locator('#step-tree [data-accepted="yes"]').count()
            found.append((min(num_accepted, 3), -index))
    page.keyboard.press("Escape")
    page.eval_on_selector(f'.answer .t[data-s="{-max(found)[1]}"]', "e => e.click()")
    page.eval_on_selector("#prompt", "e => e.blur()")
    page.wait_for_timeout(300)


def _write(png: bytes, name: str) -> None:
    """As a PNG of few colours, a quarter of the size."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    few = picture.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    sys.exit(main())
