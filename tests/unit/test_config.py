from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import openspec
from openspec import drafters
from openspec.config import (
    EMBEDDED_MODEL,
    EngineConfig,
    config_from_settings,
    engine_group,
    parse_engine_args,
)
from openspec.errors import ConfigError
from openspec.settings.command_line import parse_command_line
from openspec.settings.setting import build, field_docs, format_bytes, group_of, number, parse_bytes


@pytest.fixture(autouse=True)
def some_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.config.EMBEDDED_MODEL", tmp_path)


def parse(*argv: str, **environ: str) -> EngineConfig:
    return parse_engine_args("openspec", "", argv, environ=environ)[0]


def test_defaults() -> None:
    config = parse()
    assert config == EngineConfig()
    assert config.method == drafters.default_method()
    assert config.draft_depth == drafters.get_drafter(config.method).default_num_speculative_tokens
    assert EMBEDDED_MODEL.parts[-3:] == ("openspec", "models", "tiny")


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max_num_seqs: 3\npage-size: 8\nseed: 5\nenable_prefix_caching: false\n")
    config = parse(
        "--config", str(file), "--max-num-seqs=5", OPENSPEC_MAX_NUM_SEQS="4", OPENSPEC_PAGE_SIZE="4"
    )
    assert (config.max_num_seqs, config.page_size, config.seed) == (5, 4, 5)
    assert config.enable_prefix_caching is False
    assert parse(OPENSPEC_CONFIG=str(file)).seed == 5


def test_values() -> None:
    config = parse(
        "--kv-cache-memory", "1.5GiB", "--no-adaptive-speculation", "--max_model_len", "100"
    )
    assert config.kv_cache_memory == 3 << 29
    assert config.adaptive_speculation is False and config.max_model_len == 100
    assert parse(OPENSPEC_ADAPTIVE_SPECULATION="false").adaptive_speculation is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean '--max-model-len'"),
        (["--max-num-seqs", "x"], "--max-num-seqs expects a whole number; got 'x'"),
        (["--dtype", "int4"], "--dtype expects one of auto, float32, bfloat16; got 'int4'"),
        (["--kv-cache-memory", "2XB"], "'2XB' is not a size such as 512MiB or 2GiB"),
        (["--method", "ngran"], "unknown method 'ngran'; did you mean 'ngram'"),
        (["--method", "eagle4"], "unknown method 'eagle4'; did you mean 'eagle3'"),
        (["--method-option", "a"], "--method-option expects name=value; got"),
        (["--method-option", "ngram_min=0"], "ngram_min must be at least 1, got 0"),
        (["--method-option", "ngram_min=x"], "ngram_min expects a whole number; got 'x'"),
        (
            ["--method-option", "ngram_mim=2"],
            "method 'ngram' has no option 'ngram_mim'; did you mean 'ngram_min'.*; its options: "
            "ngram_min, ngram_max, max_lookback",
        ),
        (
            ["--method", "none", "--method-option", "ngram_min=2"],
            "method 'none' has no option 'ngram_min'; its options: none",
        ),
        (
            ["--method", "dflash", "--method-option", "draft_anchor=last"],
            "draft_anchor must be one of auto, first, drop; got 'last'",
        ),
        (["--device", "tpu"], "--device expects one of auto, cpu, cuda; got 'tpu'"),
        (["--acceptance", "typical"], "--acceptance expects one of match, rejection; got"),
        (["--gpu-memory-utilization", "0"], "must be above 0 and at most 1, got 0.0"),
        (["--gpu-memory-utilization", "1.01"], "must be above 0 and at most 1, got 1.01"),
        (["--gpu-memory-utilization", "nan"], "must be above 0 and at most 1, got nan"),
        (["--max-num-seqs", "0"], r"max_num_seqs must be in \[1, "),
        (["--max-num-batched-tokens", "64"], "must be at least max_num_seqs"),
        (["--model", "nowhere"], "model folder nowhere does not exist"),
        (["--model", ""], "model folder must not be empty"),
        (["--model", __file__], "is not a folder"),
        (["--seed", str(1 << 63)], r"seed must be in \["),
        (["--stats-interval-s", "nan"], r"stats_interval_s must be in \["),
        (["-x", "3"], "unknown flag -x"),
        (["--max-model-len"], "^--max-model-len: expected one argument$"),
        ([".", "more"], "'more' stands alone"),
        (["--model", ".", "more"], "'more' stands alone"),
        (["--max-model-length", "3"], "unknown flag --max-model-length; did you mean"),
        (["--no-prefix-caching"], "did you mean '--no-enable-prefix-caching'"),
        (["--sede", "3"], "did you mean '--seed'"),
        (["--compilation-config", "3"], "unknown flag --compilation-config; --help lists all"),
        (["--seed", "1.5"], "--seed expects a whole number; got '1.5'"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: No such file"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"metod": "x"}'], "unknown key 'metod'; did you mean 'method'"),
        (["--speculative-config", '{"match": "earliest"}'], "match is always recent"),
        (
            ["--speculative-config", '{"num_speculative_tokens": 4.5}'],
            "--speculative-config: num_speculative_tokens expects a whole number; got 4.5",
        ),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_modle_len: 3", "unknown setting 'max_modle_len'; did you mean 'max_model_len'"),
        ("max_num_seqs: many", "max_num_seqs expects a whole number; got 'many'"),
        ("- 1", "expected a mapping"),
        ("a: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_refused_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file))


def test_environment_of_a_cluster(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Server:
        port: int = 8000
        """Port."""

    values = parse_command_line(
        [group_of("server", Server)],
        "openspec",
        "",
        [],
        {"OPENSPEC_PORT": "tcp://10.0.0.1:80", "OPENSPEC_CUDA": "ON", "OPENSPEC_SERVICE_HOST": "h"},
    )
    assert values == {}
    assert "service link" in caplog.text and "OPENSPEC_SERVICE_HOST" in caplog.text
    with pytest.raises(ConfigError, match="did you mean 'OPENSPEC_MAX_NUM_SEQS'"):
        parse(OPENSPEC_MAX_NUM_SEQ="3")


def test_speculative_config() -> None:
    config = parse(
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 6}',
    )
    assert config.draft_depth == 7
    assert config.method_options["ngram_max"] == 6 and config.method_options["ngram_min"] == 2
    config = parse(
        "--speculative-config",
        '{"num_speculative_tokens": 7, "prompt_lookup_max": 6}',
        "--method-option",
        "ngram_max=5",
        OPENSPEC_NUM_SPECULATIVE_TOKENS="3",
    )
    assert config.draft_depth == 3 and config.method_options["ngram_max"] == 5


@pytest.mark.parametrize("argv", [["."], [".", "--seed", "-3"], ["--seed=-3", "."]])
def test_the_model_may_stand_without_its_flag(argv: list[str]) -> None:
    assert parse(*argv).model == "."


def test_lists() -> None:
    @dataclass
    class Lists:
        names: list[str] = field(default_factory=list, metadata={"words": True})
        """Names."""
        keys: list[str] = field(default_factory=list)
        """Keys."""

    def names(*argv: str) -> dict[str, object]:
        return dict(parse_command_line([group_of("lists", Lists)], "openspec", "", argv, {}))

    assert names("--names", "a", "b,c", "--keys", "d") == {"names": ["a", "b", "c"], "keys": ["d"]}
    assert names("--keys", '["d e", "f"]') == {"keys": ["d e", "f"]}
    with pytest.raises(ConfigError, match="'e' stands alone"):
        names("--keys", "d", "e")
    with pytest.raises(ConfigError, match=r"--keys expects a list: .*; got '\[d'"):
        names("--keys", "[d")


def test_from_settings() -> None:
    config = config_from_settings(
        {"max_num_seqs": 4, "kv_cache_memory": "1MiB", "speculative_config": {"method": "none"}}
    )
    assert (config.max_num_seqs, config.kv_cache_memory, config.method) == (4, 1 << 20, "none")
    with pytest.raises(ConfigError, match="unknown setting 'max_seqs'; did you mean"):
        config_from_settings({"max_seqs": 4})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        config_from_settings({"max_num_seqs": 4.5})
    config = config_from_settings({"method_options": {"prompt_lookup_max": 3}})
    assert config.method_options["ngram_max"] == 3


def test_every_field_has_help_and_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    flags = re.findall(r"^  (--[a-z-]+)", shown, re.M)
    assert len(set(flags)) == len(flags)
    for setting in engine_group().settings:
        assert setting.help, setting.name
        assert setting.flag in flags
        for choice in () if setting.takes_pairs else (*setting.literals, *setting.choices):
            assert re.search(rf"{setting.flag} .*[{{,]{choice}[,}}]", shown), setting.flag


def test_options_of_a_method_come_from_all_places(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("method_options: {ngram_min: 1, ngram_max: 7, max_lookback: 80}\n")
    config = parse(
        *("--config", str(file), "--method-option", "ngram-min=3", "--method-option=ngram_max=9"),
        OPENSPEC_METHOD_OPTIONS="ngram_min=2 prompt_lookup_max=8",
    )
    options = config.method_options
    assert [options[name] for name in ("ngram_min", "ngram_max", "max_lookback")] == [3, 9, 80]
    assert parse(OPENSPEC_METHOD_OPTIONS='{"ngram_min": 3}').method_options["ngram_min"] == 3
    shown = {setting.name for setting in engine_group().settings}
    assert not shown & set(drafters.option_names())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_engine_args("openspec", "", ["--version"], environ={})
    assert (
        stopped.value.code == 0 and capsys.readouterr().out == f"openspec {openspec.__version__}\n"
    )


def test_own_settings_beside_the_engines() -> None:
    @dataclass(frozen=True)
    class Server:
        """A server."""

        port: int = 8000
        """Port to listen on."""
        names: list[str] = field(default_factory=list)
        """Names,
        with commas."""
        body: int = number(1, 0, 1 << 40, is_bytes=True)
        """Size."""
        model: str | None = None
        """Shared with the engine."""

    assert field_docs(Server)["names"] == "Names, with commas."
    config, values = parse_engine_args(
        "openspec",
        "",
        ["--port", "1", "--names", "a, b", "--body", "2KiB", "--model", "."],
        [group_of("server", Server)],
        {},
    )
    assert build(Server, values) == Server(1, ["a", "b"], 2048, ".")
    assert config.model == "."


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", 17), ("2GiB", 2 << 30), ("2 GB", 2 * 10**9), ("1.5g", 3 << 29), ("8k", 8192)],
)
def test_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 << 29)] == ["5 B", "1.50 KiB", "1.50 GiB"]


def test_import_is_light() -> None:
    code = (
        "import sys, openspec; openspec.EngineConfig(); openspec.available_drafters(); "
        "heavy = {'torch', 'numpy', 'starlette', 'transformers', 'tokenizers', 'openspec._C'}; "
        "print(sorted(heavy & set(sys.modules)), openspec.LLM.__name__, 'LLM' in dir(openspec))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "LLM", "True"]


@pytest.mark.parametrize(
    ("method", "settings", "has_copies"),
    [
        ("eagle3", {}, True),
        ("dspark", {"num_speculative_tokens": 2}, True),
        ("eagle3", {"copied_drafts": False}, False),
        ("eagle3", {"acceptance": "rejection"}, False),  # they have no probabilities
        ("eagle3", {"num_speculative_tokens": 0}, False),
        ("ngram", {}, False),  # copies itself
        ("none", {}, False),
    ],
)
def test_copies_beside_a_drafter(
    method: str, settings: dict[str, object], has_copies: bool
) -> None:
    config = config_from_settings({"method": method, "copied_drafts": True, **settings})
    assert (config.max_copied_drafts > 0) == has_copies


def test_memory_of_answers() -> None:
    """Beside what copies itself, too: it does not know other answers."""
    for method in ("eagle3", "ngram"):
        config = config_from_settings({"method": method, "draft_memory": "64MiB"})
        assert (config.draft_memory, config.max_copied_drafts > 0) == (64 << 20, True)
    refused: list[dict[str, object]] = [
        {"method": "none"},
        {"method": "eagle3", "acceptance": "rejection"},
    ]
    for settings in refused:
        with pytest.raises(ConfigError, match="draft_memory is for drafts that are copied"):
            config_from_settings({**settings, "draft_memory": "64MiB"})
