"""BenchConfig: what can be set about a benchmark, beside the engine's own settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from openspec.bench.workloads import workload_names
from openspec.config import EngineConfig, engine_config, engine_group
from openspec.drafters import plain_method
from openspec.errors import ConfigError
from openspec.settings.command_line import parse_command_line
from openspec.settings.setting import Raw, build, check_ranges, group_of, named, number

DESCRIPTION = """\
Plain decoding against a method, in turns, through the server's own HTTP path.

Without flags it measures twelve rows, which take 13 minutes on two cores. Examples:

  python -m openspec.bench --workload chat --concurrency 1,8 --repeats 1        a quick look
  python -m openspec.bench Qwen/Qwen3-4B --html report.html --json report.json  with charts
  python -m openspec.bench --server http://127.0.0.1:8000 --workload chat       a server that runs
  python -m openspec.bench --compare before.json after.json --html both.html    two results

Exit status: 0, or 1 if an answer with drafts differs from plain decoding's, or 2 if it cannot run.
"""
_NOT_THE_SERVERS = ("seed",)


DEFAULT_WORKLOADS = ("repeat", "chat", "mixed", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Settings of the benchmark. A field is a flag; its docstring is the flag's help."""

    workload: list[str] | None = field(default=None, metadata={"choices": workload_names()})
    """Built-in workloads, separated by commas. Default: all of them, or none beside a dataset."""
    dataset: str | None = named(None, "FILE")
    """Prompts from a JSON lines file as one more; a line has prompt, turns or question."""
    concurrency: list[Annotated[int, msgspec.Meta(ge=1, le=4096)]] = field(
        default_factory=lambda: [1, 4, 16], metadata={"metavar": "N,..."}
    )
    """Requests under way at the same time, separated by commas."""
    num_prompts: int = number(32, 1, 1_000_000)
    """Requests of one run, at least: four times as many as are under way, if that is more. A
    workload is run `repeats` times with and without the method."""
    max_tokens: int = number(128, 1, 1 << 20)
    """Longest answer."""
    input_len: int = number(128, 1, 1 << 20)
    """Prompt length of the workload `random`, in tokens."""
    temperature: float = number(0.0, 0.0, 100.0)
    """Sent with every request; above 0 the requests are seeded, so they stay comparable."""
    seed: int = 0
    """Draws the prompts, and seeds request i with seed + i."""
    ignore_eos: bool = False
    """Run every answer to max_tokens. The workload `random` always does."""
    repeats: int = number(3, 1, 1000)
    """Runs of each kind. They take turns, and the figures are medians."""
    server: str | None = named(None, "URL")
    """A running OpenAI server, such as http://127.0.0.1:8000, instead of one of our own. Of
    openspec's, plain decoding and its method take turns; another is measured as it runs. --model
    names one of its models."""
    api_key: str | None = None
    """Sent to `server`."""
    baseline: Literal["none", "transformers"] = "none"
    """Also time Hugging Face's generate in float32 on the same prompts, with as many threads."""
    json: str | None = named(None, "FILE")
    """Write environment and figures to this file."""
    html: str | None = named(None, "FILE")
    """Write a report with charts to this file; it needs no other file and no network."""
    compare: list[str] | None = field(default=None, metadata={"words": True, "metavar": "FILE"})
    """Measure nothing: show these files of --json. One is shown alone, two beside each other."""

    @property
    def workloads(self) -> list[str]:
        """The built-in ones."""
        if self.workload is not None:
            return self.workload
        return list(DEFAULT_WORKLOADS) if self.dataset is None else []

    def prompts_at(self, concurrency: int) -> int:
        """Requests of one run with so many under way: beginning and end are a small part of it."""
        return max(self.num_prompts, 4 * concurrency)

    def check(self) -> None:
        """Checks every setting.

        Raises:
            ConfigError: with the setting, its value and what is allowed.
        """
        check_ranges(self)
        for name in self.workloads:
            if name not in workload_names():
                raise ConfigError(
                    f"workload: there is no {name!r}; choose from {', '.join(workload_names())}"
                )
        if self.compare is not None and not 1 <= len(self.compare) <= 2:
            raise ConfigError(f"compare: one file or two, got {len(self.compare)}")
        _check_output("json", self.json)
        _check_output("html", self.html)


def _check_output(name: str, path: str | None) -> None:
    if path is None:
        return
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"{name}: {path} is a folder; name a file in it")
    if not folder.is_dir():
        raise ConfigError(f"{name}: the folder of {path} does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{name}: the folder of {path} cannot be written")


@dataclass(frozen=True)
class BenchPlan:
    """A checked command line."""

    bench: BenchConfig
    engine: EngineConfig
    server_settings: dict[str, Raw]
    """What was set about the engine, by name; goes to the server as it is."""
    served_model: str | None = None
    """The name to ask a running server for; None: its first."""

    @property
    def methods(self) -> list[str]:
        """What a server of our own runs in turns: plain decoding, and the method unless plain."""
        plain = plain_method()
        return [plain] if self.engine.method == plain else [plain, self.engine.method]


def parse_arguments(argv: Sequence[str] | None = None) -> BenchPlan:
    """Reads the command line.

    Raises:
        ConfigError: for anything that does not fit, or asks for speeds of other texts.
    """
    group = engine_group()
    values = parse_command_line(
        [group_of("benchmark", BenchConfig), group],
        "python -m openspec.bench",
        DESCRIPTION,
        argv,
    )
    bench = build(BenchConfig, values)
    bench.check()
    names = {setting.name for setting in group.settings}
    settings = {
        name: value
        for name, value in values.items()
        if name in names and name not in _NOT_THE_SERVERS
    }
    # Of a running server `model` is one of the names it serves.
    is_named = bench.server is not None and bench.baseline == "none"
    engine = engine_config({k: v for k, v in settings.items() if k != "model" or not is_named})
    if engine.acceptance != "match" and bench.temperature > 0.0:
        raise ConfigError(
            f"--acceptance {engine.acceptance}: sampled texts are not plain decoding's, and no "
            "speed is shown for others; use --temperature 0 or bench.draft_acceptance"
        )
    if not is_named and bench.compare is None:
        engine = engine.with_folders()  # here, where a download has time and shows its progress
    named = settings.get("model") if is_named else None
    return BenchPlan(bench, engine, settings, None if named is None else str(named))
