"""EngineConfig: everything that can be set about the engine, once, before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from openspec import drafters
from openspec.checkpoint.folder import check_source, downloaded, is_hub_id, split_revision
from openspec.checkpoint.quantization.weight_format import QUANTIZATIONS
from openspec.checkpoint.targets.config import ModelConfig
from openspec.drafters.spec import DrafterSpec, DraftSetup, OptionValue
from openspec.errors import ConfigError
from openspec.settings.command_line import parse_command_line
from openspec.settings.names import Names, nearest, with_revisions
from openspec.settings.setting import (
    Raw,
    Setting,
    SettingsGroup,
    build,
    check_ranges,
    group_of,
    named,
    number,
)
from openspec.settings.spellings import SPECULATIVE_SPELLINGS

EMBEDDED_MODEL = Path(__file__).parent / "models" / "tiny"
SPECULATIVE_CONFIG = "speculative_config"
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
MAX_COPIED_DRAFTS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine. A field is a flag; its docstring is the flag's help."""

    model: str | None = None
    """Folder of a checkpoint in Hugging Face format, or an id of the hub such as
    Qwen/Qwen3-4B, or Qwen/Qwen3-4B@REVISION for a branch, tag or commit. Default: the embedded
    model."""
    method: str = field(default_factory=drafters.default_method)
    """How drafts are made."""
    draft_model: str | None = None
    """Folder or id of the draft checkpoint, for methods that have one. Default: the folder named as
    the method in the model's own, if there is one."""
    drafter_dir: str | None = named(None, "DIR")
    """Folder below which there are draft checkpoints that may take the running one's place between
    two steps, while requests run; the engine takes memory for the weights of one more. They have
    the running one's shape. Default: none may."""
    num_speculative_tokens: int | None = number(None, 0, 1 << 10)
    """K: drafts per sequence and step, one after another, at most. Default: the method's own."""
    method_options: dict[str, OptionValue] = field(default_factory=dict, metadata={"pairs": True})
    """An option of the method, as its page in docs/methods names it; may be given several times.
    With a wrong name, the error lists them."""
    acceptance: Literal["match", "rejection"] = "match"
    """When a draft of a sampled request is accepted. match: if it equals the token that plain
    decoding would draw, so that the text is plain decoding's. rejection: rejection sampling, which
    accepts a little more and keeps the distribution of texts, but not the text of a seed."""
    copied_drafts: bool = True
    """Beside a draft model or head, also draft what followed where the text so far repeats itself,
    wherever that promises more. Never changes text. Has no effect with --acceptance rejection."""
    draft_memory: int | None = number(None, 1 << 17, 1 << 34, is_bytes=True)
    """Memory for recent answers, such as 64MiB, of each rank: drafts are copied from them, too, if
    they were made for the same API key and `cache_salt`. Default: none."""
    adaptive_speculation: bool = True
    """Draft only where measured step times and acceptance say that it pays. Never changes text."""
    load_format: Literal["auto", "dummy"] = "auto"
    """Where the model's weights come from. auto: its files. dummy: random numbers in the shape that
    config.json names, to time a model without its files; what it writes is nonsense."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and KV. auto: float32 on cpu, bfloat16 on cuda, which has no other."""
    quantization: str | None = named(None, "FORMAT")
    """Make FP8 of the matrices of a bfloat16 checkpoint at load: fp8 with a scale for each output
    channel, fp8_per_tensor, or fp8_per_block. A checkpoint that is FP8 says so itself; beside it
    the name of its method, such as compressed-tensors, is only checked. Draft heads stay as they
    are. Default: weights as the checkpoint has them."""
    kv_cache_dtype: str = named("auto", "TYPE")
    """Type of the KV cache: auto or bfloat16. auto: that of the activations. fp8 is not taken
    yet."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. auto: cuda if this build and this machine can, else cpu."""
    max_model_len: int | None = number(None, 2, 1 << 24)
    """Longest sequence, prompt and output, in tokens. Default: the model's own limit, or what the
    KV memory holds if that is less."""
    max_num_seqs: int = number(64, 1, 1 << 14)
    """Sequences that run at the same time, at most; more wait."""
    max_num_batched_tokens: int | None = number(None, 2, 1 << 20)
    """Rows of one step, at most: prompt chunks, last tokens and drafts together. Default: 512 on
    cpu, 2048 on cuda, or max_num_seqs + page_size if that is more."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Whether a waiting request whose `priority` is higher takes the place of a running one.
    fcfs: it is first in the queue. priority: it does, and the other one goes on later, with the
    same text; so every client is trusted not to push others aside."""
    page_size: int = number(16, 1, 1024)
    """Tokens of a KV page."""
    kv_cache_memory: int | None = number(None, 1, 1 << 50, is_bytes=True)
    """Memory for KV pages, such as 2GiB, of each rank. Default: on cuda what gpu_memory_utilization
    leaves beside weights and scratch, on cpu up to a quarter of the free memory, at most 1GiB; in
    either case no more than max_num_seqs sequences of max_model_len tokens can use."""
    gpu_memory_utilization: float = named(0.9, "SHARE")
    """Share of the GPU's memory that the engine may take, above 0 and up to 1; only on cuda, and
    without effect on KV pages if kv_cache_memory is set."""
    num_threads: int | None = number(None, 1, 1024)
    """CPU threads of the engine. Default: the CPUs that this process may use."""
    tensor_parallel_size: int = number(1, 1, max(TENSOR_PARALLEL_SIZES))
    """Ranks that share the model between them, 1, 2, 4 or 8, each with its part of every matrix.
    The text is that of one. On cuda each rank has a GPU, on cpu threads of its own."""
    enable_prefix_caching: bool = True
    """Keep KV pages of finished requests for prompts that begin alike."""
    seed: int | None = number(None, -(1 << 63), (1 << 63) - 1)
    """Seed of requests that bring none. Default: a random one for each."""
    kv_events_config: dict[str, str | int | bool | None] | None = None
    """vLLM's JSON for KV events, which tell routers what the prefix cache holds. Default: none. For
    example {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}."""
    stats_interval_s: float = number(10.0, 0.0, 86400.0)
    """Seconds between lines of statistics in the log while there is work; 0 for none."""

    @property
    def drafter(self) -> DrafterSpec:
        """What the method says about itself."""
        return drafters.get_drafter(self.method)

    @property
    def model_path(self) -> Path:
        """The checkpoint's folder."""
        return EMBEDDED_MODEL if self.model is None else Path(self.model)

    @property
    def draft_model_path(self) -> Path | None:
        """The draft checkpoint's folder: the one given, else the one that came with the model."""
        if self.draft_model is not None:
            return Path(self.draft_model)
        beside = self.model_path / self.drafter.name
        if self.drafter.needs_draft_model and beside.is_dir():
            return beside
        return self.model_path if self.drafter.target_prefix else None

    @property
    def options(self) -> dict[str, OptionValue]:
        """Options of the method, complete."""
        return self.drafter.complete_options(self.method_options)

    @property
    def draft_depth(self) -> int:
        """K: drafts one after another, the method's default filled in."""
        return self.drafter.draft_depth(
            self.num_speculative_tokens, self.draft_model_path, self.options
        )

    @property
    def max_draft_tokens(self) -> int:
        """Drafts per sequence and step: K, or as many as a tree of depth K has."""
        return self.drafter.max_draft_tokens(self.draft_depth, self.options)

    @property
    def max_copied_drafts(self) -> int:
        """Drafts per sequence and step that are copied, in place of the method's; 0: none."""
        spec = self.drafter
        wanted = self.copied_drafts or self.draft_memory is not None
        has_them = wanted and self.acceptance == "match" and self.draft_depth > 0
        # What copies itself knows the text so far, and no other answers.
        has_others = self.draft_memory is not None or not spec.copies_text
        has_them = has_them and has_others and spec.build is None
        return MAX_COPIED_DRAFTS if has_them else 0

    def draft_setup(self, target: ModelConfig) -> DraftSetup:
        """What the method is told of this configuration.

        Raises:
            ConfigError: for options, or an acceptance, that the method does not have.
        """
        if self.acceptance == "rejection" and not self.drafter.supports_rejection:
            able = [spec.name for spec in drafters.all_drafters() if spec.supports_rejection]
            raise ConfigError(
                "--acceptance rejection needs the probabilities of drafts, which method "
                f"{self.method!r} does not know; drop it, or use --method {' or '.join(able)}"
            )
        return DraftSetup(
            spec=self.drafter,
            target=target,
            target_folder=self.model_path,
            folder=self.draft_model_path,
            num_speculative_tokens=self.num_speculative_tokens,
            options=self.options,
            acceptance=self.acceptance,
        )

    @property
    def min_num_batched_tokens(self) -> int:
        """Rows that let prompts advance while every sequence decodes."""
        return self.max_num_seqs + self.page_size

    def check(self) -> None:
        """Checks what can be checked without the model.

        Raises:
            ConfigError: with the setting, its value and the remedy.
        """
        check_ranges(self)
        self.drafter.complete_options(self.method_options)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization}"
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"quantization must be {' or '.join(QUANTIZATIONS)}, got {self.quantization!r}"
            )
        if self.kv_cache_dtype not in ("auto", "bfloat16"):
            is_fp8 = self.kv_cache_dtype.lower().startswith("fp8")
            reason = ": a KV cache in FP8 is not taken yet" if is_fp8 else ""
            raise ConfigError(
                f"kv_cache_dtype must be auto or bfloat16, got {self.kv_cache_dtype!r}{reason}; "
                "drop it"
            )
        if self.tensor_parallel_size not in TENSOR_PARALLEL_SIZES:
            raise ConfigError(
                f"tensor_parallel_size must be 1, 2, 4 or 8, got {self.tensor_parallel_size}"
            )
        if self.drafter_dir is not None:
            self._check_drafter_dir(self.drafter_dir)
        num_rows = self.max_num_batched_tokens
        if num_rows is not None and num_rows < self.min_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({num_rows}) must be at least "
                f"max_num_seqs + page_size ({self.max_num_seqs} + {self.page_size}), so that "
                "prompts advance while every sequence decodes"
            )
        if self.draft_memory is not None and self.max_copied_drafts == 0:
            raise ConfigError(
                "draft_memory is for drafts that are copied, and there are none: drop it, or take "
                "a method that drafts, and --acceptance match"
            )
        for kind, source in (("model", self.model), ("draft model", self.draft_model)):
            if source is not None:
                check_source(source, kind)

    def _check_drafter_dir(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"drafter_dir: {folder} is no folder; name one that is there")
        if self.tensor_parallel_size > 1:
            raise ConfigError(
                "drafter_dir: draft heads take each other's place on one device, not on "
                f"{self.tensor_parallel_size}; drop it, or --tensor-parallel-size"
            )

    def with_folders(self) -> EngineConfig:
        """This configuration, the hub's ids replaced by folders, downloaded as far as they lack.

        Raises:
            ConfigError: a model of the hub cannot be had, or no path of this process can be.
        """
        try:
            Path.cwd()
        except OSError as error:  # torch does not load then, and says something else
            raise ConfigError(
                f"the working directory: {error.strerror}; start in a folder that exists"
            ) from None
        has_head = self.drafter.needs_draft_model and self.draft_model is None
        beside = self.drafter.name if has_head else None
        model, draft_model = self.model, self.draft_model
        if model is not None and is_hub_id(model):
            model = str(downloaded(*split_revision(model), subfolder=beside))
        if draft_model is not None and is_hub_id(draft_model):
            draft_model = str(downloaded(*split_revision(draft_model), "draft model"))
        return replace(self, model=model, draft_model=draft_model)


def config_from_settings(settings: Mapping[str, Raw]) -> EngineConfig:
    """An EngineConfig from names and values: its fields and `speculative_config`.

    Raises:
        ConfigError: for an unknown name (with the nearest one) or a value that does not fit.
    """
    return engine_config(with_revisions(Names([engine_group()]).read(settings.items())))


def engine_config(values: Mapping[str, Raw]) -> EngineConfig:
    """The EngineConfig among checked values (see `parse_command_line`); other names are ignored.

    Raises:
        ConfigError: for a value that does not fit, or an option of another method.
    """
    expanded, options = _expand_speculative_config(values.get(SPECULATIVE_CONFIG))
    own = values.get("method_options") or {}
    assert isinstance(own, dict)
    options = {**options, **own}
    given = build(EngineConfig, {**expanded, **values, "method_options": options})
    spec = given.drafter
    config = replace(
        given,
        method=spec.name,
        method_options=spec.complete_options(given.method_options) if options else {},
    )
    config.check()
    return config


def engine_group() -> SettingsGroup:
    """All settings of the engine, for a command line: the fields and `speculative_config`."""
    specs = drafters.all_drafters()
    methods = "; ".join(f"{spec.name}: {spec.summary}" for spec in specs)
    settings = {setting.name: setting for setting in group_of("engine", EngineConfig).settings}
    method, options = settings["method"], settings["method_options"]
    settings["method"] = replace(
        method, help=f"{method.help} {methods}.", choices=tuple(spec.name for spec in specs)
    )
    settings["method_options"] = replace(options, choices=drafters.option_names())
    return SettingsGroup("engine", (*settings.values(), _SPECULATIVE_CONFIG))


_SPECULATIVE_CONFIG = Setting(
    SPECULATIVE_CONFIG,
    dict | str | None,
    "vLLM's form of the same: JSON with method, num_speculative_tokens, model and the method's "
    "options. Single flags win over it.",
    None,
)


def parse_engine_args(
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    extra: Sequence[SettingsGroup] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[EngineConfig, dict[str, Raw]]:
    """Parses a command line of the engine's settings and the caller's own groups.

    `{heads}` in `description` becomes a command line for each method that has draft models.
    Build the caller's own dataclass from the second value with `settings.build(cls, values)`.

    Raises:
        ConfigError: for anything that does not fit.
    """
    groups = [*extra, engine_group()]
    description = description.replace("{heads}", drafters.examples(prog))
    values = parse_command_line(groups, prog, description, argv, environ)
    return engine_config(values), values


def _expand_speculative_config(raw: Raw) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Settings of the engine, and options of the method."""
    if raw is None:
        return {}, {}
    try:
        given = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    except msgspec.DecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    engine = group_of("engine", EngineConfig).settings
    own = tuple(one for one in engine if one.name in _SPECULATIVE_KEYS)
    names = Names([SettingsGroup("", own)], SPECULATIVE_SPELLINGS)
    options = drafters.option_names()
    for key in given:
        if key not in names and key not in options:
            if why := names.why_not(key):
                raise ConfigError(f"--speculative-config: {key} {why}")
            known = nearest(key, [*_SPECULATIVE_KEYS, *options])
            raise ConfigError(f"--speculative-config: unknown key {key!r}{known}")
    settings = {key: value for key, value in given.items() if key in names}
    return (
        with_revisions(names.read(settings.items(), "--speculative-config: ")),
        {key: value for key, value in given.items() if key in options},
    )


_SPECULATIVE_KEYS = ("method", "num_speculative_tokens", "draft_model")
