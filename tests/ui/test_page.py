"""The page `/ui` in a browser."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.real_server import RealServer
from tests.ui.conftest import PHONE, Visit
from tests.ui.steps import answering, recorded, spans, step_of, tint

CODE = "Rewrite this code with `a` renamed to `b`:\n\n```python\ndef f(a):\n    return a + a\n```"
LONG = "Repeat: one two three four five six seven eight nine ten eleven twelve. " * 4
STYLES = ["solid", "dashed", "dotted", "double", "wavy", "dotted"]


def think_not(visit: Visit) -> None:
    """What is folded cannot be clicked."""
    visit.page.click("#more")
    visit.page.select_option("#thinking", "off")
    visit.page.click("#more")


def test_first_load(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    """Small and soon, by the browser's own clock; the best of three, for others use the machine."""
    best = math.inf
    for _ in range(3):
        one = visit(scripted.url)
        entry = one.page.evaluate(
            "() => { const e = performance.getEntriesByType('navigation')[0];"
            " return [e.loadEventEnd, e.decodedBodySize]; }"
        )
        best = min(best, entry[0])
        assert entry[1] < 80_000
    assert best < 300


@pytest.mark.parametrize("view", ["chat", "completion"])
def test_colours_of_200_tokens(visit: Callable[..., Visit], real: RealServer, view: str) -> None:
    one = visit(real.url)
    runs = recorded(one)
    one.page.click(f"[data-mode={view}]")
    one.page.click("#more")
    one.page.fill("#max-tokens", "200")
    one.ask(LONG if view == "chat" else "def total(values):\n    result = 0\n")
    (steps,) = runs
    expected = [
        [text, "d " + tint(i + 1) if i < len(step["accepted"]) else "o", str(index)]
        for index, step in enumerate(steps)
        for i, text in enumerate(step["tokens"])
    ]
    assert len(expected) > 100
    shown = [[text, " ".join(name.split()[1:3]), step] for text, name, step in spans(one)]
    shown = [[text, name if name[0] == "d" else "o", step] for text, name, step in shown]
    assert shown == expected
    names = {name for _, name, _ in shown}
    assert "o" in names and len(names) > 3
    # Colour is not alone: every tint has a line of its own.
    style = one.page.eval_on_selector_all(
        "#legend .d", "all => all.map((t) => getComputedStyle(t).textDecorationStyle)"
    )
    assert style == STYLES
    lines = one.page.eval_on_selector_all(
        "#legend .d", "all => all.map((t) => getComputedStyle(t).textDecorationLine)"
    )
    assert lines == ["underline"] * 5 + ["underline overline"]
    assert one.page.locator("#answer-numbers dd").nth(3).inner_text() == str(len(expected))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_a_grammar_forced(visit: Callable[..., Visit], real: RealServer, scheme: str) -> None:
    one = visit(real.url, color_scheme=scheme)
    runs = recorded(one)
    one.page.click("#more")
    one.page.fill("#form-of", "The answer to the question is [0-9]{1,3}, and nothing else\\.")
    one.ask("What is six times seven?")
    (steps,) = runs
    expected = []
    for index, step in enumerate(steps):
        for i, text in enumerate(step["tokens"]):
            is_draft = i < len(step["accepted"])
            name = "o"
            if is_draft:
                is_grammars = step["accepted"][i] < step["num_forced_tokens"]
                name = "pf" if is_grammars else tint(i + 1)
            expected.append((text, name, str(index)))
    kinds = {"o", "pf", *map(tint, range(1, 9))}
    shown = [
        (text, next(name for name in names.split() if name in kinds), step)
        for text, names, step in spans(one)
    ]
    assert shown == expected
    assert sum(name == "pf" for _, name, _ in shown) >= 3
    colour = one.page.eval_on_selector(".answer .pf", "e => getComputedStyle(e).backgroundColor")
    assert colour != one.page.eval_on_selector(".p1", "e => getComputedStyle(e).backgroundColor")
    forced = sum(step["num_forced_tokens"] for step in steps)
    names = one.page.locator("#answer-numbers dt").all_inner_texts()
    values = one.page.locator("#answer-numbers dd").all_inner_texts()
    assert dict(zip(names, values, strict=True))["forced"] == str(forced)
    # And the step's drawing names them.
    index = max(range(len(steps)), key=lambda at: steps[at]["num_forced_tokens"])
    one.page.eval_on_selector(f'.answer .t[data-s="{index}"]', "e => e.click()")
    named = one.page.locator('#step-tree tspan:text-is("forced")').count()
    assert named == steps[index]["num_forced_tokens"]


def test_the_tree_is_the_apis(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    runs = recorded(one)
    think_not(one)
    one.page.click("#more")
    one.page.fill("#temperature", "1")
    one.ask("Continue this scene: ROMEO: But soft, what light through yonder window breaks?")
    steps = runs[0]
    trees = [
        index
        for index, step in enumerate(steps)
        if step["draft_parents"] != list(range(-1, len(step["draft_parents"]) - 1))
    ]
    assert trees, "no step drafted a tree"
    for index in [*trees[:4], 0]:
        step = steps[index]
        one.page.locator(f'.answer .t[data-s="{index}"]').first.click()
        edges = one.page.eval_on_selector_all(
            "#step-tree path", "all => all.map((e) => [e.dataset.from, e.dataset.to])"
        )
        last = step["accepted"][-1] if step["accepted"] else -1
        expected = [[str(p), str(i)] for i, p in enumerate(step["draft_parents"])]
        has_own = len(step["token_ids"]) > len(step["accepted"])
        assert sorted(edges) == sorted(expected + [[str(last), "own"]] * has_own)
        accepted = one.page.eval_on_selector_all(
            '#step-tree [data-accepted="yes"]', "all => all.map((e) => Number(e.dataset.draft))"
        )
        assert sorted(accepted) == sorted(step["accepted"])
        scores = one.page.eval_on_selector_all(
            "#step-tree [data-score]", "all => all.map((e) => Number(e.dataset.score))"
        )
        assert sorted(scores) == sorted(step.get("draft_scores", []))
        assert (
            f"{len(step['accepted'])} of {len(step['draft_tokens'])} drafts"
            in (one.page.inner_text("#step-head"))
            or not step["draft_tokens"]
        )


def test_keyboard_only(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    keyboard = one.page.keyboard

    def tab_to(selector: str) -> None:
        for _ in range(150):
            keyboard.press("Tab")
            if one.page.evaluate("s => document.activeElement.matches(s)", selector):
                return
        pytest.fail(f"Tab does not lead to {selector}")

    tab_to("#modes button")
    keyboard.press("ArrowRight")
    assert one.page.get_attribute("[data-mode=completion]", "aria-checked") == "true"
    keyboard.press("ArrowLeft")
    tab_to("#more")
    keyboard.press("Enter")
    tab_to("#max-tokens")
    keyboard.press("Control+A")
    keyboard.type("60")
    tab_to("#prompt")
    keyboard.type("Repeat: one two three four five six seven eight nine ten eleven twelve.")
    keyboard.press("Enter")
    one.wait()
    one.page.evaluate("document.activeElement.blur()")
    tab_to(".answer")
    keyboard.press("Home")
    keyboard.press("ArrowRight")
    assert one.page.inner_text("#step-head").startswith("2 of")
    selected = one.page.eval_on_selector_all(".sel", "all => all.map((t) => t.dataset.s)")
    assert set(selected) == {"1"}
    outline = one.page.eval_on_selector(".answer", "e => getComputedStyle(e).outlineStyle")
    assert outline != "none"
    keyboard.press("Escape")
    assert not one.page.query_selector(".sel")


def test_32k_tokens_stay_responsive(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    words = ["lorem", " ipsum", " dolor", " sit", ",\n"]
    steps = [step_of(words) for _ in range(32_000 // len(words))]
    gap = math.inf
    for _ in range(3):  # frames of 50 ms on an idle machine; others may use this one
        one = visit(scripted.url, setup=answering(steps))
        one.page.evaluate(
            "() => { window.gap = 0; let last = performance.now(); const f = (now) => {"
            " window.gap = Math.max(window.gap, now - last); last = now; requestAnimationFrame(f);"
            " }; requestAnimationFrame(f); }"
        )
        one.page.fill("#prompt", "x")
        one.page.press("#prompt", "Enter")
        one.wait()
        one.page.wait_for_selector(f'.answer .t[data-s="{len(steps) - 1}"]', state="attached")
        gap = min(gap, one.page.evaluate("window.gap"))
        if gap < 300:
            break
    assert gap < 300
    assert len(spans(one)) == 32_000
    began = time.monotonic()
    one.page.focus(".answer")
    one.page.keyboard.press("End")
    one.page.keyboard.press("ArrowLeft")
    assert one.page.inner_text("#step-head").startswith(f"{len(steps) - 1} of {len(steps)}")
    assert time.monotonic() - began < 2


def test_hostile_answer_is_text(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    hostile = [
        "<script>document.title='pwned'</script>",
        "<img src=x onerror=\"document.title='pwned'\">",
        "\x1b[31mred\x1b[0m\x07\x00",
        "\u202eright to left\u2066",
        "</div></body><style>*{display:none}</style>",
        "x" * 1_000_000,
    ]
    steps = [step_of([text, "."], [text]) for text in hostile]
    one = visit(scripted.url, setup=answering(steps))
    one.page.fill("#prompt", "<b>bold</b>\u202e")
    one.page.press("#prompt", "Enter")
    one.wait()
    text = one.page.eval_on_selector(".answer", "e => e.textContent")
    for part in (hostile[0], hostile[1], hostile[4]):
        assert part in text
    assert "␛[31mred␛[0m␇␀" in text and "[U+202E]right to left[U+2066]" in text
    assert not set(text) & set("\x1b\x07\x00\u202e\u2066")
    assert text.count("x") >= 1_000_000
    tags = one.page.eval_on_selector_all(
        ".turn *", "all => [...new Set(all.map((e) => e.tagName))]"
    )
    assert set(tags) <= {"P", "DIV", "SPAN", "I", "BUTTON"}
    assert one.page.title() == "openspec"
    assert one.page.inner_text(".asked") == "<b>bold</b>[U+202E]"
    wide = one.page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0
    for index in range(len(hostile)):  # and so is the drawing
        one.page.eval_on_selector(f'.answer .t[data-s="{index}"]', "e => e.click()")
        tags = one.page.eval_on_selector_all(
            "#step-tree *", "all => [...new Set(all.map((e) => e.tagName))]"
        )
        assert set(tags) <= {"svg", "path", "g", "circle", "text", "tspan", "rect"}
        one.page.keyboard.press("Escape")


def test_key_stays_in_the_tab(visit: Callable[..., Visit], fake_model_folder: Path) -> None:
    with run_fake_server(fake_model_folder, api_key=["secret-key"]) as server:
        one = visit(server.url, {"401"})
        one.page.wait_for_selector("#key-dialog[open]")
        one.page.fill("#key-input", "secret-key")
        one.page.keyboard.press("Enter")
        one.page.wait_for_selector('#key:text-is("Key ✓")')
        one.ask("hello")
        assert spans(one)
        assert "secret-key" not in one.page.evaluate("JSON.stringify({...localStorage})")
        assert one.page.evaluate("document.cookie") == ""
        one.page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; }")
        one.page.click("#curl")
        one.settle()
        copied = one.page.evaluate("window.copied")
        assert "secret-key" not in copied and '"$OPENSPEC_API_KEY"' not in copied
        assert "$OPENSPEC_API_KEY" in copied and '"detailed":true' in copied
        one.page.click("#key")
        one.page.click('#key-dialog button[value="forget"]')
        one.page.wait_for_selector('#model:text-is("needs an API key")')
        one.page.goto("about:blank")  # or it asks a server that is gone


def test_saved_run_opens_again(visit: Callable[..., Visit], real: RealServer, tmp_path) -> None:
    one = visit(real.url)
    one.ask("What comes after Tuesday?")
    before = spans(one)
    with one.page.expect_download() as download:
        one.page.click("#save")
    download.value.save_as(tmp_path / "run.json")
    one.page.click("#clear")
    assert not spans(one)
    one.page.set_input_files("#file", tmp_path / "run.json")
    one.settle()
    assert spans(one) == before


def test_behind_a_path_prefix(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    """As behind a proxy that takes /some/where off."""

    def forward(route) -> None:
        route.continue_(url=route.request.url.replace("/some/where", ""))

    one = visit(
        f"{scripted.url}/some/where", setup=lambda page: page.route("**/some/where/**", forward)
    )
    one.ask("hello")
    assert spans(one)
    paths: list[str] = []
    one.page.on("request", lambda request: paths.append(request.url))
    one.page.wait_for_timeout(1200)
    assert paths and all("/some/where/" in path for path in paths)


def test_phone(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url, viewport=PHONE, has_touch=True)
    think_not(one)
    one.ask(CODE)
    assert one.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    one.page.locator(".answer > .block .t.d").first.tap()
    box = one.page.locator("#step").bounding_box()
    assert box is not None and box["y"] + box["height"] <= PHONE["height"] + 1 and box["y"] > 0
    one.page.locator("#step-close").tap()
    assert not one.page.query_selector(".picked")


def test_refusals_are_shown(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, {"400"})
    one.page.click("#more")
    one.page.fill("#temperature", "1000")
    one.ask("hello")
    assert "temperature" in one.page.inner_text("[role=alert]")


def test_figures_divide(visit: Callable[..., Visit], real: RealServer) -> None:
    """Below the answer and beside it: one number of tokens, one time, and their ratio."""
    one = visit(real.url)
    one.ask("What comes after Tuesday?")
    found = re.match(
        r"([\d,]+) tokens in ([\d,]+) steps · ([\d.]+) s · ([\d,]+) tokens a second",
        one.page.inner_text(".meta span"),
    )
    assert found is not None
    tokens, steps, seconds, rate = (float(number.replace(",", "")) for number in found.groups())
    assert rate == pytest.approx(tokens / seconds, rel=0.01, abs=0.51)
    names = one.page.locator("#answer-numbers dt").all_inner_texts()
    values = one.page.locator("#answer-numbers dd").all_inner_texts()
    shown = dict(zip(names, values, strict=True))
    assert (shown["tokens"], shown["steps"]) == (str(int(tokens)), str(int(steps)))
    assert shown["tokens a second"] == found[4]
    assert 0 < float(shown["first token"].split()[0].replace(",", "")) <= 1000 * seconds + 1


def test_acceptance_is_of_the_drafts_that_reached_a_position(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    """Three short drafts that are right, a longer one that is wrong at its second token, a tree."""
    wrong = step_of(["a", "b"], ["a", "x"], accepted=[0])
    tree = step_of(["a", "b", "c"], ["a", "y", "b"], draft_parents=[-1, -1, 0], accepted=[0, 2])
    steps = [*[step_of(["a", "b"]) for _ in range(3)], wrong, tree]
    one = visit(scripted.url, setup=answering(steps))
    one.ask("x")
    title = one.page.get_attribute("#positions svg", "aria-label")
    assert title == "Acceptance by position: 1: 100 percent, 2: 50 percent"


def test_no_step_of_an_older_answer(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, setup=answering([step_of(["a", "b"])]))
    one.ask("x")

    def pick() -> None:
        one.page.locator(".answer .t").last.click()
        assert one.page.inner_text("#step-head") and one.page.query_selector("#step-tree svg")

    def is_clear() -> bool:
        return not (one.page.inner_text("#step-head") or one.page.query_selector("#step-tree svg"))

    pick()
    one.ask("y")
    assert is_clear() and one.page.is_visible("#step-hint")
    pick()
    one.page.click("[data-mode=completion]")
    assert is_clear()
    assert set(one.page.locator("#answer-numbers dd").all_inner_texts()) == {"\u2013", "0"}
    one.page.click("[data-mode=chat]")
    pick()
    one.page.click("#clear")
    assert is_clear()


def test_an_answer_without_drafts_has_no_acceptance_length(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    one = visit(scripted.url, setup=answering([step_of(["a"]), step_of([""])]))
    one.ask("x")
    values = one.page.locator("#answer-numbers dd").all_inner_texts()
    assert values[1:3] == ["\u2013"] * 2
    # The token that ends an answer says what it is.
    one.page.locator(".answer .void").hover()
    assert "the end of the answer" in one.page.inner_text("#tip")


def test_line_marks_stand_where_lines_end(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    one = visit(scripted.url, setup=answering([step_of(["):\n    ", "x\n\n"])]))
    one.ask("x")
    one.page.check("#show-steps")
    order = "e => [...e.childNodes].map((n) => n.nodeType === 3 ? n.data : n.className)"
    first, last = (one.page.locator(".answer .t").nth(at).evaluate(order) for at in (0, 1))
    assert first == ["):", "nl", "\n", "    "]
    assert last == ["x", "nl", "\n", "nl", "\n"]
    assert one.page.eval_on_selector(".nl", "e => getComputedStyle(e, '::before').content") == '"↵"'
    one.page.uncheck("#show-steps")
    assert (
        one.page.eval_on_selector(".nl", "e => getComputedStyle(e, '::before').content") == "none"
    )


def test_words_are_explained(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    """All of them, by pointer and by keyboard, inside the window."""
    one = visit(scripted.url)
    one.page.wait_for_selector("#server-numbers .word")
    one.page.click("#more")
    one.page.click("#live summary")
    names = one.page.eval_on_selector_all("[data-word]", "all => all.map((e) => e.dataset.word)")
    explained = one.page.evaluate("Object.keys(WORDS)")
    # Rows are named once a step is shown, and a grammar's tokens where there are some.
    assert set(names) | {"rows", "forced"} == set(explained)
    for at in range(len(names)):
        target = one.page.locator("[data-word]").nth(at)
        if not target.is_visible():
            continue
        target.focus()
        assert one.page.inner_text("#tip") == one.page.evaluate("w => WORDS[w]", names[at])
        box = one.page.locator("#tip").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 1360
        assert box["y"] >= 0 and box["y"] + box["height"] <= 860
        one.page.keyboard.press("Escape")
        assert not one.page.is_visible("#tip")


def test_the_servers_figures_are_in_sight(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url, viewport={"width": 1360, "height": 900})
    think_not(one)
    one.ask(LONG)
    one.page.locator(".answer > .block .t.d").first.click()
    box = one.page.locator("#server-numbers").bounding_box()
    assert box["y"] + box["height"] <= one.page.locator("footer").bounding_box()["y"]


def test_long_prompts_leave_the_button_as_it_is(
    visit: Callable[..., Visit], scripted: RunningServer
) -> None:
    one = visit(scripted.url)
    before = one.page.locator("#send").bounding_box()["height"]
    one.page.fill("#prompt", "line\n" * 12)
    assert one.page.locator("#prompt").bounding_box()["height"] > 2 * before
    assert one.page.locator("#send").bounding_box()["height"] == before
    one.page.press("#prompt", "Enter")
    one.wait()
    one.page.fill("#prompt", CODE)
    one.page.press("#prompt", "Enter")
    one.wait()
    asked = one.page.locator(".turn .asked").last
    assert asked.inner_text() == CODE
    code = "".join(asked.locator(".mono").all_text_contents())
    assert code == CODE[CODE.index("```") :]
