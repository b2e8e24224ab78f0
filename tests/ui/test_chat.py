"""A conversation on the page: what is sent, what can be done with an answer, and how it reads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx
import pytest

from openspec.tools.demo import DEFAULT_PROMPT
from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.real_server import RealServer
from tests.ui.conftest import Visit
from tests.ui.steps import answering, recorded, sent, spans, step_of


def test_the_first_example_comes_out_right(visit: Callable[..., Visit], real: RealServer) -> None:
    """With whatever the page sends unasked, and with the embedded model."""
    one = visit(real.url)
    bodies = sent(one)
    one.page.click("#examples button")
    one.wait()
    assert bodies[0]["messages"] == [{"role": "user", "content": DEFAULT_PROMPT}]
    one.page.check("#as-text")
    code = DEFAULT_PROMPT.split("```python\n")[1].removesuffix("\n```")
    assert one.page.inner_text(".prose pre") == re.sub(r"\bstart\b", "first", code)


def test_a_tree_is_not_capped(visit: Callable[..., Visit], real: RealServer) -> None:
    """Unless the field asks for it, every step may have as many drafts as the server makes."""
    info = httpx.get(f"{real.url}/server_info").json()
    most, depth = info["max_draft_tokens"], info["num_speculative_tokens"]
    assert most > depth
    one = visit(real.url)
    runs, bodies = recorded(one), sent(one)
    one.page.wait_for_selector(f'#model:has-text("trees of up to {most} drafts, {depth} deep")')
    assert one.page.get_attribute("#drafts", "max") == str(most)
    assert one.page.get_attribute("#drafts", "placeholder") == str(most)
    one.page.click("#more")
    one.page.fill("#max-tokens", "60")
    one.ask(DEFAULT_PROMPT)
    assert "num_speculative_tokens" not in bodies[0]["speculative"]
    assert max(len(step["draft_tokens"]) for step in runs[0]) == most
    one.page.fill("#drafts", "3")
    one.ask(DEFAULT_PROMPT)
    assert bodies[1]["speculative"]["num_speculative_tokens"] == 3
    assert max(len(step["draft_tokens"]) for step in runs[1]) == 3


def test_what_is_empty_is_not_sent(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    bodies = sent(one)
    one.ask("hello")
    fixed = {"stream": True, "stream_options": {"include_usage": True}}
    fixed["messages"] = [{"role": "user", "content": "hello"}]
    fixed["speculative"] = {"enabled": True, "detailed": True}
    assert bodies[0] == {**fixed, "max_tokens": 512, "temperature": 0, "seed": 1}
    one.page.click("#more")
    one.page.click("#clear")
    for name in ("max-tokens", "temperature", "seed"):
        one.page.fill(f"#{name}", "")
    one.ask("hello")
    assert bodies[1] == fixed


def test_all_settings_are_sent(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    bodies = sent(one)
    one.page.click("#more")
    numbers = {
        "temperature": ("temperature", 0.7),
        "top-p": ("top_p", 0.9),
        "top-k": ("top_k", 40),
        "min-p": ("min_p", 0.05),
        "repetition": ("repetition_penalty", 1.1),
        "presence": ("presence_penalty", 0.5),
        "frequency": ("frequency_penalty", -0.5),
        "seed": ("seed", 7),
        "max-tokens": ("max_tokens", 33),
    }
    for name, (_, value) in numbers.items():
        one.page.fill(f"#{name}", str(value))
    one.page.fill("#system", "Be brief.")
    one.page.fill("#stop-strings", "END\n\\n\\n###\n")
    one.page.select_option("#thinking", "off")
    one.ask("hello")
    (body,) = bodies
    assert {field: body[field] for field, _ in numbers.values()} == dict(numbers.values())
    assert body["stop"] == ["END", "\n\n###"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    request = scripted.engine.requests[-1]
    assert (request.sampling.top_k, request.sampling.stop) == (40, body["stop"])
    one.page.click("[data-mode=completion]")
    one.ask("hello")
    assert not {"messages", "chat_template_kwargs"} & set(bodies[1]) and bodies[1]["stop"]


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ('{"type": "object",\n "properties": {}}', "json"),
        ('root ::= "yes" | "no"', "grammar"),
        ("[a-z]{1,3}", "regex"),
    ],
)
def test_the_form_of_an_answer(
    visit: Callable[..., Visit], real: RealServer, form: str, kind: str
) -> None:
    one = visit(real.url)
    bodies = sent(one)
    one.page.click("#more")
    one.page.fill("#form-of", form)
    one.ask("Say yes or no.")
    assert bodies[0]["structured_outputs"] == {kind: form}
    assert spans(one) and not one.page.query_selector("[role=alert]")


def test_copy_again_and_edit(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    bodies = sent(one)
    one.ask("first")
    one.ask("second")
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    answers = [message["content"] for message in bodies[1]["messages"] if message["role"] != "user"]
    one.page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; }")
    one.page.locator(".turn button:text-is('Copy')").first.click()
    assert one.page.evaluate("window.copied") == answers[0]
    # Again asks the same with what came before it, and takes out what followed.
    one.page.locator(".turn button:text-is('Again')").last.click()
    one.wait()
    assert bodies[2] == bodies[1] and one.page.locator(".turn").count() == 2
    one.page.locator(".turn button:text-is('Edit')").first.click()
    assert one.page.input_value("#prompt") == "first" and not one.page.query_selector(".turn")
    one.ask("changed")
    assert bodies[3]["messages"] == [{"role": "user", "content": "changed"}]
    # A sampled answer gets another seed, or it would be the same one.
    one.page.click("#more")
    one.page.fill("#temperature", "0.8")
    one.page.click(".turn button:text-is('Again')")
    one.wait()
    assert (bodies[3]["seed"], bodies[4]["seed"]) == (1, 2)
    assert one.page.input_value("#seed") == "2"


def test_a_stopped_answer_is_kept(visit: Callable[..., Visit], fake_model_folder) -> None:
    with run_fake_server(fake_model_folder, {"step_s": 0.05}) as slow:
        one = visit(slow.url)
        bodies = sent(one)
        one.page.fill("#prompt", "go on")
        one.page.press("#prompt", "Enter")
        one.page.wait_for_selector(".answer .t")
        one.page.click("#send")
        one.wait()
        assert one.page.inner_text(".meta span").endswith("stopped")
        said = "".join(text for text, _, _ in spans(one))
        one.page.click("#more")
        one.page.fill("#max-tokens", "1")
        one.ask("and then?")
        assert bodies[1]["messages"][1]["role"] == "assistant"
        assert said.startswith(bodies[1]["messages"][1]["content"][:4])


def test_a_refused_prompt_is_not_lost(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, {"400"})
    one.page.click("#more")
    one.page.fill("#temperature", "1000")
    one.ask("a long thought")
    assert one.page.input_value("#prompt") == "a long thought"


def test_an_opened_conversation_goes_on(
    visit: Callable[..., Visit], scripted: RunningServer, tmp_path
) -> None:
    one = visit(scripted.url)
    one.ask("first")
    with one.page.expect_download() as download:
        one.page.click("#save")
    download.value.save_as(tmp_path / "run.json")
    other = visit(scripted.url)
    bodies = sent(other)
    other.page.set_input_files("#file", tmp_path / "run.json")
    other.settle()
    other.ask("second")
    assert [message["content"] for message in bodies[0]["messages"]][::2] == ["first", "second"]


def test_thinking_folds(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    one.ask("What comes after Tuesday?")
    fold = one.page.locator(".answer details")
    assert fold.count() == 1 and not fold.evaluate("e => e.open")
    folded = "".join(fold.locator(".t").all_text_contents())
    assert folded.startswith("<think>") and folded.endswith("</think>")
    outside = "".join(one.page.locator(".answer > .block .t").all_text_contents())
    assert outside.strip() == "After Tuesday comes Wednesday."
    # The arrow keys open it.
    one.page.focus(".answer")
    one.page.keyboard.press("Home")
    assert fold.evaluate("e => e.open")
    one.page.check("#as-text")
    assert one.page.inner_text(".prose > p") == "After Tuesday comes Wednesday."
    assert not one.page.locator(".prose details").evaluate("e => e.open")


def test_thinking_without_tags_folds(
    visit: Callable[..., Visit], scripted: RunningServer, tmp_path
) -> None:
    """As where the prompt opened it and the answer has no tag."""
    thought, said = step_of(["hm", "m"]), step_of(["So", "."])
    setup = answering([thought, said], [{"reasoning_content": "hmm"}, {"content": "So."}])
    one = visit(scripted.url, setup=setup)
    one.ask("x")
    assert one.page.locator(".answer details .t").all_text_contents() == ["hm", "m"]
    assert one.page.locator(".answer > .block .t").all_text_contents() == ["So", "."]


MARKDOWN = """# Title

Some **bold *and* more**, `code <b>`, ~~gone~~ and snake_case_name.
Second line, see https://example.org/a. [named](https://example.org/b "t")

- one
- two
  1. inner
  2. more

> quoted

| a | b |
|---|--:|
| 1 | **2** |

```python
def f(x):
    return x * 2 * 3
```
"""


def test_markdown(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, setup=answering([step_of([MARKDOWN])]))
    one.ask("x")
    assert not one.page.is_visible(".prose") and one.page.is_visible(".answer")
    one.page.check("#as-text")
    assert one.page.is_visible(".prose") and not one.page.is_visible(".answer")
    found = {
        selector: one.page.locator(f".prose {selector}").all_text_contents()
        for selector in (
            "h3",
            "strong",
            "em",
            "p code",
            "del",
            "ul > li",
            "ol > li",
            "blockquote p",
        )
    }
    assert found == {
        "h3": ["Title"],
        "strong": ["bold and more", "2"],
        "em": ["and"],
        "p code": ["code <b>"],
        "del": ["gone"],
        "ul > li": ["one", "twoinnermore"],
        "ol > li": ["inner", "more"],
        "blockquote p": ["quoted"],
    }
    assert one.page.locator(".prose :is(th, td)").all_text_contents() == ["a", "b", "1", "2"]
    assert one.page.inner_text(".prose pre") == "def f(x):\n    return x * 2 * 3"
    assert "snake_case_name" in one.page.inner_text(".prose")
    links = one.page.eval_on_selector_all(
        ".prose a", "all => all.map((a) => [a.text, a.href, a.rel])"
    )
    rel = "noopener noreferrer nofollow"
    assert links == [
        ["https://example.org/a", "https://example.org/a", rel],
        ["named", "https://example.org/b", rel],
    ]
    one.page.uncheck("#as-text")
    assert one.page.is_visible(".answer")


HOSTILE = (
    "<script>document.title='pwned'</script> <img src=x onerror=\"document.title='pwned'\">\n\n"
    "[click](javascript:document.title='pwned') [data](data:text/html,<b>) [up](//evil.example)\n\n"
    '![picture](https://example.org/x.png) [a](https://x.example/"onclick="alert(1))\n\n'
    "| <b>x</b> | \x1b[2J |\n|---|---|\n| \u202e | `</code><i>` |\n\n"
    "```<svg onload=alert(1)>\n</code></pre><script>alert(1)</script>\n"
)


def test_hostile_markdown_is_text(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url, setup=answering([step_of([HOSTILE])]))
    one.page.check("#as-text")
    one.ask("x")
    one.settle()
    tags = one.page.eval_on_selector_all(
        ".prose *", "all => [...new Set(all.map((e) => e.tagName))]"
    )
    assert set(tags) <= {"P", "A", "CODE", "PRE", "TABLE", "TR", "TH", "TD"}
    names = "all => [...new Set(all.flatMap((e) => e.getAttributeNames()))]"
    attributes = one.page.eval_on_selector_all(".prose *", names)
    assert set(attributes) <= {"href", "title", "target", "rel", "class"}
    hrefs = one.page.eval_on_selector_all(".prose a", "all => all.map((a) => a.protocol)")
    assert hrefs and set(hrefs) == {"https:"}
    text = one.page.inner_text(".prose")
    assert "<script>document.title" in text and "javascript:document.title" in text
    assert not set(text) & set("\x1b\u202e") and one.page.title() == "openspec"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000 + "](",
        "**a " * 100_000,
        "_a" * 100_000,
        ">" * 200_000,
        "- " * 100_000,
        ("|" + " " * 999 + "\n") * 200,
        "```\n" * 50_000,
        "\n".join(" " * at + "- x" for at in range(500)),
    ],
    ids=["brackets", "stars", "underscores", "quotes", "lists", "table", "fences", "steps"],
)
def test_markdown_takes_linear_time(
    visit: Callable[..., Visit], scripted: RunningServer, text: str
) -> None:
    one = visit(scripted.url)
    began = time.monotonic()
    one.page.evaluate("text => { markdown(text); }", text)
    assert time.monotonic() - began < 5


def test_markdown_while_it_comes(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    one.page.check("#as-text")
    one.ask("What comes after Tuesday?")
    assert one.page.inner_text(".prose > p") == "After Tuesday comes Wednesday."
