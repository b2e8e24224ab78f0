"""What an engine will be, from an EngineConfig: drafter, runner's settings, memory plan."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

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
from openspec.checkpoint.quantization.weight_format import (
    WeightFormat,
    check_wanted,
    made_format,
    weight_format,
)
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import DraftModel, target_tensors
from openspec.config import TENSOR_PARALLEL_SIZES, EngineConfig
from openspec.drafters import parts_of_targets, plain_method
from openspec.drafters.spec import (
    DRAFT_WINDOW,
    SUGGESTED_WINDOW,
    DrafterSpec,
    DraftSetup,
    OptionValue,
)
from openspec.engine.devices import MODULE_LOADING, Share, check_ranks
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
from openspec.settings.setting import format_bytes
from openspec.specs.runner import RunnerConfig

logger = logging.getLogger(__name__)

UNLIKE_FREE_BYTES = 1 << 30
"""Of GPUs that share a model: more than processes of the system make."""
MAX_GRAMMAR_DRAFTS = 8
"""Most drafts of a grammar in a step without a drafter: a schema's names are shorter."""


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """Who drafts: one of the compiled methods, or a drafter of this process."""

    method: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    draft_model: DraftModel | None = None
    drafter: _C.Drafter | None = None


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """What an engine will be."""

    config: EngineConfig
    device: DeviceTraits
    chosen: ChosenDrafter
    runner: RunnerConfig
    """With the longest sequence that is wanted; `memory` has what fits."""
    memory: MemoryPlan
    weight_format: WeightFormat
    """How the target's matrices are stored."""
    draft_setup: DraftSetup
    """What the method was told, K filled in."""


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
    load_kernels_early(config)
    num_ranks = config.tensor_parallel_size
    device = choose_device(config.device, _C.why_no_cuda())
    if device is CUDA and num_ranks > 1:
        names = _C.cuda_device_names()
        check_ranks(num_ranks, names, lambda one, other: _C.cuda_peer(one, other)[0], os.environ)
    phases.end("device")
    config = _shared(config, device, share)
    model_config = ModelConfig.from_folder(config.model_path)
    weights = _weight_format(config, model_config)
    spec = dataclasses.replace(model_config.spec, quantized=weights.quantized)
    model_config = dataclasses.replace(model_config, spec=spec)
    setup = config.draft_setup(model_config)
    chosen = _choose_drafter(config, setup, drafter)
    if config.drafter_dir is not None and chosen.draft_model is None:
        raise ConfigError(
            f"drafter_dir is for draft heads that take each other's place, and method "
            f"{chosen.method!r} has none: drop it, or name a --method with a --draft-model"
        )
    runner = _runner_config(
        config, device, model_config, _max_model_len(config, model_config), chosen
    )
    plan = _plan(config, runner, device, _device_memory(config, device, share))
    phases.end("headers and memory plan")
    setup = dataclasses.replace(setup, num_speculative_tokens=config.draft_depth)
    return PlannedEngine(config, device, chosen, runner, plan, weights, setup)


def _weight_format(config: EngineConfig, model_config: ModelConfig) -> WeightFormat:
    """How the target's weights are stored, by its headers where its lists speak of FP8."""
    declared, wanted = model_config.quantization, config.quantization
    check_wanted(declared, wanted)
    if declared is None:
        return WeightFormat() if wanted is None else made_format(model_config.spec, wanted)
    if config.load_format == "dummy":
        raise ConfigError(
            f"--load-format dummy: {declared.source} says {declared.dialect}, which needs the "
            "files; take the config.json in bfloat16, with --quantization"
        )
    return weight_format(target_tensors(config.model_path, parts_of_targets()), declared)


def load_kernels_early(config: EngineConfig) -> None:
    """Has CUDA load all kernels when it is first used, which follows, where ranks share a model.

    One that is loaded when it is first launched waits for all others of its device, which may wait
    for those of another rank.
    """
    if config.tensor_parallel_size > 1 and config.device != "cpu":
        os.environ[MODULE_LOADING] = "EAGER"


def _choose_drafter(
    config: EngineConfig, setup: DraftSetup, drafter: _C.Drafter | None
) -> ChosenDrafter:
    spec = setup.spec
    spec.validate(setup)
    if config.draft_depth == 0:
        return ChosenDrafter(plain_method(), drafter=drafter)
    if drafter is None and spec.build is not None:
        drafter = spec.build(config.draft_depth, setup.options)
    if drafter is not None or spec.build is not None:
        if not isinstance(drafter, _C.Drafter):
            raise ConfigError(
                "a drafter written in Python must be a subclass of openspec._C.Drafter, got "
                f"{type(drafter).__name__}"
            )
        return ChosenDrafter(plain_method(), drafter=drafter)
    if spec.name not in _C.drafter_names():
        raise ConfigError(f"method {spec.name!r} is not part of this build; reinstall openspec")
    draft_model = _read_draft_model(spec, setup, config)
    return ChosenDrafter(spec.name, setup.options, draft_model)


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
        of_ranks = [_C.cuda_memory(rank) for rank in range(config.tensor_parallel_size)]
        free_bytes, total_bytes = (min(sizes) for sizes in zip(*of_ranks, strict=True))
        free_elsewhere = max(of_rank[0] for of_rank in of_ranks)
        if free_elsewhere - free_bytes > UNLIKE_FREE_BYTES:
            logger.warning(
                "GPU %d has %s free, another rank's %s: all take as much as it has; see nvidia-smi "
                "for what else runs there",
                [of_rank[0] for of_rank in of_ranks].index(free_bytes),
                format_bytes(free_bytes),
                format_bytes(free_elsewhere),
            )
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
    chosen: ChosenDrafter,
) -> RunnerConfig:
    max_num_batched_tokens = device.choose_num_rows(
        config.max_num_batched_tokens, config.min_num_batched_tokens
    )
    dtype = device.choose_dtype(config.dtype)
    if config.kv_cache_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype}: the KV cache has the activations' type, "
            f"{dtype}; drop it, or set --dtype {config.kv_cache_dtype} too"
        )
    num_logits_rows = device.choose_num_logits_rows(
        config.max_num_seqs * (1 + max(config.max_draft_tokens, config.max_copied_drafts)),
        model_config.vocab_size,
    )
    return RunnerConfig(
        target=model_config.spec,
        device=device.name,
        dtype=dtype,
        page_size=config.page_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_logits_rows=min(max_num_batched_tokens, num_logits_rows),
        num_threads=config.num_threads or available_cpus(),
        tensor_parallel_size=config.tensor_parallel_size,
        max_draft_tokens=config.max_draft_tokens,
        max_grammar_drafts=MAX_GRAMMAR_DRAFTS,
        max_copied_drafts=config.max_copied_drafts,
        draft_memory_bytes=config.draft_memory or 0,
        draft_depth=config.draft_depth,
        method=chosen.method,
        method_options=dict(chosen.options),
        head=chosen.draft_model.head if chosen.draft_model is not None else None,
        has_spare_head=config.drafter_dir is not None,
        acceptance=config.acceptance if config.draft_depth > 0 else "match",
        adaptive=config.adaptive_speculation,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_key=os.urandom(16),
    )


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
            f"--tensor-parallel-size {fitting}"
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
