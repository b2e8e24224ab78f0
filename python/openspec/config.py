"""EngineConfig: everything that can be set about the engine, once, before it starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from openspec import drafters
from openspec.checkpoint.folder import check_source, downloaded, is_hub_id
from openspec.checkpoint.targets.config import ModelConfig
from openspec.drafters.spec import DrafterSpec, DraftSetup, OptionValue
from openspec.errors import ConfigError
from openspec.settings import (
    Raw,
    Setting,
    SettingsGroup,
    build,
    check_ranges,
    group_of,
    nearest,
    number,
    parse_command_line,
)

logger = logging.getLogger(__name__)

EMBEDDED_MODEL = Path(__file__).parent / "models" / "tiny"
SPECULATIVE_CONFIG = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine. A field is a flag; its docstring is the flag's help."""

    model: str | None = None
    """Folder of a checkpoint in Hugging Face format, or an id of the hub such as
    Qwen/Qwen3-4B. Default: the embedded model."""
    revision: str | None = None
    """Branch, tag or commit of a model of the hub. Default: main."""
    method: str = field(default_factory=drafters.default_method)
    """How drafts are made."""
    draft_model: str | None = None
    """Folder or id of the draft checkpoint, for methods that have one. Default: the folder named as
    the method in the model's own, if there is one."""
    draft_revision: str | None = None
    """Branch, tag or commit of a draft model of the hub. Default: main."""
    num_speculative_tokens: int | None = number(None, 0, 1 << 10)
    """K: drafts per sequence and step, one after another, at most. Default: the method's own."""
    method_options: dict[str, OptionValue] = field(default_factory=dict)
    """Options of the method, by the names that it declares (each is a flag of its own)."""
    acceptance: Literal["match", "rejection"] = "match"
    """When a draft of a sampled request is accepted. match: if it equals the token that plain
    decoding would draw, so that the text is plain decoding's. rejection: rejection sampling, which
    accepts a little more and keeps the distribution of texts, but not the text of a seed."""
    adaptive_speculation: bool = True
    """Draft only where measured step times and acceptance say that it pays. Never changes text."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and KV. auto: float32 on cpu, bfloat16 on cuda, which has no other."""
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
    page_size: int = number(16, 1, 1024)
    """Tokens per KV page."""
    kv_cache_memory: int | None = number(None, 1, 1 << 50, is_bytes=True)
    """Memory for KV pages, such as 2GiB. Default: on cuda what gpu_memory_utilization leaves beside
    weights and scratch, on cpu up to a quarter of the free memory, at most 1GiB; in either case no
    more than max_num_seqs sequences of max_model_len tokens can use."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine may take, above 0 and up to 1; only on cuda, and
    without effect on KV pages if kv_cache_memory is set."""
    check_weights: bool = True
    """Refuse a model whose weights hold NaN or infinity; takes one read of them."""
    num_threads: int | None = number(None, 1, 1024)
    """CPU threads of the engine. Default: the CPUs that this process may use."""
    enable_prefix_caching: bool = True
    """Keep KV pages of finished requests for prompts that begin alike."""
    seed: int | None = number(None, -(1 << 63), (1 << 63) - 1)
    """Seed of requests that bring none. Default: a random one for each."""
    max_failures_in_a_row: int = number(3, 1, 1 << 20)
    """Failed steps and admissions without a good step between them after which the engine ends."""
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
        return beside if self.drafter.needs_draft_model and beside.is_dir() else None

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
        num_rows = self.max_num_batched_tokens
        if num_rows is not None and num_rows < self.min_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({num_rows}) must be at least "
                f"max_num_seqs + page_size ({self.max_num_seqs} + {self.page_size}), so that "
                "prompts advance while every sequence decodes"
            )
        for kind, source, revision in (
            ("model", self.model, self.revision),
            ("draft model", self.draft_model, self.draft_revision),
        ):
            if source is not None:
                check_source(source, revision, kind)
            elif revision is not None:
                raise ConfigError(f"revision {revision} is of no {kind}: none is named; drop it")

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
        found = self
        if self.model is not None and is_hub_id(self.model):
            folder = downloaded(self.model, self.revision, subfolder=beside)
            found = replace(found, model=str(folder), revision=None)
        if self.draft_model is not None and is_hub_id(self.draft_model):
            folder = downloaded(self.draft_model, self.draft_revision, "draft model")
            found = replace(found, draft_model=str(folder), draft_revision=None)
        return found


def config_from_settings(settings: Mapping[str, Raw]) -> EngineConfig:
    """An EngineConfig from names and values: fields, a drafter's options, `speculative_config`.

    Raises:
        ConfigError: for an unknown name (with the nearest one) or a value that does not fit.
    """
    groups = engine_groups()
    by_name = {setting.name: setting for group in groups for setting in group.settings}
    values: dict[str, Raw] = {}
    for name, raw in settings.items():
        if name == "method_options":
            values[name] = raw
        elif name not in by_name:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, by_name)}")
        else:
            values[name] = by_name[name].convert(raw, name)
    return engine_config(values)


def engine_config(values: Mapping[str, Raw]) -> EngineConfig:
    """The EngineConfig among parsed values (see `parse_command_line`); other names are ignored.

    Raises:
        ConfigError: for a value that does not fit, or an option of another method.
    """
    merged = {**_expand_speculative_config(values.get(SPECULATIVE_CONFIG)), **values}
    if merged.get("tensor_parallel_size", 1) != 1:
        raise ConfigError(
            "tensor_parallel_size must be 1: an engine runs on one device; --replicas runs an "
            "engine on each of several"
        )
    if merged.get("trust_remote_code"):
        logger.warning("trust_remote_code has no effect: no code of a checkpoint is ever run")
    given = build(EngineConfig, merged)
    spec, options = given.drafter, dict(given.method_options)
    owners = {name: other for other in drafters.all_drafters() for name in other.options_by_name}
    for name, value in merged.items():
        if name in spec.options_by_name and isinstance(value, (int, float, str)):
            options[name] = value
        elif name in owners:
            raise ConfigError(
                f"{name} is an option of method {owners[name].name!r}, but the method is "
                f"{spec.name!r}"
            )
    config = replace(
        given,
        method=spec.name,
        method_options=spec.complete_options(options) if options else {},
    )
    config.check()
    return config


def engine_groups() -> list[SettingsGroup]:
    """All settings of the engine, for a command line: the fields, then the drafters' options.

    Options that several drafters have are one flag, in a group of its own.
    """
    specs = drafters.all_drafters()
    methods = "; ".join(f"{spec.name}: {spec.summary}" for spec in specs)
    engine = group_of("engine", EngineConfig, skip=("method_options",))
    settings = [
        replace(
            setting,
            help=f"{setting.help} {methods}.",
            choices=tuple(spec.name for spec in specs),
        )
        if setting.name == "method"
        else setting
        for setting in engine.settings
    ]
    owners: dict[str, list[DrafterSpec]] = {}
    for spec in specs:
        for option in spec.options:
            owners.setdefault(option.name, []).append(spec)
    options: dict[str, list[Setting]] = {}
    for name, having in owners.items():
        title = f"method{'s' * (len(having) > 1)} {', '.join(spec.name for spec in having)}"
        options.setdefault(title, []).append(_option_setting(name, having))
    return [
        SettingsGroup(engine.title, tuple(settings)),
        *(SettingsGroup(title, tuple(found)) for title, found in options.items()),
        SettingsGroup("compatibility", _COMPATIBILITY),
    ]


def _option_setting(name: str, specs: Sequence[DrafterSpec]) -> Setting:
    """One flag for the options of this name; what each method says of it, if they differ."""
    by_help: dict[str, list[str]] = {}
    for spec in specs:
        for option in spec.options:
            if option.name == name:
                found = option
                by_help.setdefault(option.help, []).append(spec.name)
    shown = [f"{', '.join(names)}: {text}" for text, names in by_help.items()]
    return Setting(
        name,
        type(found.default),
        found.help if len(by_help) == 1 else " ".join(shown),
        found.default,
        choices=found.choices,
    )


_COMPATIBILITY = (
    Setting(
        SPECULATIVE_CONFIG,
        dict | str | None,
        "vLLM's form of the same: JSON with method, num_speculative_tokens, model and the method's "
        "options. Single flags win over it.",
        None,
    ),
    Setting(
        "tensor_parallel_size",
        int,
        "1, because an engine runs on one device. --replicas runs several engines.",
        1,
    ),
    Setting(
        "trust_remote_code",
        bool,
        "Accepted without effect: no code of a checkpoint is ever run.",
        False,
    ),
)


def parse_engine_args(
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    extra: Sequence[SettingsGroup] = (),
    environ: Mapping[str, str] | None = None,
    version: str = "",
) -> tuple[EngineConfig, dict[str, Raw]]:
    """Parses a command line of the engine's settings and the caller's own groups.

    Build the caller's own dataclass from the second value with `settings.build(cls, values)`.

    Raises:
        ConfigError: for anything that does not fit.
    """
    groups = [*extra, *engine_groups()]
    values = parse_command_line(groups, prog, description, argv, environ, version)
    return engine_config(values), values


def _expand_speculative_config(raw: Raw) -> dict[str, Raw]:
    if raw is None:
        return {}
    try:
        given = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    except msgspec.DecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError("--speculative-config must be a JSON object")
    renamed = {"model": "draft_model"}
    known = {"method", "num_speculative_tokens", "draft_model"} | {
        name for spec in drafters.all_drafters() for name in spec.options_by_name
    }
    expanded: dict[str, Raw] = {}
    for key, value in given.items():
        name = renamed.get(key, key)
        if name not in known:
            raise ConfigError(f"--speculative-config: unknown key {key!r}{nearest(key, known)}")
        expanded[name] = value
    return expanded
