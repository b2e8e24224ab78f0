"""Sampled tokens follow the target's distribution: chi-square over many seeds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from openspec.messages import SamplingParams
from tests.gates import harness
from tests.gates.conftest import drafter_settings
from tests.gates.harness import Job, Result, make_core, run
from tests.gates.pairs import EMBEDDED, WITHOUT_HEAD, method_of
from tests.gates.workload import prompts

NUM_SEEDS = 1500 if harness.IS_FULL else 600
FEWEST_OF_A_ROW = 40
"""Where fewer seeds share a beginning nothing is counted."""


def chi_square_limit(num_free: int) -> float:
    """Upper 0.1 % point (Wilson and Hilferty, 1931): seeds are fixed, so the test never wavers."""
    k = num_free
    return k * (1 - 2 / (9 * k) + 3.0902 * math.sqrt(2 / (9 * k))) ** 3


@dataclass
class Cells:
    """Counts of tokens against their distributions, over any number of rows."""

    statistic: float = 0.0
    num_free: int = 0
    """Degrees of freedom."""

    def add(self, distribution: Mapping[int, float], counts: Counter[int]) -> None:
        """One row: likely tokens by themselves, the others together if there are enough."""
        num_draws = counts.total()
        expected = {token: p for token, p in distribution.items() if p * num_draws >= 8}
        observed = [counts[token] for token in expected]
        rest = 1.0 - sum(expected.values())
        means = [p * num_draws for p in expected.values()]
        if rest * num_draws >= 8:
            observed.append(num_draws - sum(observed))
            means.append(rest * num_draws)
        self.statistic += sum((o - e) ** 2 / e for o, e in zip(observed, means, strict=True))
        self.num_free += max(len(means) - 1, 0)


def seeded(num_seeds: int, max_tokens: int, sampling: Mapping[str, float]) -> list[Job]:
    """One prompt with so many seeds, which tells the distribution of each token."""
    return [
        Job(
            prompts()[12],
            SamplingParams(
                **sampling,  # type: ignore[arg-type]
                seed=seed,
                max_tokens=max_tokens,
                logprobs=20,
                logprobs_mode="processed",
            ),
        )
        for seed in range(num_seeds)
    ]


def count(results: Sequence[Result], first_place: int = 0) -> Cells:
    """Of each place from `first_place` on, given the tokens before it: how its tokens fit the
    distribution that the row of its place tells."""
    rows: dict[tuple[int, ...], list[Result]] = defaultdict(list)
    for result in results:
        for place in range(first_place, len(result.token_ids)):
            rows[tuple(result.token_ids[:place])].append(result)
    cells = Cells()
    for beginning, alike in rows.items():
        if len(alike) < FEWEST_OF_A_ROW:
            continue
        place = len(beginning)
        row = alike[0].logprobs[place]
        distribution = {
            token: math.exp(value)
            for token, value in zip(row.token_ids[1:], row.logprobs[1:], strict=True)
        }
        cells.add(distribution, Counter(result.token_ids[place] for result in alike))
    return cells


@pytest.mark.by_turns
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.5, "top_k": 12},
        pytest.param({"temperature": 1.0}, marks=pytest.mark.full),
        pytest.param({"temperature": 1.5, "top_p": 0.8}, marks=pytest.mark.full),
        pytest.param({"temperature": 1.5, "min_p": 0.05}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_distribution(
    drafter_name: str, target_name: str, settings: dict[str, float]
) -> None:
    """At the first place, and at the next two, on which drafts have had their say."""
    core = make_core(**{**drafter_settings(drafter_name), "adaptive_speculation": False})
    cells = count(run(core, seeded(NUM_SEEDS, 3, settings)))
    fewest = 20 if target_name == EMBEDDED else 1  # others may leave little choice
    assert cells.num_free >= fewest, "too few rows to tell anything"
    assert cells.statistic < chi_square_limit(cells.num_free), cells
    if method_of(drafter_name) not in WITHOUT_HEAD:
        assert core.stats().num_drafts >= NUM_SEEDS // 2
