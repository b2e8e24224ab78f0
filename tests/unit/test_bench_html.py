"""The HTML report: its numbers are the JSON's, and it is one safe file."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from openspec.bench.__main__ import main
from openspec.bench.bench_config import parse_arguments
from openspec.bench.document import Document, as_document, read_document
from openspec.bench.html.command import command_of
from openspec.bench.html.page import report_page
from openspec.bench.html.svg import Axes, Series, Value, line_chart, standalone, ticks

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
RECORDED = ("h200-http-ngram", "h200-http-dspark-tree", "2-core-epyc-tiny-ngram")
LEVELS = ("0", "5", "25", "50", "75", "95", "99", "100")


def run(workload: str, concurrency: int, method: str, depth: int = 0, **others: object) -> dict:
    seed = len(workload) + concurrency + 7 * bool(depth)
    made: dict = {
        "method": method,
        "workload": workload,
        "concurrency": concurrency,
        "output_tokens_per_s": 100.123 * seed,
        "ttft_ms": 3.21 * seed,
        "tpot_ms": 1.234 * seed,
        "ttft_ms_p99": 7.89 * seed,
        "tpot_ms_p99": 2.345 * seed,
        "num_requests": 16,
        "num_identical_to_plain": 16,
        "identical_to_plain": True,
        "output_tokens": 1000,
        "num_drafts": 10 * depth,
        "num_draft_tokens": 30 * depth,
        "num_accepted_tokens": 20 * depth,
        "acceptance_per_position": [1 / (1.3 + at) for at in range(depth)],
        "num_drafts_per_pos": [10 * (depth - at) for at in range(depth)],
        "answers": [f"{at:016x}" for at in range(16)],
    }
    for key in ("ttft_ms", "tpot_ms"):
        made[f"{key}_percentiles"] = {
            level: made[f"{key}_p99"] * int(level) / 99 for level in LEVELS
        }
    if depth:
        made |= {
            "acceptance_rate": 0.654321,
            "mean_acceptance_length": 2.3456,
            "speedup": 1.2345 + concurrency / 50,
            "speedup_range": [1.1111, 1.6 + concurrency / 50],
            "draft_tokens_per_step": 2.222,
            "steps_with_drafts": 0.777,
        }
    return made | others


def content(runs: list[dict], **environment: object) -> dict:
    step_times = [
        {"num_seqs": n, "num_rows": n * rows, "proposes": proposes, "milliseconds": 0.5 * n + rows}
        for n in (1, 2, 4, 8, 16, 32, 64)
        for rows in range(1, 17)
        for proposes in (False, True)
    ]
    return {
        "environment": {
            "cpu": "a processor",
            "cores": 2,
            "gpu": [],
            "versions": {"openspec": "0.1.0"},
            "commit": None,
            "server": {"model": "some/model", "step_times": step_times},
            "flags": {"workload": None, "max_tokens": 64, "temperature": 0.0, "repeats": 3},
            **environment,
        },
        "runs": runs,
    }


def full(depth: int = 15) -> dict:
    """Four workloads at five concurrencies, plain and drafted."""
    return content(
        [
            run(workload, concurrency, method, depth if method != "none" else 0)
            for workload in ("repeat", "chat", "mixed", "random")
            for concurrency in (1, 4, 8, 16, 32)
            for method in ("none", "drafting")
        ]
    )


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""


class Page(HTMLParser):
    """Every element with the text inside it."""

    VOID = ("meta", "path", "circle", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(page)
        self.close()
        assert not self._open, [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag != "meta":
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def having(self, attribute: str) -> list[Element]:
        return [element for element in self.elements if attribute in element.attributes]


def at(documents: list[dict], place: str) -> float:
    found: object = documents
    for step in place.split("/"):
        found = found[int(step)] if isinstance(found, list) else found[step]  # type: ignore[index]
    assert isinstance(found, (int, float)), place
    return found


def is_shown_as(shown: str, number: float) -> bool:
    """Whether a text is the number, rounded to the digits that the text has."""
    found = re.fullmatch(r"(-?\d+(?:\.(\d+))?)(x|%| ms)?", shown)
    assert found is not None, shown
    scaled = 100 * number if found[3] == "%" else number
    return abs(float(found[1]) - scaled) <= 0.5000001 * 10 ** -len(found[2] or "")


def check_numbers(page: Page, documents: list[dict]) -> set[str]:
    places = set()
    for element in page.having("data-v"):
        place = element.attributes["data-v"]
        assert place is not None
        number = at(documents, place)
        if element.tag == "span":
            assert is_shown_as(element.text, number), (place, element.text, number)
        elif element.tag in {"circle", "rect"} and element.text:
            shown = element.text.rpartition(": ")[2]
            assert is_shown_as(shown, number), (place, element.text, number)
        places.add(place)
    return places


def test_the_oracle_of_numbers() -> None:
    assert is_shown_as("1.23x", 1.2345) and is_shown_as("65%", 0.654) and is_shown_as("7", 7)
    assert not is_shown_as("1.24x", 1.2345) and not is_shown_as("66%", 0.654)


def test_numbers_are_the_jsons() -> None:
    document = full()
    page = Page(report_page([as_document(document)]))
    places = check_numbers(page, [document])
    keys = {"output_tokens_per_s", "ttft_ms", "ttft_ms_p99", "tpot_ms", "tpot_ms_p99"}
    keys |= {"num_requests", "num_identical_to_plain"}
    drafted = {"speedup", "acceptance_rate", "mean_acceptance_length", "steps_with_drafts"}
    drafted |= {"draft_tokens_per_step", "speedup_range/0", "speedup_range/1"}
    drafted |= {f"acceptance_per_position/{position}" for position in range(15)}
    for index, entry in enumerate(document["runs"]):
        for key in keys | (drafted if entry["num_drafts"] else set()):
            assert f"0/runs/{index}/{key}" in places
    times = document["environment"]["server"]["step_times"]
    assert {
        f"0/environment/server/step_times/{n}/milliseconds" for n in range(len(times))
    } <= places
    sums = {element.attributes["data-sum"]: element.text for element in page.having("data-sum")}
    assert sums == {"same": "320", "total": "320"}


def test_sources_of_drafts() -> None:
    counts = {
        "num_copied_tokens": 12,
        "num_accepted_copied_tokens": 7,
        "num_forced_tokens": 5,
        "num_accepted_forced_tokens": 4,
    }
    runs = [run("chat", 1, "none"), run("chat", 1, "eagle3", 3, **counts), run("chat", 4, "x", 3)]
    page = report_page([as_document(content(runs))])
    assert "Draft tokens by source" in page
    for key, value in counts.items():
        assert f'<span data-v="0/runs/1/{key}">{value}</span>' in page
    assert "num_copied_tokens" not in report_page([as_document(content(runs[:1] + runs[2:]))])


def test_what_the_budget_chose_has_names_and_units() -> None:
    document = full()
    page = Page(report_page([as_document(document)]))
    headings = [element.text for element in page.elements if element.tag == "th"]
    assert headings[-4:] == ["workload", "requests", "draft tokens a step", "steps with drafts"]
    last = [element for element in page.elements if element.tag == "td"][-4:]
    assert [cell.text for cell in last] == ["", "32", "2.22", "78%"]


@pytest.mark.parametrize(
    ("low", "high", "is_clear"), [(0.96, 1.12, False), (1.01, 1.12, True), (0.9, 0.99, True)]
)
def test_a_ratio_that_may_be_chance_is_pale(low: float, high: float, is_clear: bool) -> None:
    drafting = run("chat", 1, "drafting", 3, speedup=1.02, speedup_range=[low, high])
    document = as_document(content([run("chat", 1, "none"), drafting]))
    page = Page(report_page([document]))
    (cell,) = (e for e in page.elements if e.tag == "td" and e.text.startswith("1.02x"))
    assert cell.attributes["class"] == ("strong" if is_clear else "quiet")
    tiles = [e.text for e in page.elements if e.attributes.get("class") == "tile"]
    assert sum("may be chance" in tile for tile in tiles) == (0 if is_clear else 2)


def test_shares_say_what_they_are_of() -> None:
    now, earlier = full(3), full(3)
    for entry in earlier["runs"]:
        del entry["num_drafts_per_pos"]
    documents = [
        msgspec.structs.replace(as_document(document), name=name)
        for document, name in ((now, "now"), (earlier, "earlier"))
    ]
    assert "It is of the drafts that reached the position" in report_page(documents[:1])
    assert "It is of all drafts" in report_page(documents[1:])
    assert "the earlier one's of all drafts" in report_page(documents)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_results(name: str) -> None:
    path = RESULTS / f"{name}.json"
    document = json.loads(path.read_text())
    assert check_numbers(Page(report_page([read_document(path)])), [document])


def test_two_documents() -> None:
    first, second = full(), full(3)
    for entry in second["runs"]:
        entry["output_tokens_per_s"] *= 1.5
        entry["answers"][0] = "other"
    documents = [
        msgspec.structs.replace(as_document(document), name=name)
        for document, name in ((first, "before"), (second, "after"))
    ]
    text = report_page(documents)
    places = check_numbers(Page(text), [first, second])
    assert {place[0] for place in places} == {"0", "1"}
    assert text.count("<td class=strong>1.50x</td>") + text.count('"strong">1.50x<') == 40
    assert "15/16" in text and "Not asked alike" not in text
    second["environment"]["flags"]["max_tokens"] = 128
    assert "Not asked alike: max_tokens: 64 and 128" in report_page(
        [documents[0], as_document(second)]
    )


def points_of(svg: str) -> list[tuple[float, str]]:
    """(height, place) of the points of a line chart."""
    marks = re.findall(r'<circle class="f\d" data-v="([^"]+)" cx="[^"]+" cy="([^"]+)"', svg)
    return [(float(y), place) for place, y in marks if not place.endswith("_ms")]


def test_axes_are_honest() -> None:
    """Heights are proportional to the numbers, from 0 on."""
    document = full()
    page = report_page([as_document(document)])
    charts = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if points_of(svg)]
    assert len(charts) >= 3
    for svg in charts:
        zeros = re.findall(r'y="([^"]+)"[^>]*>0(?:x| ms)</text>', svg)
        zero = float(zeros[0]) - 4
        scales = [(zero - y) / at([document], place) for y, place in points_of(svg)]
        assert max(scales) - min(scales) < 0.02 * max(scales)


def test_bars_are_honest() -> None:
    document = full()
    page = Page(report_page([as_document(document)]))
    bars = [element for element in page.having("data-v") if element.tag == "rect"]
    assert bars
    for bar in bars:
        share = at([document], bar.attributes["data-v"] or "")
        assert float(bar.attributes["height"] or 0) == pytest.approx(118 * share, abs=0.06)


def test_spreads_are_honest() -> None:
    document = full()
    for svg in re.findall(r"<svg.*?</svg>", report_page([as_document(document)]), re.S):
        found = re.findall(
            r'<circle class="f\d" data-v="([^"]+[tf]t_ms|[^"]+tpot_ms)" cx="([^"]+)"', svg
        )
        if not found:
            continue
        (first, x), (last, other_x) = found[0], found[-1]
        low, high = at([document], first), at([document], last)
        scale = (float(other_x) - float(x)) / (high - low)
        for place, middle in found:
            expected = float(x) + scale * (at([document], place) - low)
            assert float(middle) == pytest.approx(expected, abs=0.3)


def test_size_and_nothing_from_elsewhere() -> None:
    text = report_page([as_document(full())])
    assert len(text.encode()) < 300_000
    assert not re.search(r"@import|url\(|<script|<link|<img|<iframe", text)
    page = Page(text)
    for name in ("src", "href", "srcset", "action", "data"):
        assert not page.having(name)
    addresses = set(re.findall(r"\w+://[^\s\"'<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format; nobody loads it


HOSTILE = '<script>alert("1")</script>\x1b[2J\u202e"\'><img src=x onerror=alert(1)>&amp;'
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "h1", "h2", "h3", "p"),
    *("div", "b", "i", "span", "code", "pre", "bdi", "details", "summary", "dl", "dt", "dd"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "path", "circle", "rect", "text"),
}


def test_hostile_names_stay_text() -> None:
    document = content(
        [
            run(HOSTILE, n, name, depth)
            for n in (1, 2)
            for name, depth in (("none", 0), (HOSTILE, 3))
        ],
        cpu=HOSTILE,
        gpu=[HOSTILE],
        commit=HOSTILE,
        date=HOSTILE,
        versions={HOSTILE: HOSTILE},
        server={"model": HOSTILE, HOSTILE: HOSTILE, "step_times": HOSTILE},
        flags={"model": HOSTILE, HOSTILE: [HOSTILE], "method": HOSTILE},
    )
    named = msgspec.structs.replace(as_document(document), name=HOSTILE)
    for documents in ([named], [named, named]):
        text = report_page(documents)
        page = Page(text)
        assert {element.tag for element in page.elements} <= TAGS
        assert not [name for e in page.elements for name in e.attributes if name.startswith("on")]
        assert "\x1b" not in text and "\u202e" not in text
        assert any('<script>alert("1")</script>' in element.text for element in page.elements)


def test_no_speed_of_texts_that_differ() -> None:
    wrong = {"identical_to_plain": False, "num_identical_to_plain": 3}
    document = content([run("chat", 1, "none"), run("chat", 1, "drafting", 3, **wrong)])
    page = Page(report_page([as_document(document)]))
    places = check_numbers(page, [document])
    kept = {"num_identical_to_plain", "num_requests"}
    assert {p.split("/", 3)[3] for p in places if p.startswith("0/runs/1")} <= kept
    assert any("3 of 16 answers equal" in e.text for e in page.elements if e.tag == "p")


def test_charts_are_files_of_their_own() -> None:
    series = [Series("a < b", {1: Value(1.0), 8: Value(2.0)})]
    chart = line_chart(Axes("title & more", "across"), series)
    for text in (chart, standalone(chart)):
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "prefers-color-scheme: dark" in standalone(chart)
    one = line_chart(Axes("t", "x", is_log=True), [Series("a", {1: Value(0.0)})])
    assert "NaN" not in one and "inf" not in one


def test_the_line_at_one_is_in_the_chart() -> None:
    chart = line_chart(Axes("t", "x", one="as fast"), [Series("a", {1: Value(0.1)})])
    (height,) = re.findall(r'class="one" d="M\S+ (\S+)H', chart)
    assert 40 < float(height) < 300


def test_a_peer_is_named() -> None:
    document = content([run("chat", 1, "vllm", may_differ=True)], server={"owned_by": "vllm"})
    assert "vllm, measured by openspec 0.1.0" in report_page([as_document(document)])


@pytest.mark.parametrize("top", [0.0, 0.003, 0.9, 1.0, 3.81, 17, 60, 99.9, 21567])
def test_ticks(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0 and marks[-1] >= top and 2 <= len(marks) <= 8
    assert marks[-2] < top or top == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--workload", "chat,repeat", "--concurrency", "1,8", "--temperature", "0.5"],
        [
            "--server",
            "http://x",
            "--model",
            "a model's name",
            "--no-adaptive-speculation",
            "--ignore-eos",
        ],
        ["--server", "http://127.0.0.1:8000", "--repeats", "5", "--num-speculative-tokens", "7"],
    ],
)
def test_the_command_repeats_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("openspec.config.EngineConfig.with_folders", lambda self: self)
    plan = parse_arguments(arguments)
    flags = {**msgspec.to_builtins(plan.bench), **plan.server_settings}
    line = command_of(Document(environment={"flags": flags}, runs=[]))
    python, minus_m, module, *rest = shlex.split(line)
    assert (python, minus_m, module) == ("python", "-m", "openspec.bench")
    again = parse_arguments(rest)
    assert again.bench == plan.bench and again.server_settings == plan.server_settings


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, factor in (("before", 1.0), ("after", 2.0)):
        document = full(3)
        for entry in document["runs"]:
            entry["output_tokens_per_s"] *= factor
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(document))
    html = tmp_path / "report.html"
    assert main(["--compare", *map(str, paths), "--html", str(html)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2.00x  ") == 40 and "16/16" in printed
    assert "before and after" in html.read_text()
    assert main(["--compare", str(paths[0]), f"--html={html}"]) == 0
    assert "B/A" not in capsys.readouterr().out
    assert "B/A" not in html.read_text()


def test_what_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "empty.json").write_text('{"environment": {}, "runs": []}')
    for workload in ("a", "b"):
        document = content([run(workload, 1, "none")])
        (tmp_path / f"{workload}.json").write_text(json.dumps(document))
    for names, message in (
        (["nowhere.json"], "No such file"),
        (["other.json"], "is not from python -m openspec.bench --json"),
        (["empty.json"], "has no runs"),
        (["a.json", "b.json"], "no workload at the same concurrency in common"),
    ):
        assert main(["--compare", *(str(tmp_path / name) for name in names)]) == 2
        assert message in capsys.readouterr().err
