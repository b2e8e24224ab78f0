"""From an EngineConfig to a running EngineCore: checkpoint, memory plan, runner, weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from openspec.engine.start_phases import Phases
from openspec.errors import ConfigError, check_is_built, out_of_memory

try:
    from openspec import _C
except ImportError as error:
    check_is_built()
    if out_of_memory(error) is not None:
        raise
    raise ConfigError(
        f"openspec's compiled part does not load ({error}); it needs the torch that it was built "
        "with: pip install torch, then pip install . again in the checkout of openspec"
    ) from error
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import DraftModel, load_weights
from openspec.config import TENSOR_PARALLEL_SIZES, EngineConfig
from openspec.drafters import plain_method
from openspec.drafters.spec import (
    DRAFT_WINDOW,
    SUGGESTED_WINDOW,
    DrafterSpec,
    DraftSetup,
    OptionValue,
)
from openspec.engine.core.engine_core import EngineCore
from openspec.engine.core.kv_events import KVEventPublisher, KVEventsConfig
from openspec.engine.core.request import Request
from openspec.engine.devices import Share
from openspec.engine.memory import (
    CUDA,
    DeviceMemory,
    DeviceTraits,
    MemoryPlan,
    available_cpus,
    available_memory,
    choose_device,
    plan_memory,
)
from openspec.messages import EngineInfo, StepTime
from openspec.settings.setting import format_bytes
from openspec.specs.runner import RunnerConfig

logger = logging.getLogger(__name__)

MAX_GRAMMAR_DRAFTS = 8
"""Most drafts of a grammar in a step without a drafter: a schema's names are shorter."""


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
    load_weights(runner, config.model_path, draft_model=chosen.draft_model)
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
        config,
        runner_config,
        plan,
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
    )


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """What an engine will be."""

    config: EngineConfig
    device: DeviceTraits
    chosen: _ChosenDrafter
    runner: RunnerConfig
    """With the longest sequence that is wanted; `memory` has what fits."""
    memory: MemoryPlan


def plan_engine(
    config: EngineConfig,
    drafter: _C.Drafter | None = None,
    share: Share | None = None,
    phases: Phases | None = None,
) -> PlannedEngine:
    """What `load_engine` would load: no memory is taken, and of the checkpoint headers are read.

    Raises:
        ConfigError: for anything in config or checkpoint that cannot work, with the remedy.
    """
    share, phases = share or Share(), phases or Phases()
    config.check()
    device = choose_device(config.device, _C.why_no_cuda())
    device.check_ranks(config.tensor_parallel_size)
    phases.end("device")
    config = _shared(config, device, share)
    model_config = ModelConfig.from_folder(config.model_path)
    chosen = _choose_drafter(config, config.draft_setup(model_config), drafter)
    runner = _runner_config(
        config, device, model_config, _max_model_len(config, model_config), chosen
    )
    plan = _plan(config, runner, device, _device_memory(config, device, share))
    phases.end("headers and memory plan")
    return PlannedEngine(config, device, chosen, runner, plan)


def _log_plan(planned: PlannedEngine) -> None:
    plan, wanted = planned.memory, planned.runner
    if wanted.tensor_parallel_size > 1:
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
    logger.info("memory: %s", plan.describe())


def _plan(
    config: EngineConfig, runner: RunnerConfig, device: DeviceTraits, memory: DeviceMemory
) -> MemoryPlan:
    wanted = _wanted_memory(runner)
    try:
        return plan_memory(config, wanted, runner.max_model_len, device, memory)
    except ConfigError as error:
        fitting = _fitting_ranks(config, runner, device, memory)
        if fitting is None:
            raise
        raise ConfigError(
            f"{error}; each of {fitting} such devices would hold its part with "
            f"--tensor-parallel-size {fitting}, which does not run on {device.name} yet"
        ) from None


def _fitting_ranks(
    config: EngineConfig, runner: RunnerConfig, device: DeviceTraits, memory: DeviceMemory
) -> int | None:
    """How many more ranks, each with a device like this one, would fit; None: no number of them."""
    # On the host the ranks have one memory in common, whatever their number.
    for num_ranks in () if device.is_host else TENSOR_PARALLEL_SIZES:
        if num_ranks > runner.tensor_parallel_size:
            shared = dataclasses.replace(runner, tensor_parallel_size=num_ranks)
            with contextlib.suppress(ConfigError):
                wanted = _wanted_memory(shared)
                plan_memory(config, wanted, runner.max_model_len, device, memory)
                return num_ranks
    return None


def _log_ready(info: EngineInfo, phases: Phases) -> None:
    logger.info(
        "ready in %.2f s: %s, %s on %s, method %s with %d drafts, max_model_len %d",
        info.startup_seconds,
        info.model,
        info.dtype,
        f"{info.device} ({_C.cuda_device_name()})" if info.device == CUDA.name else info.device,
        info.method,
        info.num_speculative_tokens,
        info.max_model_len,
    )
    logger.info("start-up: %s", phases)


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
            f"{len(target)} tensors of the model hold NaN or infinity, first {target[0]}; get the "
            "checkpoint anew"
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
            StepTime(num_seqs=num_seqs, num_rows=rows, proposes=proposes, milliseconds=1000 * s)
            for num_seqs, rows, proposes, s in runner.measure_step_times(budget_s)
        ]
    runner.set_step_times(
        [(one.num_seqs, one.num_rows, one.proposes, one.milliseconds / 1000) for one in known]
    )
    return known


@dataclass(frozen=True, slots=True)
class _ChosenDrafter:
    """Who drafts: one of the compiled methods, or a drafter of this process."""

    method: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    draft_model: DraftModel | None = None
    drafter: _C.Drafter | None = None


def _choose_drafter(
    config: EngineConfig, setup: DraftSetup, drafter: _C.Drafter | None
) -> _ChosenDrafter:
    spec = setup.spec
    spec.validate(setup)
    if config.draft_depth == 0:
        return _ChosenDrafter(plain_method(), drafter=drafter)
    if drafter is None and spec.build is not None:
        drafter = spec.build(config.draft_depth, setup.options)
    if drafter is not None or spec.build is not None:
        if not isinstance(drafter, _C.Drafter):
            raise ConfigError(
                "a drafter written in Python must be a subclass of openspec._C.Drafter, got "
                f"{type(drafter).__name__}"
            )
        return _ChosenDrafter(plain_method(), drafter=drafter)
    if spec.name not in _C.drafter_names():
        raise ConfigError(f"method {spec.name!r} is not part of this build; reinstall openspec")
    draft_model = _read_draft_model(spec, setup, config)
    return _ChosenDrafter(spec.name, setup.options, draft_model)


def _read_draft_model(
    spec: DrafterSpec, setup: DraftSetup, config: EngineConfig
) -> DraftModel | None:
    if spec.read_draft_model is None:
        return None
    draft_model = spec.read_draft_model(setup)
    logger.info("draft model: %s", draft_model.description)
    if config.draft_model is None:
        logger.info(
            "draft model: %s, which came with the model; --draft-model takes another",
            draft_model.folder,
        )
    length = draft_model.trained_length
    sees_all = any(not layer.window for layer in draft_model.head.layers)
    can_slide = sees_all and setup.options.get(DRAFT_WINDOW) == 0
    if can_slide and length is not None and length < _max_model_len(config, setup.target):
        logger.info(
            "draft model: trained on %d tokens; --method-option %s=%d suggested for longer texts",
            length,
            DRAFT_WINDOW,
            min(SUGGESTED_WINDOW, length),
        )
    return draft_model


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.max_model_len is None:
        return model_config.max_model_len
    if config.max_model_len > model_config.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds what the model's positions are made "
            f"for, {model_config.max_model_len}; lower --max-model-len or add rope scaling to "
            "config.json"
        )
    return config.max_model_len


def _wanted_memory(runner: RunnerConfig) -> _C.MemoryPlan:
    """What the runner takes, of several ranks each.

    Raises:
        ConfigError: the core does not compute such a target, or not on so many ranks.
    """
    try:
        return _C.memory_plan(runner)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _device_memory(config: EngineConfig, device: DeviceTraits, share: Share) -> DeviceMemory:
    if device is CUDA:
        num_engines = share.num_on_device
        free_bytes, total_bytes = _C.cuda_memory()
        budget_bytes = int(total_bytes * config.gpu_memory_utilization / num_engines)
        host_bytes = available_memory() // share.num_replicas
    else:
        num_engines = share.num_replicas
        free_bytes = available_memory()
        if share.available_bytes is not None:
            # Some have taken their part by now, and some have not.
            free_bytes = min(free_bytes, share.available_bytes // num_engines)
        # The ranks of an engine have the host's memory in common.
        free_bytes //= config.tensor_parallel_size
        budget_bytes, host_bytes = free_bytes, 0
    return DeviceMemory(
        budget_bytes=budget_bytes,
        free_bytes=free_bytes,
        host_bytes=host_bytes,
        num_engines=num_engines,
        num_ranks=config.tensor_parallel_size,
    )


def _shared(config: EngineConfig, device: DeviceTraits, share: Share) -> EngineConfig:
    """The settings of one of several engines, with its part of the CPUs."""
    if share.num_replicas == 1:
        return config
    if device is CUDA and share.num_on_device > 1:
        logger.info(
            "one of %d engines on this GPU: gpu_memory_utilization %g is divided, %.3g each",
            share.num_on_device,
            config.gpu_memory_utilization,
            config.gpu_memory_utilization / share.num_on_device,
        )
    num_threads = config.num_threads
    if device is not CUDA and num_threads is None:
        num_threads = max(1, available_cpus() // share.num_replicas)
        logger.info("one of %d engines: %d CPU threads each", share.num_replicas, num_threads)
    return dataclasses.replace(config, num_threads=num_threads)


def _runner_config(
    config: EngineConfig,
    device: DeviceTraits,
    model_config: ModelConfig,
    max_model_len: int,
    chosen: _ChosenDrafter,
) -> RunnerConfig:
    max_num_batched_tokens = device.choose_num_rows(
        config.max_num_batched_tokens, config.min_num_batched_tokens
    )
    num_logits_rows = device.choose_num_logits_rows(
        config.max_num_seqs * (1 + config.max_draft_tokens), model_config.vocab_size
    )
    return RunnerConfig(
        target=model_config.spec,
        device=device.name,
        dtype=device.choose_dtype(config.dtype),
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits_rows=min(max_num_batched_tokens, num_logits_rows),
        num_threads=config.num_threads or available_cpus(),
        tensor_parallel_size=config.tensor_parallel_size,
        max_draft_tokens=config.max_draft_tokens,
        max_grammar_drafts=MAX_GRAMMAR_DRAFTS,
        draft_depth=config.draft_depth,
        method=chosen.method,
        method_options=dict(chosen.options),
        head=chosen.draft_model.head if chosen.draft_model is not None else None,
        acceptance=config.acceptance if config.draft_depth > 0 else "match",
        adaptive=config.adaptive_speculation,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_key=os.urandom(16),
    )


def _info(
    config: EngineConfig,
    runner: RunnerConfig,
    plan: MemoryPlan,
    *,
    startup_seconds: float,
    num_non_finite_draft_tensors: int,
    step_times: list[StepTime],
) -> EngineInfo:
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
        dtype=runner.dtype,
        device=runner.device,
        tensor_parallel_size=runner.tensor_parallel_size,
        memory_plan=plan.as_dict(),
        startup_seconds=startup_seconds,
        num_non_finite_draft_tensors=num_non_finite_draft_tensors,
        step_times=step_times,
    )
