"""The list of conversations: kept in the browser, within bounds, and where nothing is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.real_server import RealServer
from tests.ui.conftest import PHONE, Visit
from tests.ui.steps import answering, sent, spans, step_of

KEY = "openspec-chats"


def chat_of(title: str, content: str, drafts: int = 1, **more: object) -> dict:
    """A conversation as the page stores it; each draft takes some 30 characters."""
    step = {**step_of(["a", "b"], ["long draft"] * drafts, accepted=[0]), "at": 0.1}
    run = {"path": "v1/chat/completions", "body": None, "steps": [step], "content": content}
    run |= {"thinking": "", "seconds": 0.1, "finish": "stop"}
    turn = {"asked": title, "runs": [run]}
    return {"id": hash(title), "title": title, "at": 0, "turns": [turn], **more}


def put(visit: Visit, chats: object) -> None:
    visit.page.evaluate(f"chats => localStorage.setItem('{KEY}', JSON.stringify(chats))", chats)


def stored(visit: Visit) -> list[dict]:
    return json.loads(visit.page.evaluate(f"localStorage.getItem('{KEY}')") or "[]")


def titles(visit: Visit) -> list[str]:
    """What the list shows; it opens, and closes again."""
    visit.page.click("#chats-open")
    shown = visit.page.eval_on_selector_all(
        "#chat-list li > :first-child", "all => all.map((e) => e.firstChild.data)"
    )
    visit.page.click("#chats-close")
    return shown


def switch(visit: Visit, title: str) -> None:
    visit.page.click("#chats-open")
    visit.page.click(f'#chat-list button:has-text("{title}")')
    visit.settle()


def act(visit: Visit, name: str, title: str, reply: str = "") -> None:
    visit.page.click("#chats-open")
    visit.replies.append(reply)
    visit.page.click(f'[aria-label="{name}: {title}"]')
    visit.page.click("#chats-close")


def test_a_reload_goes_on_where_it_was(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    one.ask("What comes after Tuesday?")
    first = spans(one)
    one.page.click("#clear")
    assert not spans(one)
    one.ask("What is six times seven?")
    one.ask("Thanks")
    second = spans(one)
    one.page.reload()
    one.settle()
    assert spans(one) == second
    assert titles(one) == ["What is six times seven?", "What comes after Tuesday?"]
    switch(one, "Tuesday")
    assert spans(one) == first
    bodies = sent(one)
    one.ask("And then?")
    questions = [message["content"] for message in bodies[0]["messages"]][::2]
    assert questions == ["What comes after Tuesday?", "And then?"]
    # The one that was answered last comes first.
    assert titles(one) == ["What comes after Tuesday?", "What is six times seven?"]
    # Another tab has the list and starts anew.
    other = one.page.context.new_page()
    other.goto(f"{real.url}/ui")
    other.wait_for_selector("#examples button")
    assert len(json.loads(other.evaluate(f"localStorage.getItem('{KEY}')"))) == 2


def test_rename_and_delete(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    for prompt in ("first\nmore", "second"):
        one.page.click("#clear")
        one.ask(prompt)
    assert titles(one) == ["second", "first"]
    act(one, "Rename", "first", "The oldest")
    act(one, "Rename", "second", "  ")  # a title of nothing is none
    assert titles(one) == ["second", "The oldest"]
    switch(one, "The oldest")
    one.ask("again")
    assert titles(one) == ["The oldest", "second"]
    act(one, "Delete", "second")
    assert titles(one) == ["The oldest"] and one.page.locator(".turn").count() == 2
    act(one, "Delete", "The oldest")
    assert titles(one) == [] and one.page.is_visible("#examples")
    one.ask("third")
    one.page.click("#chats-open")
    one.page.click("#chat-all")  # refused: the question is a message
    assert one.messages == ["Delete all conversations?"] and len(stored(one)) == 1
    one.messages.clear()
    one.replies.append("")
    one.page.click("#chat-all")
    assert not stored(one) and one.page.is_visible("#chat-new")
    assert one.page.evaluate("document.activeElement.id") == "chat-new"


def test_a_file_becomes_one_of_the_list(
    visit: Callable[..., Visit], scripted: RunningServer, tmp_path: Path
) -> None:
    one = visit(scripted.url)
    one.ask("first")
    act(one, "Rename", "first", "a name")
    with one.page.expect_download() as download:
        one.page.click("#save")
    download.value.save_as(tmp_path / "run.json")
    one.page.click("#clear")
    one.ask("second")
    one.page.set_input_files("#file", tmp_path / "run.json")
    one.page.wait_for_selector('.asked:text-is("first")')
    assert titles(one) == ["a name", "second", "a name"]
    one.page.reload()
    one.settle()
    assert one.page.inner_text(".asked") == "first"


def test_the_oldest_goes_where_there_are_too_many(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    one = visit(scripted.url)
    put(one, [chat_of(f"number {at}", "x") for at in range(50)])
    one.ask("one more")
    assert "oldest conversation is gone" in one.page.inner_text("#note")
    assert titles(one) == ["one more", *(f"number {at}" for at in range(49))]


def test_the_oldest_lose_their_steps_where_room_is_short(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    one = visit(scripted.url)
    put(one, [chat_of(f"number {at}", "**said**", 15_000) for at in range(5)])
    size = one.page.evaluate(f"localStorage.getItem('{KEY}').length")
    assert 1_600_000 < size < 2_000_000
    put(one, [chat_of(f"number {at}", "**said**", 15_000) for at in range(6)])
    one.ask("one more")
    assert "lost its steps" in one.page.inner_text("#note")
    kept = stored(one)
    assert len(kept) == 7 and len(json.dumps(kept, separators=(",", ":"))) <= 2_000_000
    has_steps = [bool(chat["turns"][0]["runs"][0]["steps"]) for chat in kept]
    assert has_steps == [True] * 6 + [False]
    # Its text is there all the same, and it goes on.
    switch(one, "number 5")
    assert one.page.inner_text(".prose strong") == "said"
    assert one.page.inner_text(".meta span") == "Its steps are not kept"
    assert not one.page.is_visible(".answer")
    bodies = sent(one)
    one.ask("and?")
    assert bodies[0]["messages"][1] == {"role": "assistant", "content": "**said**"}


@pytest.mark.parametrize("size", [700_000, 2_100_000])
def test_long_texts(visit: Callable[..., Visit], scripted: RunningServer, size: int) -> None:
    """They push others out, and what is longer than the whole list pushes nobody."""
    one = visit(scripted.url, setup=answering([step_of(["x" * size])]))
    put(one, [chat_of(f"number {at}", "x" * 700_000) for at in range(2)])
    one.ask("long")
    one.wait()
    words = "too long for the list" if size > 2_000_000 else "oldest conversation is gone"
    assert words in one.page.inner_text("#note")
    left = ["number 0", "number 1"] if size > 2_000_000 else ["long", "number 0"]
    assert titles(one) == left


REFUSING = {
    "no storage": "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty("
    "window, name, { get() { throw new DOMException('no', 'SecurityError'); } });",
    "no room": "Storage.prototype.setItem = () => {"
    " throw new DOMException('no', 'QuotaExceededError'); };",
}


@pytest.mark.parametrize("how", REFUSING)
def test_without_storage(visit: Callable[..., Visit], scripted: RunningServer, how: str) -> None:
    one = visit(scripted.url, setup=lambda page: page.add_init_script(REFUSING[how]))
    one.ask("first")
    assert "until the page is closed" in one.page.inner_text("#note")
    one.page.click("#clear")
    one.ask("second")
    assert titles(one) == ["second", "first"]
    assert "the browser stores none" in one.page.text_content("#chat-hint")
    switch(one, "first")
    assert one.page.inner_text(".asked") == "first"
    act(one, "Delete", "second")
    assert titles(one) == ["first"]
    one.page.reload()
    one.settle()
    assert titles(one) == []


@pytest.mark.parametrize(
    "chats",
    [
        {"a": 1},
        [None, 3, "x", {}, {"title": "x", "turns": []}],
        [{"title": "x", "turns": [{"asked": 1}]}, {"title": "x", "turns": [{}, None]}],
        [{"title": "x", "turns": [{"asked": "x", "runs": []}]}],
        [{"title": 1, "turns": []}],
    ],
)
def test_what_is_no_conversation_is_left_out(
    visit: Callable[..., Visit], scripted: RunningServer, chats: object
) -> None:
    one = visit(scripted.url)
    put(one, chats)
    one.page.reload()
    one.ask("hello")
    assert titles(one) == ["hello"]
    one.page.evaluate(f"localStorage.setItem('{KEY}', '{{not JSON')")
    one.ask("again")
    assert titles(one) == ["hello"]


def test_hostile_titles_are_text(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    title = "<img src=x onerror=\"document.title='pwned'\">\u202e" + "x" * 500
    one.ask(title)
    one.page.click("#chats-open")
    assert one.page.inner_text("#chat-list li button").startswith("<img src=x onerror=")
    assert "\u202e" not in one.page.inner_text("#chat-list") and one.page.title() == "openspec"
    assert not one.page.query_selector("#chat-list img")
    box = one.page.locator("#chat-list li").bounding_box()
    assert box["height"] < 80 and box["width"] < 400
    assert stored(one)[0]["title"] == title[:80]


def test_a_question_under_way_survives(visit: Callable[..., Visit], fake_model_folder) -> None:
    with run_fake_server(fake_model_folder, {"step_s": 0.05}) as slow:
        one = visit(slow.url)
        one.page.fill("#prompt", "go on")
        one.page.press("#prompt", "Enter")
        one.page.wait_for_selector(".answer .t")
        one.page.click("#chats-open")  # not while it answers
        assert not one.page.is_visible("#chats")
        one.page.reload()
        one.settle()
        assert one.page.inner_text(".asked") == "go on" and spans(one)
        assert one.page.inner_text(".meta span").endswith("stopped")
        one.page.goto("about:blank")


def test_by_keyboard(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    for prompt in ("first", "second"):
        one.page.click("#clear")
        one.ask(prompt)
    keyboard = one.page.keyboard
    focused = "(e => e.getAttribute('aria-label') || e.firstChild.data)(document.activeElement)"
    one.page.focus("#chats-open")
    keyboard.press("Enter")
    assert one.page.get_attribute('#chat-list button:has-text("second")', "aria-current") == "true"
    reached = []
    for _ in range(9):
        reached.append(one.page.evaluate(focused))
        keyboard.press("Tab")
    order = ["Close", "New", "second", "Rename: second", "Delete: second", "first"]
    assert reached == [*order, "Rename: first", "Delete: first", "Delete all"]
    keyboard.press("Escape")
    assert not one.page.is_visible("#chats")
    assert one.page.evaluate(focused) == "Conversations"
    keyboard.press("Enter")
    for _ in range(3):
        keyboard.press("Tab")
    one.replies.append("renamed")
    keyboard.press("Enter")
    assert one.page.evaluate(focused) == "renamed"  # the focus stays with the conversation
    keyboard.press("Tab")
    keyboard.press("Tab")
    keyboard.press("Tab")
    keyboard.press("Enter")
    assert one.page.inner_text(".asked") == "first"


def test_on_a_phone(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, viewport=PHONE, has_touch=True)
    for prompt in ("first", "a much longer question, so long that its title has no room " * 2):
        one.page.tap("#clear")
        one.ask(prompt)
    header = one.page.locator("header").bounding_box()
    assert header["height"] < 110
    one.page.tap("#chats-open")
    box = one.page.locator("#chats").bounding_box()
    assert box["x"] == 0 and box["width"] <= PHONE["width"]
    for button in one.page.locator("#chats button").all():
        place = button.bounding_box()
        assert place["x"] >= 0 and place["x"] + place["width"] <= box["width"]
    one.page.tap('#chat-list button:has-text("first")')
    assert one.page.inner_text(".asked") == "first"
    assert one.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
