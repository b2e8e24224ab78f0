"""Names of other engines, and names that openspec had: as flag, variable, YAML key, keyword."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from openspec import drafters
from openspec.bench import bench_config
from openspec.bench.bench_config import BenchConfig
from openspec.config import config_from_settings, engine_config, engine_group, parse_engine_args
from openspec.engine.core.engine_core import MAX_FAILURES_IN_A_ROW
from openspec.errors import ConfigError
from openspec.messages import MAX_LOGPROBS
from openspec.serve import __main__ as serve
from openspec.serve.config import ServeConfig
from openspec.serve.generation.context import BODIES_SHARE, MAX_LOGPROBS_HELD
from openspec.serve.server.connection import MAX_CONNECTIONS
from openspec.serve.server.run import KEEP_ALIVE_TIMEOUT_S
from openspec.settings.command_line import parse_command_line
from openspec.settings.names import Names
from openspec.settings.setting import Setting, group_of
from openspec.settings.spellings import REMOVED, SPECULATIVE_SPELLINGS, SPELLINGS, Spelling
from openspec.text.pool import NUM_THREADS
from openspec.tools import doctor

MAX_FLAGS, MAX_GROUPS = 68, 8
"""The last: copies beside a head and their memory (2), what a server keeps to train on (6), and
where heads lie that may take each other's place (1)."""
SERVER = group_of("server", ServeConfig)

Parse = Callable[[str, str | None], Mapping[str, object]]
"""What `python -m openspec.serve` would run with, from a name and its text; None: a switch."""


def settings_of(argv: list[str], **environ: str) -> dict[str, object]:
    engine, values = parse_engine_args("openspec", "", argv, [SERVER], environ)
    return {**values, **asdict(engine)}


def as_flag(name: str, text: str | None) -> Mapping[str, object]:
    switch = "--" + name.replace("_", "-")
    return settings_of([switch] if text is None else [switch, text])


def as_no_flag(name: str, _: str | None) -> Mapping[str, object]:
    return settings_of(["--no-" + name.replace("_", "-")])


def as_variable(name: str, text: str | None) -> Mapping[str, object]:
    return settings_of([], **{f"OPENSPEC_{name.upper()}": "true" if text is None else text})


@pytest.fixture(params=["flag", "variable", "key"])
def parse(request: pytest.FixtureRequest, tmp_path: Path) -> Parse:
    def as_key(name: str, text: str | None) -> Mapping[str, object]:
        file = tmp_path / "settings.yaml"
        file.write_text(f"{name}: {'true' if text is None else repr(text)}\n")
        return settings_of(["--config", str(file)])

    return {"flag": as_flag, "variable": as_variable, "key": as_key}[request.param]


def test_how_many_settings_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(["--help"])
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  -") for line in shown) <= MAX_FLAGS
    assert sum(line.endswith(":") and not line.startswith(" ") for line in shown) <= MAX_GROUPS


COMMANDS = {
    "serve": ([SERVER, engine_group()], serve.DESCRIPTION),
    "bench": ([group_of("benchmark", BenchConfig), engine_group()], bench_config.DESCRIPTION),
    "doctor": ([group_of("doctor", doctor.DoctorConfig), engine_group()], doctor.DESCRIPTION),
}
SHOWN = [setting for groups, _ in COMMANDS.values() for one in groups for setting in one.settings]


@pytest.mark.parametrize("setting", SHOWN, ids=lambda setting: setting.name)
def test_a_default_is_shown_once_and_as_it_is_typed(setting: Setting) -> None:
    assert setting.full_help.lower().count("default:") <= 1
    if shown := setting.shown_default:
        assert setting.convert(shown, setting.name) == setting.default


@pytest.mark.parametrize(
    ("name", "metavar"),
    {
        "concurrency": "N,...",
        "kv_cache_memory": "SIZE",
        "max_body_bytes": "SIZE",
        "max_model_len": "TOKENS",
        "max_num_queued_reqs": "N",
        "restart_engine": "N",
        "shutdown_timeout": "SECONDS",
        "stats_interval_s": "SECONDS",
        "api_key": "KEY,...",
        "devices": "DEVICE,...",
        "method_options": "NAME=VALUE",
        "speculative_config": "JSON",
        "kv_events_config": "JSON",
        "chat_template": "FILE",
        "dtype": "{auto,float32,bfloat16}",
        "workload": "{repeat,chat,mixed,agent,random},...",
    }.items(),
)
def test_what_stands_for_a_value(name: str, metavar: str) -> None:
    assert metavar == next(setting.metavar for setting in SHOWN if setting.name == name)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_end_of_help_names_what_there_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    groups, description = COMMANDS[command]
    with pytest.raises(SystemExit):
        parse_engine_args(f"python -m openspec.{command}", description, ["--help"], groups[:-1], {})
    closing = capsys.readouterr().out.partition(description.partition("\n\n")[2][:9])[2]
    flags = {setting.flag for one in groups for setting in one.settings}
    assert {*re.findall(r"--[a-z-]+", closing)} <= flags
    examples = re.findall(rf"python -m openspec\.{command}\b(.*?)(?:  .*)?$", closing, re.M)
    assert len(examples) >= 3
    for example in examples:
        engine_config(parse_command_line(groups, command, description, shlex.split(example), {}))


# ---- What is accepted ---------------------------------------------------------------------------

NEUTRAL: dict[str, list[str | None]] = {
    "pipeline_parallel_size": ["1"],
    "pp": ["1"],
    "pp_size": ["1"],
    "disable_custom_all_reduce": [None],
    "distributed_executor_backend": ["mp", "uni"],
    "trust_remote_code": [None],
    "enable_auto_tool_choice": [None],
    "max_logprobs": ["0", "5", "20"],
    "enforce_eager": [None],
    "async_scheduling": [None],
    "swap_space": ["0", "4", "1.5"],
    "enable_chunked_prefill": [None],
    "disable_log_requests": [None],
    "root_path": [""],
}
REFUSED: dict[str, tuple[str | None, str]] = {
    "pipeline_parallel_size": ("2", "layers are not dealt to devices; --replicas N"),
    "pp": ("2", "layers are not dealt to devices; --replicas N"),
    "pp_size": ("2", "layers are not dealt to devices; --replicas N"),
    "distributed_executor_backend": ("ray", "openspec.serve.ray_app runs replicas"),
    "enable_expert_parallel": (None, "all experts of a mixture lie on one device"),
    "max_logprobs": ("21", "may ask for 20 log-probabilities"),
    "enable_log_requests": (None, "--access-log logs"),
    "disable_log_stats": (None, "--stats-interval-s 0"),
    "root_path": ("/v2", "let the proxy strip its prefix"),
    "enable_lora": (None, "LoRA is not supported"),
    "lora_modules": ("a=b", "LoRA is not supported"),
    "max_loras": ("1", "LoRA is not supported"),
    "max_lora_rank": ("8", "LoRA is not supported"),
}
SWITCHED_OFF = {
    "disable_custom_all_reduce": None,
    "enable_expert_parallel": None,
    "trust_remote_code": None,
    "enforce_eager": None,
    "async_scheduling": None,
    "enable_log_requests": None,
    "disable_log_stats": None,
    "enable_lora": None,
    "enable_auto_tool_choice": "say tool_choice 'none'",
    "enable_chunked_prefill": "--max-num-batched-tokens",
    "disable_log_requests": "--access-log logs",
}
"""What is said where the switch is off."""
ALIASES = {
    "tp": ("2", "tensor_parallel_size", 2),
    "tp_size": ("2", "tensor_parallel_size", 2),
    "data_parallel_size": ("3", "replicas", 3),
    "dp": ("3", "replicas", 3),
    "dp_size": ("3", "replicas", 3),
    "block_size": ("8", "page_size", 8),
    "q": ("fp8", "quantization", "fp8"),
}


def test_every_spelling_is_tested() -> None:
    named = {name for one in SPELLINGS for name in one.names}
    assert named == {*NEUTRAL, *REFUSED, *SWITCHED_OFF, *ALIASES, "revision"}
    assert {name for one in SPELLINGS if one.type is bool for name in one.names} == {*SWITCHED_OFF}
    assert not named & {one.name for one in (*engine_group().settings, *SERVER.settings)}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_value_changes_nothing(parse: Parse, name: str) -> None:
    for text in NEUTRAL[name]:
        assert parse(name, text) == settings_of([])


@pytest.mark.parametrize("name", REFUSED)
def test_another_value_is_refused_with_the_remedy(parse: Parse, name: str) -> None:
    text, said = REFUSED[name]
    refusal = refused(parse, name, text)
    assert said in refusal and name in refusal.lower().replace("-", "_")


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_switches_that_are_off(name: str) -> None:
    said = SWITCHED_OFF[name]
    if said is None:
        assert as_no_flag(name, None) == settings_of([])
    else:
        assert said in refused(as_no_flag, name, None)


@pytest.mark.parametrize("name", ALIASES)
def test_another_name_of_a_setting(parse: Parse, name: str) -> None:
    text, setting, value = ALIASES[name]
    assert parse(name, text)[setting] == value
    own = engine_group().settings + SERVER.settings
    flag = next(one.flag for one in own if one.name == setting)
    with pytest.raises(ConfigError, match=f"{setting} is given twice"):
        settings_of([flag, "4", "--" + name.replace("_", "-"), text])


def test_a_value_that_another_engine_calls_otherwise() -> None:
    assert as_flag("tool_call_parser", "qwen3_xml")["tool_call_parser"] == "qwen3_coder"


def test_flags_with_one_dash() -> None:
    values = settings_of(["-tp", "4", "-dp=2"])
    assert (values["tensor_parallel_size"], values["replicas"]) == (4, 2)
    with pytest.raises(ConfigError, match="not dealt to devices"):
        settings_of(["-pp", "2"])


def test_one_engine_alone_takes_one_replica() -> None:
    assert config_from_settings({"data_parallel_size": 1}) == config_from_settings({})
    with pytest.raises(ConfigError, match="data_parallel_size 2: one engine runs here"):
        config_from_settings({"data_parallel_size": 2})
    assert config_from_settings({"quantization": None, "revision": None}) == (
        config_from_settings({})
    )


def test_what_has_no_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    settings_of(["--trust-remote-code", "--tensor-parallel-size", "1"])
    config_from_settings({"trust_remote_code": False})
    settings_of(["--distributed-executor-backend", "mp", "--disable-custom-all-reduce"])
    assert caplog.messages == [
        "--trust-remote-code has no effect: no code of a checkpoint is ever run",
        "--distributed-executor-backend has no effect: ranks of an engine are threads of one "
        "process",
        "--disable-custom-all-reduce has no effect: ranks exchange sums in one way, in which their "
        "number does not change the text",
    ]


def test_how_many_ranks_share_a_model(parse: Parse) -> None:
    for name in ("tensor_parallel_size", "tp", "tp_size"):
        assert parse(name, "8")["tensor_parallel_size"] == 8
        for text, said in (("3", "must be 1, 2, 4 or 8, got 3"), ("16", "16"), ("two", "two")):
            assert said in refused(parse, name, text)


def test_revision_follows_the_model_from_another_place() -> None:
    config, _ = parse_engine_args(
        "openspec", "", ["--model", "org/name"], environ={"OPENSPEC_REVISION": "v2"}
    )
    assert config.model == "org/name@v2"


def test_keys_of_a_speculative_config() -> None:
    given: dict[str, str | float] = {"method": drafters.plain_method()}
    given |= {"model": "org/head", "revision": "v2", "draft_tensor_parallel_size": 1}
    given |= {
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_min_token_prob": 0.1,
    }
    assert {name for one in SPECULATIVE_SPELLINGS for name in one.names} == set(list(given)[1:])
    config = config_from_settings({"speculative_config": {**given}})
    assert config.draft_model == "org/head@v2"
    with pytest.raises(ConfigError, match="a drafter is not shared by ranks"):
        config_from_settings({"speculative_config": {"draft_tensor_parallel_size": 2}})
    kept = {"method": "suffix", "suffix_decoding_max_cached_requests": 100}
    with pytest.raises(ConfigError, match="--draft-memory 64MiB"):
        config_from_settings({"speculative_config": kept})


# ---- What is gone -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REMOVED, *drafters.option_names()])
def test_a_removed_name_says_what_holds(parse: Parse, name: str) -> None:
    said = refused(parse, name, "1")
    if name in drafters.option_names():
        assert f"--method-option {name}=VALUE" in said
    else:
        assert REMOVED[name] in said
    with pytest.raises(ConfigError) as caught:
        config_from_settings({name: 1})
    assert str(caught.value).startswith(name)


def test_removed_switches() -> None:
    for name in ("docs", "ui", "check_weights", "speculative_stats"):
        assert REMOVED[name] in refused(as_no_flag, name, None)
    assert "--method-option draft_noise=VALUE" in refused(as_no_flag, "draft_noise", None)


def test_the_constants_are_those_that_are_named() -> None:
    for name, constant in {
        "max_total_body_bytes": BODIES_SHARE,
        "max_num_prompt_logprobs": MAX_LOGPROBS_HELD,
        "max_num_connections": MAX_CONNECTIONS,
        "num_text_threads": 1 + NUM_THREADS,
        "max_failures_in_a_row": MAX_FAILURES_IN_A_ROW,
        "keep_alive_timeout_s": KEEP_ALIVE_TIMEOUT_S,
    }.items():
        assert str(constant) in REMOVED[name], name
    [logprobs] = [one for one in SPELLINGS if "max_logprobs" in one.names]
    assert logprobs.neutral == range(MAX_LOGPROBS + 1)


def test_a_spelling_gives_way_to_a_setting_of_the_name() -> None:
    names = Names([engine_group()], [Spelling(("seed",), otherwise="no"), *SPELLINGS])
    assert names.read([("seed", 3)]) == {"seed": 3}


def refused(parse: Parse, name: str, text: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(name, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)
