"""Two benchmarks beside each other: two builds, two settings, or two engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openspec.bench.document import Document, Run
from openspec.bench.table import aligned


@dataclass(frozen=True)
class Pair:
    """Two runs of one workload at one concurrency, by their places in the documents."""

    first_at: int
    second_at: int
    first: Run
    second: Run

    @property
    def name(self) -> str:
        """What ran."""
        if self.first.method == self.second.method:
            return self.first.method
        return f"{self.first.method} / {self.second.method}"

    @property
    def is_shown(self) -> bool:
        """Whether both speeds may be shown."""
        return self.first.is_shown and self.second.is_shown

    @property
    def ratio(self) -> float | None:
        """Tokens per second, second over first."""
        speed = self.first.output_tokens_per_s
        return self.second.output_tokens_per_s / speed if speed > 0 and self.is_shown else None

    @property
    def ratio_text(self) -> str:
        """The ratio for people."""
        if self.ratio is None:
            return "-"
        return f"{self.ratio:.2f}x" if self.ratio >= 0.1 else f"{self.ratio:.2g}x"

    @property
    def num_same(self) -> int | None:
        """Answers with the same text; None where one of the files has no digests of them."""
        if not self.first.answers or not self.second.answers:
            return None
        pairs = zip(self.first.answers, self.second.answers, strict=False)
        return sum(a == b for a, b in pairs)


def pairs_of(first: Document, second: Document) -> list[Pair]:
    """Runs of the same method; what has no namesake, with all of the other side that have none."""
    return list(_pairs(first, second))


def _pairs(first: Document, second: Document) -> Iterator[Pair]:
    for cell in dict.fromkeys(run.cell for run in first.runs):
        ours = [(at, run) for at, run in enumerate(first.runs) if run.cell == cell]
        theirs = [(at, run) for at, run in enumerate(second.runs) if run.cell == cell]
        common = {run.method for _, run in ours} & {run.method for _, run in theirs}
        for first_at, one in ours:
            for second_at, other in theirs:
                is_alone = not {one.method, other.method} & common
                if one.method == other.method or is_alone:
                    yield Pair(first_at, second_at, one, other)


DIFFERENT = ("max_tokens", "temperature", "seed", "ignore_eos", "input_len", "num_prompts")


def differences(first: Document, second: Document) -> list[str]:
    """What was asked for differently, so that figures do not compare like with like."""
    found = []
    for name in DIFFERENT:
        one, other = (document.flags.get(name) for document in (first, second))
        if one != other:
            found.append(f"{name}: {one} and {other}")
    return found


def render_comparison(first: Document, second: Document) -> str:
    """A line per pair; A is the first file, B the second."""
    rows: list[tuple[str, ...]] = [
        (
            *("workload", "conc", "method"),
            *("A tok/s", "B tok/s", "B/A"),
            *("A TTFT ms", "B TTFT ms", "A ms/token", "B ms/token"),
            *("A length", "B length", "same text"),
        )
    ]
    for pair in pairs_of(first, second):
        one, other = pair.first, pair.second
        same = "" if pair.num_same is None else f"{pair.num_same}/{one.num_requests}"
        cell = (one.workload, str(one.concurrency), pair.name)
        if pair.ratio is None:
            rows.append((*cell, *("-",) * 9, same))
            continue
        rows.append(
            (
                *cell,
                *(f"{run.output_tokens_per_s:.1f}" for run in (one, other)),
                pair.ratio_text,
                *(f"{run.ttft_ms:.1f}" for run in (one, other)),
                *(f"{run.tpot_ms:.2f}" for run in (one, other)),
                *(_length(run) for run in (one, other)),
                same,
            )
        )
    lines = [f"A: {first.name}", f"B: {second.name}", ""]
    lines.append(aligned(rows, {"workload", "method"}))
    if differing := differences(first, second):
        lines += ["", f"Not asked alike: {'; '.join(differing)}"]
    return "\n".join(lines)


def _length(run: Run) -> str:
    return "" if run.mean_acceptance_length is None else f"{run.mean_acceptance_length:.2f}"
