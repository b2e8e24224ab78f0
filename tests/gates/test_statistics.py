"""Sampled tokens follow the target's distribution: chi-square over many seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from openspec.messages import SamplingParams
from tests.gates.conftest import drafter_settings
from tests.gates.harness import Job, make_core, run
from tests.gates.workload import prompts

NUM_SEEDS = 1500


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
@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.full), 2])
def test_sampled_tokens_follow_the_distribution(
    drafter_name: str, settings: dict[str, float], place: int
) -> None:
    """At the first place, and two tokens on, where speculation may have had its say.

    The prompt ends in the middle of a sentence; the tokens before `place` are forced by a prompt
    that holds them, so that all seeds share the row.
    """
    core = make_core(**drafter_settings(drafter_name))
    start = prompts()[12]
    lead = run(core, [Job(start, SamplingParams(temperature=0.0, max_tokens=place + 1))])[0]
    prompt = start + tuple(lead.token_ids[:place])
    batch = [
        Job(
            prompt,
            SamplingParams(
                **settings, seed=seed, max_tokens=2, logprobs=20, logprobs_mode="processed"
            ),
        )
        for seed in range(NUM_SEEDS)
    ]
    results = run(core, batch)
    distribution = dict(
        zip(
            results[0].logprobs[0].token_ids[1:],
            (math.exp(value) for value in results[0].logprobs[0].logprobs[1:]),
            strict=True,
        )
    )
    cells = Cells()
    cells.add(distribution, Counter(result.token_ids[0] for result in results))
    assert cells.num_free >= 1, "a distribution with one likely token tests nothing"
    assert cells.statistic < chi_square_limit(cells.num_free), cells
