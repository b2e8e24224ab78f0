"""The tiny trained targets: drafts change no text, and many are right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from openspec.engine.core.engine_core import EngineCore
from tests import models
from tests.gates import harness
from tests.gates.harness import make_core, run, run_alone, texts
from tests.gates.workload import jobs

NUM_JOBS = 12
METHODS = [
    pytest.param("tiny_hybrid", "ngram", marks=pytest.mark.full),
    ("tiny_hybrid", "mtp"),
    ("tiny_mixture", "ngram"),
]


@cache
def expected(name: str, kind: str, dtype: str) -> list[tuple[list[int], str | None]]:
    """Texts of plain decoding, each job alone."""
    core = make_core(model=str(models.folder(name)), dtype=dtype, **harness.PLAIN)
    return texts(run_alone(core, jobs(kind, NUM_JOBS)))


def drafting(name: str, method: str, **settings: Any) -> EngineCore:
    """An engine that always drafts."""
    return make_core(
        **{
            "model": str(models.folder(name)),
            "method": method,
            "num_speculative_tokens": 3,
            "adaptive_speculation": False,
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("mixed", "float32"),
        pytest.param("greedy", "bfloat16", marks=pytest.mark.full),
        pytest.param("sampled", "bfloat16", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_texts(name: str, method: str, kind: str, dtype: str) -> None:
    """In a batch, in chunks of prompts, and once more after prefix hits."""
    if dtype == "float32" and harness.DEVICE != "cpu":
        pytest.skip("of the host")
    core = drafting(name, method, dtype=dtype, max_num_batched_tokens=97)
    for _ in range(2):
        assert texts(run(core, jobs(kind, NUM_JOBS))) == expected(name, kind, dtype)
    stats = core.stats()
    assert stats.num_accepted_tokens > 0
    assert stats.prefix_cache_hits > 0
    if name == "tiny_mixture":  # rows of a text go to experts of their neighbours
        assert 0.3 < stats.experts_of_drafts < 0.9


def test_first_drafts_are_mostly_right() -> None:
    """Of the layer that was trained with its target, for questions like those it learned."""
    core = drafting("tiny_hybrid", "mtp", num_speculative_tokens=1)
    questions = jobs("greedy", NUM_JOBS)[4:8]
    run(core, questions)
    stats = core.stats()
    assert stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens
