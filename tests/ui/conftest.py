"""A browser, and servers whose page it opens. Without one, all tests here are skipped at once."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.fake_model import write_fake_model
from tests.serve.real_server import RealServer, real_server

try:
    from playwright import sync_api as playwright_api
except ModuleNotFoundError:
    playwright_api = None  # see `_missing`

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP, PHONE = {"width": 1360, "height": 860}, {"width": 390, "height": 844}


@functools.cache
def _missing() -> str | None:
    """What these tests lack, and how to get it."""
    if playwright_api is None:
        return 'needs Playwright: pip install "playwright>=1.50", or the extra ui-tests'
    if CHROMIUM is None:
        with playwright_api.sync_playwright() as playwright:
            if not Path(playwright.chromium.executable_path).exists():
                return "needs a browser: apt-get install chromium, or CHROMIUM=/path/to/it"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture starts a server."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)


@dataclass
class Visit:
    """One page of one tab, and what went wrong or elsewhere while it was open."""

    page: playwright_api.Page
    url: str
    messages: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    replies: list[str] = field(default_factory=list)

    def reply(self, dialog: playwright_api.Dialog) -> None:
        """Accepts what the page asks with the next of `replies`; without one it is a message."""
        if self.replies:
            dialog.accept(self.replies.pop(0))
            return
        self.messages.append(dialog.message)
        dialog.dismiss()

    def ask(self, prompt: str) -> None:
        """Sends a prompt and waits for the end of the answer."""
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Enter")
        self.wait()

    def wait(self, timeout_ms: float = 90_000) -> None:
        """Until nothing streams and everything is drawn."""
        self.page.wait_for_selector('#send:text-is("Send")', timeout=timeout_ms)
        self.settle()

    def settle(self) -> None:
        """Two frames: what is drawn in the next one is there."""
        self.page.evaluate(
            "() => new Promise((done) => "
            "requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[playwright_api.Browser]:
    with playwright_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: playwright_api.Browser) -> Iterator[Callable[..., Visit]]:
    """Opens a page; at the end nothing may have failed and no other host been asked."""
    visits: list[tuple[Visit, set[str]]] = []

    def open_page(
        url: str, expected: set[str] = frozenset(), setup: Callable | None = None, **options: object
    ) -> Visit:
        options.setdefault("viewport", DESKTOP)
        context = browser.new_context(**options)
        page = context.new_page()
        one = Visit(page, url)
        page.on("console", lambda message: one.messages.append(message.text))
        page.on("pageerror", lambda error: one.messages.append(str(error)))
        page.on("dialog", one.reply)
        page.on("request", lambda request: one.hosts.add(request.url.split("/")[2]))
        if setup is not None:
            setup(page)
        page.goto(f"{url}/ui")
        visits.append((one, set(expected)))
        return one

    yield open_page
    for one, expected in visits:
        one.page.context.close()
        unexpected = [m for m in one.messages if not any(text in m for text in expected)]
        assert not unexpected
        # A data: address, the page's own icon, has no host.
        assert one.hosts <= {one.url.split("/")[2], "www.w3.org"}, one.hosts


@pytest.fixture(scope="session")
def real() -> Iterator[RealServer]:
    """Trees with scores in every step."""
    arguments = (
        "--method",
        "eagle3",
        "--method-option=draft_top_k=3",
        "--num-speculative-tokens",
        "6",
    )
    with real_server(*arguments, "--no-adaptive-speculation", "--kv-cache-memory", "256MiB") as one:
        yield one


@pytest.fixture(scope="session")
def fake_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="session")
def scripted(fake_model_folder: Path) -> Iterator[RunningServer]:
    with run_fake_server(fake_model_folder) as server:
        yield server
