"""Runs jobs through an engine core step by step, so that every mix is reached on purpose."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from openspec import _C
from openspec.config import EngineConfig, config_from_settings
from openspec.drafters import option_names
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.load import load_engine
from openspec.messages import EngineRequest, SamplingParams, SpeculativeOptions, TokenLogprobs
from openspec.text.tokenizer import Tokenizer

DEVICE = "cpu"
"""Set by the option --device."""
IS_FULL = False
"""Whether every combination of the gates' parameters runs; set by --full and --device cuda."""
NUM_THREADS = 1
"""Of each engine, more where all runs. Two workers with an engine each fill two cores."""
MODEL: str | None = None
"""Folder of the target; set by the fixture `target_name`. None: the embedded model."""
PAGE_SIZE = 16
PLAIN: dict[str, object] = {"method": "none", "enable_prefix_caching": False}


def imported(name: str) -> Any:
    """A module of the tests' requirements, which only a machine for CUDA may lack."""
    return pytest.importorskip(name) if DEVICE == "cuda" else importlib.import_module(name)


@dataclass(frozen=True)
class Job:
    """One request, when it arrives and when it is called off."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrives_at: int = 0
    """Step."""
    abort_after: int | None = None
    """Tokens."""
    priority: int = 0
    speculative: SpeculativeOptions = SpeculativeOptions()  # noqa: RUF009
    grammar: str = ""
    cache_salt: str = ""


@dataclass
class Result:
    """What came out."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> tuple[list[int], str | None]:
        """What the gates compare: tokens (hence the length) and why they end."""
        return self.token_ids, self.finish_reason


@cache
def tokenizer() -> Tokenizer:
    """The embedded model's."""
    return Tokenizer.from_folder(EngineConfig().model_path)


def make_core(drafter: _C.Drafter | None = None, **settings: object) -> EngineCore:
    """An engine on the embedded model; small limits unless the test says otherwise."""
    merged: dict[str, object] = {
        "device": DEVICE,
        "model": MODEL,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "page_size": PAGE_SIZE,
        "num_threads": NUM_THREADS,
        "stats_interval_s": 0.0,
        "copied_drafts": False,
        **settings,
    }
    return load_engine(config_from_settings(with_options(merged)), drafter)


def with_options(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings whose options of the method are where the engine takes them."""
    options = {name: settings[name] for name in option_names() if name in settings}
    others = {name: value for name, value in settings.items() if name not in options}
    return {**others, "method_options": options}


def kv_memory(num_pages: int, **settings: object) -> int:
    """Bytes of so many pages, which hold the drafter's layers too."""
    # What a page takes does not depend on how many there are.
    return num_pages * make_core(**settings).info.memory_plan["page_bytes"]


def run(core: EngineCore, jobs: Sequence[Job]) -> list[Result]:
    """All results, in the order of the jobs; afterwards the engine is empty and whole."""
    results = [Result() for _ in jobs]
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i].arrives_at)
    step = 0
    while waiting or core.has_work:
        while waiting and (jobs[waiting[0]].arrives_at <= step or not core.has_work):
            index = waiting.pop(0)
            job = jobs[index]
            core.add_request(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=list(job.prompt),
                    sampling=job.sampling,
                    priority=job.priority,
                    speculative=job.speculative,
                    grammar=job.grammar,
                    cache_salt=job.cache_salt,
                )
            )
        for output in core.step():
            result, job = results[int(output.request_id)], jobs[int(output.request_id)]
            assert result.finish_reason is None, "news after the end"
            result.token_ids += output.token_ids
            result.logprobs += output.logprobs or []
            result.prompt_logprobs += output.prompt_logprobs or []
            result.finish_reason = output.finish_reason
            result.error = output.error
            if job.abort_after is not None and len(result.token_ids) >= job.abort_after:
                core.abort(output.request_id)
        step += 1
    core.check_integrity()
    stats = core.stats()
    assert stats.num_free_pages == stats.num_pages, "a finished engine holds pages"
    return results


def run_alone(core: EngineCore, jobs: Sequence[Job]) -> list[Result]:
    """Each job by itself on the same core."""
    return [run(core, [dataclasses.replace(job, arrives_at=0)])[0] for job in jobs]


def texts(results: Sequence[Result]) -> list[tuple[list[int], str | None]]:
    """The part of results that must not depend on anything."""
    return [result.text for result in results]


def chat_prompt(text: str) -> tuple[int, ...]:
    """A question in the model's chat format."""
    rendered = tokenizer().render_chat(
        [{"role": "user", "content": text}], chat_template_kwargs={"enable_thinking": False}
    )
    return tuple(rendered.token_ids)
