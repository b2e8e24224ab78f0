"""The drafters that every gate runs over, and plain decoding's answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from openspec import _C
from openspec.config import EMBEDDED_MODEL
from openspec.drafters import available_drafters, get_drafter, plain_method
from tests.gates import harness, other_targets
from tests.gates.harness import PLAIN, Job, Result, make_core, run_alone
from tests.gates.pairs import EMBEDDED, MEETS_TARGETS
from tests.heads import models, untrained


class Reference(Protocol):
    """Plain decoding's answers to jobs, under settings that are not the gates'."""

    def __call__(self, jobs: Sequence[Job], **settings: object) -> list[Result]: ...


class GarbageDrafter(_C.Drafter):
    """Ids that are no tokens, wrong tokens, too many of them."""

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
        kind = len(token_ids) % 4
        if kind == 0:
            return [-1, 2**40, 5]
        if kind == 1:
            return [7] * (num_wanted + 3)
        if kind == 2:
            return [token_ids[-1], 10**6, token_ids[-1]]
        raise ValueError("no idea today")


class EchoDrafter(_C.Drafter):
    """What followed the last occurrence of the last token: often right, often wrong."""

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[int]:
        for at in range(len(token_ids) - 2, -1, -1):
            if token_ids[at] == token_ids[-1]:
                return token_ids[at + 1 : at + 1 + num_wanted]
        return []


class BushDrafter(_C.Drafter):
    """What followed every occurrence of the last token, as a tree; at times one that is none."""

    def propose(self, slot: int, token_ids: list[int], num_wanted: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        for at in range(len(token_ids) - 2, -1, -1):
            if token_ids[at] != token_ids[-1]:
                continue
            parent = -1
            for token in token_ids[at + 1 : at + 4]:
                if (token, parent) not in nodes:
                    nodes.append((token, parent))
                parent = nodes.index((token, parent))
        if len(token_ids) % 5 == 0:
            nodes.insert(2, (7, len(nodes)))
        return nodes


PYTHON_DRAFTERS = {"(garbage)": GarbageDrafter, "(echo)": EchoDrafter, "(bush tree)": BushDrafter}

TREES: dict[str, dict[str, object]] = {
    "eagle3 tree": {"method": "eagle3", "draft_top_k": 4},
    "dflash tree": {"method": "dflash", "draft_top_k": 4},
    "dspark tree": {"method": "dspark", "draft_top_k": 4},
    "dflash selector tree": {"method": "dflash2", "draft_top_k": 4},
    "peagle tree": {"method": "peagle", "draft_top_k": 4},
    "draft_model tree": {"method": "draft_model", "head": models.MASKS, "draft_top_k": 4},
}
"""Compiled drafters that draft trees."""

MOST_IN_A_CHAIN = 15
"""Drafts of a language model that drafts one after another."""
STRANGER = "draft_model stranger"
"""Shares nothing with any target."""

VARIANTS: dict[str, dict[str, object]] = {
    **TREES,
    "eagle3 copies": {"method": "eagle3", "copied_drafts": True},
    "eagle3 copies tree": {"method": "eagle3", "copied_drafts": True, "draft_top_k": 4},
    "eagle3 long": {"method": "eagle3", "num_speculative_tokens": 15},
    "eagle3 deep tree": {"method": "eagle3", "num_speculative_tokens": 15, "draft_top_k": 3},
    "eagle3 window": {"method": "eagle3", "draft_window": 24},
    "eagle3 layers": {"method": "eagle3", "head": untrained.LAYERS},
    "peagle long": {"method": "peagle", "num_speculative_tokens": 15},
    "dflash window": {"method": "dflash", "draft_window": 24},
    "dflash selector": {"method": "dflash2"},
    "mtp vocabulary": {"method": "mtp", "draft_vocab_size": 1024},
    "draft_model masks": {"method": "draft_model", "head": models.MASKS},
    "draft_model states": {"method": "draft_model", "head": models.STATES},
    STRANGER: {"method": "draft_model", "head": models.STRANGER},
    "draft_model short": {"method": "draft_model", "head": models.SHORT, "draft_window": 40},
    "draft_model long": {
        "method": "draft_model",
        "head": models.LONG,
        "num_speculative_tokens": 15,
    },
}
"""Compiled drafters with other options than their defaults."""

PARTS_OF_VOCABULARY = ("mtp vocabulary",)
"""Variants that draft some of the target's tokens, which ranks do not share."""

SELECTORS = ("dflash selector", "dflash selector tree")
"""Variants that share all but their forward pass with others: a commit runs them in a gate of their
own (test_selector_heads), `--full` in all."""

LEFT_TO_FULL = (
    *SELECTORS,
    "eagle3 copies",
    "eagle3 copies tree",
    "draft_model tree",
    STRANGER,
    "mtp vocabulary",
    "draft_model states",
    "draft_model short",
    "draft_model long",
)
"""Variants whose kind others of a commit's run have."""


def drafter_settings(name: str, num_drafts: int = 4) -> dict[str, object]:
    """Settings for `make_core` that select a drafter, compiled or written above."""
    if name in PYTHON_DRAFTERS:
        # Always drafting: what is granted must not matter, and garbage would soon get nothing.
        return {
            "method": "ngram",
            "num_speculative_tokens": num_drafts,
            "drafter": PYTHON_DRAFTERS[name](),
            "adaptive_speculation": False,
        }
    if name == plain_method():
        return {"method": name}
    settings = dict(VARIANTS.get(name, {"method": name}))
    spec = get_drafter(str(settings["method"]))
    head = str(settings.pop("head", ""))
    draft_model = untrained.draft_model(str(settings["method"]), head)
    settings = {**settings, "draft_model": draft_model}
    most = spec.max_num_speculative_tokens
    if spec.name == "draft_model":
        most = MOST_IN_A_CHAIN
    elif spec.num_drafts_of is not None:  # the drafts of a block
        folder = Path(draft_model or EMBEDDED_MODEL / spec.name)
        most = spec.num_drafts_of(folder, spec.complete_options({}))
    return {"num_speculative_tokens": min(num_drafts, most), **settings}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every drafter and every target; for a commit's run not those that it would leave out.

    There are tens of thousands of cases, and each worker would make them.
    """
    drafters = [*available_drafters(), *VARIANTS, *PYTHON_DRAFTERS]
    targets = [EMBEDDED, *other_targets.NAMES]
    if not harness.IS_FULL:
        drafters = [name for name in drafters if name not in LEFT_TO_FULL]
        targets = targets if metafunc.module.__name__ == MEETS_TARGETS else [EMBEDDED]
    for name, values in (("drafter_name", drafters), ("target_name", targets)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, indirect=True)


@pytest.fixture
def target_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kind of target that the gates run over."""
    name = str(request.param)
    if name in other_targets.NAMES:
        monkeypatch.setattr(harness, "MODEL", str(other_targets.folder(name)))
    return name


@pytest.fixture
def drafter_name(request: pytest.FixtureRequest, target_name: str) -> str:
    """Every drafter there is, with trees too, and some that only tests would want."""
    return str(request.param)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Plain decoding, one request at a time, no cache, prompts whole."""
    core_of = cache(lambda model, **settings: make_core(**PLAIN, **settings))
    known: dict[tuple[object, ...], Result] = {}

    def answers(jobs: Sequence[Job], **settings: object) -> list[Result]:
        core = core_of(harness.MODEL, **settings)  # which is the model that it makes one of
        of_core = (harness.MODEL, repr(settings))
        keys = [(*of_core, job.prompt, repr(job.sampling)) for job in jobs]
        missing = [(key, job) for key, job in zip(keys, jobs, strict=True) if key not in known]
        whole = [dataclasses.replace(job, abort_after=None) for _, job in missing]
        for (key, _), result in zip(missing, run_alone(core, whole), strict=True):
            known[key] = result
        return [known[key] for key in keys]

    return answers
