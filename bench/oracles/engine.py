"""openspec's side: the drafts of an engine that always drafts, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openspec import _C

Path_ = tuple[int, ...]
"""A draft with those before it, from the root on."""


def make_runner(target: Path, head: Path, method: str, depth: int, **options: int) -> _C.Runner:
    """The core of an engine with a head."""
    from openspec import _C
    from openspec.config import config_from_settings
    from openspec.engine.load import load_engine

    settings = {
        "model": str(target),
        "draft_model": str(head),
        "method": method,
        "num_speculative_tokens": depth,
        "adaptive_speculation": False,
        "copied_drafts": False,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 1,
        "num_threads": 1,
        "stats_interval_s": 0.0,
        "method_options": options,
    }
    runner = load_engine(config_from_settings(settings))._runner  # type: ignore[attr-defined]
    assert isinstance(runner, _C.Runner)
    return runner


def step(runner: _C.Runner, slot: int, num_new: int, num_drafts: int) -> list[int]:
    """One step of one sequence; the tokens it adds."""
    lease = runner.reserve([(slot, num_new, num_drafts)])
    lease.launch()
    (result,) = lease.collect()
    lease.commit()
    return list(result.token_ids)


def drafts_after(runner: _C.Runner, prompt: list[int], num_drafts: int) -> tuple[int, list[Path_]]:
    """The token that follows a prompt, computed in chunks, and the paths drafted after it."""
    from openspec import _C
    from openspec.messages import SamplingParams

    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=64)
    slot = runner.add_sequence(prompt, len(prompt), params)
    known: list[int] = []
    while not known:
        known = step(runner, slot, min(17, len(prompt) - runner.kv_len(slot)), 0)
    step(runner, slot, 1, num_drafts)
    (tokens,), (parents,) = runner.last_drafts(), runner.last_draft_parents()
    paths: list[Path_] = []
    for i, token in enumerate(tokens):
        parent = parents[i] if parents else i - 1
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    runner.remove_sequence(slot)
    return known[0], paths
