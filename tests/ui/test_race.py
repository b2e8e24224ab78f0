"""The view side by side: two runs, compared and replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.serve.conftest import RunningServer
from tests.serve.real_server import RealServer
from tests.ui.conftest import PHONE, Visit
from tests.ui.steps import recorded, spans, step_of
from tests.ui.test_page import CODE


def test_race(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url)
    runs = recorded(one)
    one.page.click("[data-mode=race]")
    one.page.click("#more")
    one.page.fill("#temperature", "0.8")
    one.page.fill("#max-tokens", "80")
    one.ask(CODE)
    assert one.page.inner_text("#identical") == "identical: yes"
    ids = [[token for step in steps for token in step["token_ids"]] for steps in runs]
    assert len(ids) == 2 and ids[0] == ids[1]
    assert all(len(step["token_ids"]) == 1 and not step["draft_tokens"] for step in runs[1])
    one.page.wait_for_selector('#play:text-is("▶")', timeout=60_000)
    texts = ["".join(text for text, _, _ in spans(one, f"#race-{lane}")) for lane in "ab"]
    assert texts[0] == texts[1] == "".join(t for step in runs[0] for t in step["tokens"])
    # Back to the start, where nothing is shown, and to the middle.
    one.page.fill("#scrub", "0")
    one.settle()
    assert not spans(one, "#race-b")
    # Between, what each run had by that time, whichever ended sooner.
    with one.page.expect_download() as download:
        one.page.click("#save")
    saved = json.loads(download.value.path().read_text())["turns"][0]["runs"]
    longest = max(run["seconds"] for run in saved)
    for place in (100, 500, 900):
        one.page.fill("#scrub", str(place))
        one.settle()
        for lane, run in zip("ab", saved, strict=True):
            due = [step for step in run["steps"] if step["at"] <= place / 1000 * longest]
            num_due = sum(len(step["tokens"]) for step in due)
            assert len(spans(one, f"#race-{lane}")) == num_due


def test_race_that_differs(visit: Callable[..., Visit], scripted: RunningServer, tmp_path) -> None:
    """The comparison can say no: same texts, other ids."""
    run = {"seconds": 1.0, "finish": "stop", "steps": [step_of(["a", "b"], at=0.5)]}
    other = {**run, "steps": [step_of(["a", "b"], at=0.5, token_ids=[0, 7])]}
    turns = [{"asked": "x", "runs": [run, other]}]
    saved = {"format": "openspec-run-1", "mode": "race", "turns": turns}
    (tmp_path / "run.json").write_text(json.dumps(saved))
    one = visit(scripted.url)
    one.page.set_input_files("#file", tmp_path / "run.json")
    one.page.wait_for_selector('#identical:text-is("identical: no")')
    (tmp_path / "broken.json").write_text(json.dumps({**saved, "turns": [{"asked": 1}]}))
    one.page.set_input_files("#file", tmp_path / "broken.json")
    one.page.wait_for_selector('#note:has-text("cannot be opened")')


def opened(visit: Callable[..., Visit], url: str, folder: Path, runs: list[dict]) -> Visit:
    """The view with a recorded race in it."""
    saved = {"format": "openspec-run-1", "mode": "race", "turns": [{"asked": "x", "runs": runs}]}
    (folder / "run.json").write_text(json.dumps(saved))
    one = visit(url)
    one.page.set_input_files("#file", folder / "run.json")
    one.page.wait_for_selector("#identical")
    return one


def test_figures_divide(visit: Callable[..., Visit], scripted: RunningServer, tmp_path) -> None:
    """Rates are tokens over the seconds that stand beside them, and the ratio is theirs."""
    fast = [step_of(["a"] * 4, at=at) for at in (0.21, 0.305)]
    plain = [step_of(["a"], at=0.21 + 0.0857 * at) for at in range(8)]
    for step, ids in zip(fast, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
        step["token_ids"] = ids
    for at, step in enumerate(plain):
        step["token_ids"] = [at]
    runs = [
        {"seconds": steps[-1]["at"], "finish": "stop", "steps": steps} for steps in (fast, plain)
    ]
    one = opened(visit, scripted.url, tmp_path, runs)
    verdict = one.page.inner_text("#verdict")
    assert verdict.startswith("2.66\u00d7 as fast, identical: yes")
    assert "0.305 s and 0.81 s for 8 tokens" in verdict
    assert one.page.inner_text("#lane-a") == f"{8 / 0.305:.0f} tokens a second"
    assert one.page.inner_text("#lane-b") == f"{8 / 0.81:.0f} tokens a second"


def test_no_ratio_where_it_says_nothing(
    visit: Callable[..., Visit], scripted: RunningServer, tmp_path
) -> None:
    plain = {"seconds": 1.0, "finish": "stop", "steps": [step_of(["a"], at=1.0)]}
    one = opened(visit, scripted.url, tmp_path, [{**plain, "seconds": 0.9}, plain])
    assert one.page.inner_text("#verdict").startswith("Nothing was drafted, identical: yes")
    other = {"seconds": 0.5, "finish": "stop", "steps": [step_of(["a", "b"], at=0.5)]}
    one = opened(visit, scripted.url, tmp_path, [other, plain])
    assert one.page.inner_text("#verdict").startswith("No ratio of different texts, identical: no")
    assert "\u00d7" not in one.page.inner_text("#verdict")


def test_side_by_side_on_a_phone(visit: Callable[..., Visit], real: RealServer) -> None:
    one = visit(real.url, viewport=PHONE, has_touch=True)
    one.page.click("[data-mode=race]")
    one.ask("Repeat the following text exactly:\n\n" + "one two three four five six seven.\n" * 12)
    assert one.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    boxes = [one.page.locator(f"#race-{lane}").bounding_box() for lane in "ab"]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    assert max(box["height"] for box in boxes) <= PHONE["height"] / 2
    tops = [
        one.page.locator(selector).bounding_box()["y"]
        for selector in ("#legend", "#race", "#numbers")
    ]
    assert tops == sorted(tops)
    # The figures follow soon, however long the answer is.
    assert tops[2] - tops[1] < 1.5 * PHONE["height"]


def test_the_whole_prompt_can_be_read(visit: Callable[..., Visit], scripted: RunningServer) -> None:
    one = visit(scripted.url)
    one.page.click("[data-mode=race]")
    one.page.fill("#prompt", "first line\nand another\n    as it is")
    one.page.click("#send")
    one.wait()
    assert one.page.locator("#race-asked summary").inner_text() == "first line"
    rest = one.page.locator("#race-asked div")
    assert not rest.is_visible()
    one.page.locator("#race-asked summary").click()
    assert rest.inner_text() == "and another\n    as it is"
