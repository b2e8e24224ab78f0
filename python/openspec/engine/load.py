"""From an EngineConfig to a running EngineCore: checkpoint, memory plan, runner, weights."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from openspec import drafters
from openspec.checkpoint.other_head import check_same_shape, find_folder, hash_of_weights
from openspec.checkpoint.weights import OtherHead, load_weights
from openspec.config import EngineConfig
from openspec.engine.core.drafters import CheckedHead, Drafters
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.kv_events import KVEventPublisher, KVEventsConfig
from openspec.engine.core.request import Request
from openspec.engine.devices import Share
from openspec.engine.memory import CUDA
from openspec.engine.plan import PlannedEngine, plan_engine  # which says why _C does not load
from openspec.engine.start_phases import Phases
from openspec.errors import ConfigError, RequestError
from openspec.messages import EngineInfo, StepTime
from openspec.settings.setting import format_bytes
from openspec.specs.runner import RunnerConfig

# isort: split
from openspec import _C

logger = logging.getLogger(__name__)


class CompiledRunner(_C.Runner):
    """The compiled core's runner as the engine needs it."""

    def add(self, request: Request) -> int:
        """Takes a slot for the request's known tokens and attaches the cached prefix."""
        sampling = request.source.sampling
        params = _C.SequenceParams(
            sampling,
            # Without output wanted, one token is chosen all the same, and dropped by the scheduler.
            max_tokens=max(request.max_tokens, 1),
            num_prompt_logprobs=(sampling.prompt_logprobs or 0)
            if request.needs_prompt_logprobs
            else -1,
            reports_steps=request.source.speculative.detailed,
            grammar=None if request.grammar is None else request.grammar.result(),
            grammar_tally=request.grammar_tally,
            owner=f"{request.source.owner}/{request.source.cache_salt}".encode(),
        )
        salt = request.source.cache_salt.encode()
        return self.add_sequence(request.token_ids, request.prompt_len, params, salt)

    def num_cached(self, request: Request) -> int:
        """With how much KV it would begin."""
        if request.needs_prompt_logprobs:
            return 0
        return self.num_cached_tokens(request.token_ids, request.source.cache_salt.encode())

    load_vocabulary = staticmethod(_C.Vocabulary)
    """What grammars are read with."""
    new_grammar_tally = staticmethod(_C.GrammarTally)
    """For the sequences of a request."""
    load_grammar = staticmethod(_C.Grammar)
    """A grammar that was compiled for the vocabulary."""


def load_engine(
    config: EngineConfig,
    drafter: _C.Drafter | None = None,
    share: Share | None = None,
    phases: Phases | None = None,
) -> EngineCore:
    """Loads the model and starts an engine in this process.

    `drafter` takes the place of the configured method, with the configured K (for tests). `share`
    is the engine's part of the machine, all of it by default. `phases` has what came before.

    Raises:
        ConfigError: for anything in config or checkpoint that cannot work, with the remedy.
    """
    started = time.monotonic()
    phases = phases or Phases()
    share = share or Share()
    kv_events = _kv_events_config(config, share)
    planned = plan_engine(config, drafter, share, phases)
    _log_plan(planned)
    config, chosen, plan = planned.config, planned.chosen, planned.memory
    runner_config = dataclasses.replace(planned.runner, max_model_len=plan.max_model_len)
    runner = CompiledRunner(runner_config, plan.num_pages, chosen.drafter)
    phases.end("memory")
    load_weights(
        runner,
        config.model_path,
        draft_model=chosen.draft_model,
        weight_format=planned.weight_format,
        load_format=config.load_format,
        other_parts=drafters.parts_of_targets(),
    )
    phases.end("weights")
    runner.finish_loading()
    phases.end("graphs")
    num_non_finite = _check_weights(runner)
    phases.end("check of weights")
    step_times = []
    if config.adaptive_speculation:
        # Without a drafter they only say how many tokens that a grammar forces a step verifies.
        budget_s = planned.device.step_timing_s / (1 if config.draft_depth > 0 else 5)
        step_times = _step_times(runner, share.step_times, budget_s)
    phases.end("step times")

    info = _info(
        planned,
        runner_config,
        startup_seconds=time.monotonic() - started,
        num_non_finite_draft_tensors=num_non_finite,
        step_times=step_times,
    )
    _log_ready(info, phases)
    publisher = _publisher(kv_events, runner, config.page_size)
    if publisher is not None:
        info = msgspec.structs.replace(info, kv_events=publisher.source)
    return EngineCore(
        runner,
        runner_config,
        info,
        config.stats_interval_s,
        publisher,
        displaces=config.scheduling_policy == "priority",
        drafters=_drafters(planned, runner),
    )


@dataclass(frozen=True, slots=True)
class _OtherHeads:
    """Reads heads that may take the place of an engine's own."""

    planned: PlannedEngine
    runner: CompiledRunner
    root: Path

    def __call__(self, path: str, sha256: str | None) -> CheckedHead:
        """A head that fits; see `HeadReader`."""
        running = self.planned.chosen.draft_model
        folder = find_folder(path, self.root)
        setup = dataclasses.replace(self.planned.draft_setup, folder=folder)
        read = setup.spec.read_draft_model
        assert running is not None and read is not None  # or the plan had been refused
        try:
            setup.spec.validate(setup)
            model = read(setup)
            check_same_shape(folder, model.head, running.head)
            found = hash_of_weights(folder)
            if sha256 is not None and sha256.lower() != found:
                raise RequestError(
                    f"{folder}: SHA-256 {found}, expected {sha256:.80}; copy the head anew",
                    "sha256",
                    "drafter_sha256",
                )
            weights = OtherHead(self.runner, model)
        except (ConfigError, OSError) as error:
            raise RequestError(str(error), "path", "drafter_unreadable") from None
        logger.info("other draft head: %s", model.description)
        return CheckedHead(str(folder), found, weights.load)


def _drafters(planned: PlannedEngine, runner: CompiledRunner) -> Drafters:
    """The head that drafts, and where others may come from."""
    root, model = planned.config.drafter_dir, planned.chosen.draft_model
    return Drafters(
        runner,
        planned.chosen.method,
        "" if model is None else str(model.folder),
        None if root is None else _OtherHeads(planned, runner, Path(root)),
    )


def _log_plan(planned: PlannedEngine) -> None:
    plan, wanted = planned.memory, planned.runner
    if wanted.tensor_parallel_size > 1 and planned.device.is_host:
        logger.info(
            "%d ranks on %s are a reference: the same text as one, and no sooner",
            wanted.tensor_parallel_size,
            wanted.device,
        )
    if plan.max_model_len < wanted.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d, what the KV memory of %s holds; %s raises it",
            wanted.max_model_len,
            plan.max_model_len,
            format_bytes(plan.kv_bytes),
            planned.device.kv_flag(planned.config),
        )
    if planned.config.copied_drafts and wanted.acceptance == "rejection":
        logger.info(
            "drafts copied from the text are off: --acceptance rejection needs the probabilities "
            "of drafts, and they have none"
        )
    logger.info("memory: %s", plan.describe())


def _log_ready(info: EngineInfo, phases: Phases) -> None:
    logger.info(
        "ready in %.2f s: %s, weights %s, %s on %s, method %s with %d drafts%s, max_model_len %d",
        info.startup_seconds,
        info.model,
        info.weights,
        info.dtype,
        _devices(info),
        info.method,
        info.num_speculative_tokens,
        " beside copies" if info.max_copied_drafts > 0 else "",
        info.max_model_len,
    )
    logger.info("start-up: %s", phases)


def _devices(info: EngineInfo) -> str:
    if info.device != CUDA.name:
        return info.device
    number = f"{info.tensor_parallel_size} x " if info.tensor_parallel_size > 1 else ""
    return f"{info.device} ({number}{_C.cuda_device_name()})"


def _kv_events_config(config: EngineConfig, share: Share) -> KVEventsConfig:
    settings = KVEventsConfig.of(config.kv_events_config or {})
    if share.num_replicas > 1:
        settings = settings.of_engine(share.replica, share.num_replicas)
    if settings.is_on and not config.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config: events tell of the prefix cache, which is off; drop one of "
            "--kv-events-config and --no-enable-prefix-caching"
        )
    return settings


def _publisher(
    config: KVEventsConfig, runner: CompiledRunner, page_size: int
) -> KVEventPublisher | None:
    if not config.is_on:
        return None
    publisher = KVEventPublisher(config, page_size)
    runner.record_page_events()
    return publisher


def _check_weights(runner: _C.Runner) -> int:
    """Refuses a model of NaN or infinity; such tensors of its draft model only cost drafts."""
    target, draft = runner.non_finite_tensors()
    if target:
        raise ConfigError(
            f"the model holds NaN or infinity, in {len(target)} of its tensors: "
            f"{'; '.join(target[:5])}; get the checkpoint anew"
        )
    if draft:
        logger.warning(
            "%d tensors of the draft model hold NaN or infinity, which costs drafts: %s",
            len(draft),
            "; ".join(draft[:5]),
        )
    return len(draft)


def _step_times(
    runner: CompiledRunner, known: list[StepTime] | None, budget_s: float
) -> list[StepTime]:
    """What steps take: measured, unless an engine like this one has measured it."""
    if known is None:
        return [
            StepTime(
                num_seqs=num_seqs,
                num_rows=rows,
                proposes=proposes,
                milliseconds=1000 * seconds,
                num_experts=num_experts,
            )
            for num_seqs, rows, proposes, seconds, num_experts in runner.measure_step_times(
                budget_s
            )
        ]
    runner.set_step_times(
        [
            (one.num_seqs, one.num_rows, one.proposes, one.milliseconds / 1000, one.num_experts)
            for one in known
        ]
    )
    return known


def _info(
    planned: PlannedEngine,
    runner: RunnerConfig,
    *,
    startup_seconds: float,
    num_non_finite_draft_tensors: int,
    step_times: list[StepTime],
) -> EngineInfo:
    config, plan = planned.config, planned.memory
    return EngineInfo(
        model=str(config.model_path),
        vocab_size=runner.target.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        page_size=runner.page_size,
        num_pages=plan.num_pages,
        method=config.method,
        num_speculative_tokens=config.draft_depth,
        max_draft_tokens=runner.max_draft_tokens,
        max_copied_drafts=runner.max_copied_drafts,
        dtype=runner.dtype,
        weights=planned.weight_format.name,
        device=runner.device,
        tensor_parallel_size=runner.tensor_parallel_size,
        memory_plan=plan.as_dict(),
        startup_seconds=startup_seconds,
        num_non_finite_draft_tensors=num_non_finite_draft_tensors,
        step_times=step_times,
    )
