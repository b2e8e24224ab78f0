"""What a benchmark found, per method and cell, and its JSON form."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from openspec.bench.report import Figures, Identity, Speedup, compare, figures_of
from openspec.bench.run import Cell
from openspec.messages import acceptance_per_position, acceptance_rate, mean_acceptance_length


@dataclass(frozen=True)
class MethodReport:
    """One method in one cell."""

    method: str
    workload: str
    concurrency: int
    figures: Figures
    identity: Identity
    speedup: Speedup | None
    """None for plain decoding itself."""
    is_gated: bool
    """Must equal plain decoding. Other engines need not: their arithmetic differs."""
    answers: list[str] = field(default_factory=list)
    """A digest of each answer's text in the first turn; none where there is no text."""

    @property
    def is_shown(self) -> bool:
        """Whether the speed may be shown."""
        return self.identity.holds or not self.is_gated


def report_cell(cell: Cell, methods: Sequence[str], *, is_peer: bool = False) -> list[MethodReport]:
    """Plain decoding first, then the method, then a baseline if there is one.

    A server of another engine is alone, and compared with its own first turn.
    """
    plain = cell.results[methods[0]]
    reports = []
    for method in sorted(cell.results, key=[*methods, *cell.results].index):
        results, speedup = cell.results[method], None
        if method != methods[0]:
            speedup = Speedup.of(
                [result.tokens_per_s for result in plain],
                [result.tokens_per_s for result in results],
            )
        reports.append(
            MethodReport(
                method=method,
                workload=cell.workload.name,
                concurrency=cell.concurrency,
                figures=figures_of(results),
                identity=compare(plain, results),
                speedup=speedup,
                is_gated=method in methods and not is_peer,
                answers=[_digest(completion.text) for completion in results[0].completions],
            )
        )
    return reports


_ASIDE = re.compile(r"</?think>|\s+")


def _digest(text: str) -> str:
    """A digest of the text less thinking tags and white space.

    Some servers give the thinking as a field of its own, with or without the space around it.
    """
    said = _ASIDE.sub("", text)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]


def total_identity(reports: Sequence[MethodReport]) -> Identity:
    """Over all answers that must equal plain decoding's; plain itself counts if it stands alone."""
    gated = [report for report in reports if report.is_gated] or reports
    counted = [report for report in gated if report.speedup is not None] or gated
    return Identity(
        sum(report.identity.num_requests for report in counted),
        sum(report.identity.num_identical for report in counted),
    )


def document_of(
    environment: dict[str, object], reports: Sequence[MethodReport]
) -> dict[str, object]:
    """Environment and runs as the JSON file has them; times are in milliseconds."""
    return {"environment": environment, "runs": [_run(report) for report in reports]}


def json_text(document: dict[str, object]) -> str:
    """A document for people and programs."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _run(report: MethodReport) -> dict[str, object]:
    figures, speculation = report.figures, report.figures.speculation
    has_drafts = speculation.num_drafts > 0
    run: dict[str, object] = {
        "method": report.method,
        "workload": report.workload,
        "concurrency": report.concurrency,
        "output_tokens_per_s": figures.tokens_per_s,
        "ttft_ms": figures.ttft.p50,
        "tpot_ms": figures.tpot.p50,
        "acceptance_rate": acceptance_rate(speculation) if has_drafts else None,
        "mean_acceptance_length": mean_acceptance_length(speculation) if has_drafts else None,
        "acceptance_per_position": acceptance_per_position(speculation),
        "num_drafts_per_pos": speculation.num_drafts_per_pos,
        "num_requests": figures.num_requests,
        "identical_to_plain": report.identity.holds,
        "num_identical_to_plain": report.identity.num_identical,
        "output_tokens": figures.output_tokens,
        "output_tokens_per_s_repeats": figures.repeats_tokens_per_s,
        "ttft_ms_p99": figures.ttft.p99,
        "tpot_ms_p99": figures.tpot.p99,
        "ttft_ms_percentiles": figures.ttft.percentiles,
        "tpot_ms_percentiles": figures.tpot.percentiles,
        "chunk_gap_ms": figures.gap.p50,
        "chunk_gap_ms_p99": figures.gap.p99,
        "num_drafts": speculation.num_drafts,
        "num_draft_tokens": speculation.num_draft_tokens,
        "num_accepted_tokens": speculation.num_accepted_tokens,
        "num_forced_tokens": speculation.num_forced_tokens,
        "num_accepted_forced_tokens": speculation.num_accepted_forced_tokens,
        "num_copied_tokens": speculation.num_copied_tokens,
        "num_accepted_copied_tokens": speculation.num_accepted_copied_tokens,
        "may_differ": not report.is_gated,
        "answers": report.answers,
    }
    if num_steps := speculation.num_steps:
        run["draft_tokens_per_step"] = speculation.num_draft_tokens / num_steps
        run["steps_with_drafts"] = speculation.num_drafts / num_steps
    if report.speedup is not None:
        run["speedup"] = report.speedup.median
        run["speedup_range"] = [report.speedup.low, report.speedup.high]
    return run
