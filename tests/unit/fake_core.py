"""Engine cores over the fake runner, and what a test needs to run and judge them.

Without pytest, which takes longer to import than a fake engine process to start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from openspec.engine.core.engine_core import EngineCore
from openspec.messages import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    SamplingParams,
    SpeculativeOptions,
)
from openspec.specs.runner import RunnerConfig
from tests.unit.fake_runner import (
    VOCAB,
    FakeParams,
    FakeRunner,
    plain_text,
)


def make_core(runner: FakeRunner, max_num_seqs: int = 8, *, displaces: bool = False) -> EngineCore:
    info = EngineInfo(
        model="fake",
        vocab_size=VOCAB,
        max_model_len=runner.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        page_size=runner.page_size,
        num_pages=runner.num_pages,
        method="fake",
        num_speculative_tokens=runner.max_draft_tokens,
        dtype="float32",
        device="cpu",
        memory_plan={},
        startup_seconds=0.0,
    )
    config = runner_config(
        max_model_len=runner.max_model_len,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        page_size=runner.page_size,
        max_draft_tokens=runner.max_draft_tokens,
        enable_prefix_caching=runner.enable_prefix_caching,
    )
    return EngineCore(runner, config, info, displaces=displaces)


def runner_config(
    *,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 32,
    page_size: int = 4,
    max_draft_tokens: int,
    enable_prefix_caching: bool = True,
) -> RunnerConfig:
    """What the scheduler reads of a runner's sizes; the fake runner has no target."""
    target: Any = None
    return RunnerConfig(
        target=target,
        device="cpu",
        dtype="float32",
        page_size=page_size,
        max_num_seqs=8,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits_rows=max_num_batched_tokens,
        num_threads=1,
        max_draft_tokens=max_draft_tokens,
        draft_depth=max_draft_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


def make_request(
    name: str = "r",
    prompt: list[int] | None = None,
    *,
    priority: int = 0,
    speculative: SpeculativeOptions | None = None,
    grammar: str = "",
    **sampling: object,
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt or [1, 2, 3],
        sampling=SamplingParams(**{"seed": 7, **sampling}),  # type: ignore[arg-type]
        priority=priority,
        speculative=speculative or SpeculativeOptions(),
        grammar=grammar,
    )


@dataclasses.dataclass
class Seen:
    """Everything an engine said about one request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    finish_reason: str | None = None
    last: EngineOutput | None = None

    def take(self, output: EngineOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        self.token_ids += output.token_ids
        self.logprobs += [entry.logprobs[0] for entry in output.logprobs or ()]
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None and len(self.token_ids) == len(output.token_ids)
            self.prompt_logprobs = [entry.logprobs[0] for entry in output.prompt_logprobs]
        self.finish_reason, self.last = output.finish_reason, output


def run(
    core: EngineCore,
    requests: list[EngineRequest],
    before_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 20_000,
) -> dict[str, Seen]:
    seen: dict[str, Seen] = {}
    for request in requests:
        core.add_request(request)
        seen[request.request_id] = Seen()
    step = 0
    while core.has_work:
        before_step(step)
        for output in core.step():
            seen.setdefault(output.request_id, Seen()).take(output)
        core.check_integrity()
        step += 1
        assert step < max_steps, "the engine does not finish"
    return seen


def expected(request: EngineRequest, max_model_len: int) -> tuple[list[int], str]:
    sampling = request.sampling
    params = FakeParams(
        seed=sampling.seed or 0,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )
    return plain_text(request.prompt_token_ids, params, max_model_len)
