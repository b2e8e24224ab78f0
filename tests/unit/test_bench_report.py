from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from openspec.bench.client import Completion
from openspec.bench.document import Run, as_document, read_document
from openspec.bench.load import LoadResult
from openspec.bench.report import (
    Divergence,
    Latency,
    Speedup,
    compare,
    figures_of,
    speculation_of,
)
from openspec.bench.results import MethodReport, document_of, json_text, report_cell, total_identity
from openspec.bench.run import Cell
from openspec.bench.table import render_identity, render_positions, render_sources, render_table
from openspec.bench.workloads import Prompt, Workload
from openspec.messages import SpecDecodeStats, acceptance_per_position


def completion(
    token_ids: list[int], chunks: list[int] | None = None, step_s: float = 0.01
) -> Completion:
    chunks = chunks or [1] * len(token_ids)
    return Completion(
        sent_s=10.0,
        token_ids=token_ids,
        chunk_s=[10.5 + step_s * i for i in range(len(chunks))],
        chunk_tokens=chunks,
        finish_reason="length",
        speculation=SpecDecodeStats(
            num_drafts=2,
            num_draft_tokens=8,
            num_accepted_tokens=5,
            num_accepted_tokens_per_pos=[2, 2, 1, 0],
            num_drafts_per_pos=[2, 2, 2, 2],
        ),
    )


def result(*answers: list[int], wall_s: float = 1.0) -> LoadResult:
    return LoadResult([completion(answer) for answer in answers], wall_s)


def test_percentiles() -> None:
    assert Latency.of([]) == Latency(0, 0)
    assert Latency.of([3.0]) == Latency(3000, 3000)
    found = Latency.of(range(101)).percentiles
    assert found == {str(level): 1000 * level for level in (0, 5, 25, 50, 75, 95, 99, 100)}
    assert Latency.of([4, 1, 3, 2]).p50 == 2500
    assert Latency.of(range(101)).p99 == 99000
    assert Latency.of([0.001, 0.003]).p50 == pytest.approx(2)


def test_time_per_token_counts_tokens_after_the_first_chunk() -> None:
    answer = completion(list(range(9)), chunks=[3, 4, 2], step_s=0.03)
    figures = figures_of([LoadResult([answer], 2.0)])
    assert figures.tpot.p50 == pytest.approx(1000 * 0.06 / 6)
    assert figures.gap.p50 == pytest.approx(30)
    assert figures.ttft.p50 == pytest.approx(500)
    assert figures.tokens_per_s == pytest.approx(4.5)


def test_throughput_is_the_median_of_the_repeats() -> None:
    figures = figures_of([result([1] * 4, wall_s=wall_s) for wall_s in (1.0, 2.0, 4.0)])
    assert figures.repeats_tokens_per_s == [4, 2, 1]
    assert figures.tokens_per_s == 2
    assert (figures.num_requests, figures.output_tokens) == (1, 4)


def test_single_token_answers_have_no_time_per_token() -> None:
    figures = figures_of([result([7])])
    assert figures.tpot == Latency(0, 0)


def test_speculation_of_several_answers() -> None:
    total = speculation_of([completion([1]), completion([2]), Completion(0.0)])
    assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (4, 16, 10)
    assert total.num_accepted_tokens_per_pos == [4, 4, 2, 0]


def test_acceptance_positions_of_different_lengths() -> None:
    short = Completion(
        0.0,
        speculation=SpecDecodeStats(
            num_drafts=1,
            num_draft_tokens=1,
            num_accepted_tokens=1,
            num_accepted_tokens_per_pos=[1],
            num_drafts_per_pos=[1],
        ),
    )
    long = Completion(
        0.0,
        speculation=SpecDecodeStats(
            num_drafts=1,
            num_draft_tokens=3,
            num_accepted_tokens=3,
            num_accepted_tokens_per_pos=[1, 1, 1],
            num_drafts_per_pos=[1, 1, 1],
        ),
    )
    assert acceptance_per_position(speculation_of([short, long])) == [1.0, 1.0, 1.0]


def test_speedup_pairs_the_turns() -> None:
    speedup = Speedup.of([10, 20, 10], [20, 20, 15])
    assert (speedup.median, speedup.low, speedup.high) == (1.5, 1.0, 2.0)


@pytest.mark.parametrize(
    ("found", "divergence"),
    [
        ([1, 2, 3], None),
        ([1, 9, 3], Divergence(1, 1, 2, 9)),
        ([1, 2], Divergence(1, 2, 3, None)),
        ([1, 2, 3, 4], Divergence(1, 3, None, 4)),
    ],
)
def test_compare(found: list[int], divergence: Divergence | None) -> None:
    identity = compare([result([5], [1, 2, 3])], [result([5], [1, 2, 3]), result([5], found)])
    assert identity.first_divergence == divergence
    assert identity.num_identical == (2 if divergence is None else 1)
    assert identity.holds == (divergence is None)


def test_compare_finish_reason() -> None:
    plain, other = result([1, 2]), result([1, 2])
    other.completions[0].finish_reason = "stop"
    assert compare([plain], [other]).first_divergence == Divergence(0, 2, "length", "stop")


def reports_of(method_answer: list[int]) -> list[MethodReport]:
    cell = Cell(Workload("repeat", [Prompt(text="x")]), 4)
    cell.results["none"] = [result([1, 2, 3]), result([1, 2, 3])]
    cell.results["copying"] = [result(method_answer, wall_s=0.5) for _ in range(2)]
    cell.results["transformers"] = [result([1, 2, 4], wall_s=2) for _ in range(2)]
    return report_cell(cell, ["none", "copying"])


def runs_of(reports: list[MethodReport]) -> list[Run]:
    return as_document(document_of({}, reports)).runs


def test_table_shows_speed_and_equality() -> None:
    reports = reports_of([1, 2, 3])
    table = render_table(runs_of(reports))
    assert "2.00x (2.00-2.00)" in table
    assert "0.50x" in table  # another engine may differ; its speed is shown with 0/1 identical
    identity = total_identity(reports)
    assert render_identity(identity, []) == "1/1 identical to plain"
    assert "Accepted by position, copying, repeat c=4" in render_positions(runs_of(reports))
    lines = [line.split() for line in render_positions(runs_of(reports)).splitlines()[1:5]]
    assert [(line[0], *line[-3:]) for line in lines] == [
        ("1", "100.0%", "of", "4"),
        ("2", "100.0%", "of", "4"),
        ("3", "50.0%", "of", "4"),
        ("4", "0.0%", "of", "4"),
    ]


def test_sources_of_drafts() -> None:
    """Sums of all answers; the method's own are what no other source has."""
    cell = Cell(Workload("repeat", [Prompt(text="x")]), 4)
    cell.results["none"] = cell.results["eagle3"] = [result([1, 2]), result([1, 2])]
    for each in cell.results["eagle3"]:
        speculation = each.completions[0].speculation
        assert speculation is not None
        speculation.num_forced_tokens, speculation.num_accepted_forced_tokens = 1, 1
        speculation.num_copied_tokens, speculation.num_accepted_copied_tokens = 3, 1
    content = document_of({}, report_cell(cell, ["none", "eagle3"]))
    run = as_document(content).runs[1]
    assert render_sources([run]).splitlines()[1] == (
        "  repeat c=4: 8 of eagle3 (75.0%), 6 copied from the text (33.3%), "
        "2 forced by a grammar (100.0%)"
    )
    assert "num_accepted_copied_tokens" in json_text(content)
    of_the_method = msgspec.structs.replace(run, num_forced_tokens=0, num_copied_tokens=0)
    assert render_sources([of_the_method]) == ""


def test_bars_of_earlier_files_say_what_they_are_of() -> None:
    (run,) = (run for run in runs_of(reports_of([1, 2, 3])) if run.num_drafts and run.speedup == 2)
    assert "c=4, of the drafts that reached it:" in render_positions([run])
    earlier = msgspec.structs.replace(run, num_drafts_per_pos=[])
    assert "c=4, of the drafts:" in render_positions([earlier])


def test_table_hides_the_speed_of_wrong_text() -> None:
    reports = reports_of([1, 2, 8])
    table = render_table(runs_of(reports))
    assert "2.00x" not in table
    failures = [report for report in reports if report.is_gated and not report.identity.holds]
    text = render_identity(total_identity(reports), failures)
    assert text.startswith("0/1 identical to plain")
    assert "request 0 parts at token 2: expected 3, found 8" in text


RUN_KEYS = {
    "method",
    "workload",
    "concurrency",
    "output_tokens_per_s",
    "ttft_ms",
    "tpot_ms",
    "acceptance_rate",
    "mean_acceptance_length",
    "acceptance_per_position",
    "num_requests",
    "identical_to_plain",
}


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    content = document_of({"cpu": "x"}, reports_of([1, 2, 3]))
    path.write_text(json_text(content))
    assert read_document(path).runs == as_document(content).runs
    document = json.loads(path.read_text())
    assert set(document) == {"environment", "runs"}
    assert [run["method"] for run in document["runs"]] == ["none", "copying", "transformers"]
    for run in document["runs"]:
        assert set(run) >= RUN_KEYS
    plain, method, _ = document["runs"]
    assert plain["identical_to_plain"] is True
    assert method["speedup"] == 2
    assert method["acceptance_per_position"] == [1.0, 1.0, 0.5, 0.0]
    assert method["ttft_ms"] == pytest.approx(500)


def test_digests_of_answers() -> None:
    def digest(*chunks: str) -> str:
        answer = completion([1, 2])
        answer.chunk_text = list(chunks)
        cell = Cell(Workload("chat", [Prompt(text="x")]), 1)
        cell.results["none"] = [LoadResult([answer], 1.0)]
        (report,) = report_cell(cell, ["none"])
        return report.answers[0]

    # With the tags in the text, and with the thinking in a field of its own.
    assert digest("<think>\nI count.", "\n</think>\n\nFour.") == digest("I count.", "Four.")
    assert digest("I count.\n", "\n\nFour.") == digest("I count.", "Four.")
    assert digest("Four.") != digest("Five.") != digest("four.")
