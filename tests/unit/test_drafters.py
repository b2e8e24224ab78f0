from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from openspec import drafters
from openspec.config import EngineConfig
from openspec.drafters import (
    available_drafters,
    default_method,
    get_drafter,
    plain_method,
    register_drafter,
    unregister_drafter,
)
from openspec.drafters.spec import DrafterOption, DrafterSpec, DraftSetup
from openspec.errors import ConfigError

if TYPE_CHECKING:
    from openspec.checkpoint.targets.config import ModelConfig
    from openspec.checkpoint.weights import DraftModel

MODEL: ModelConfig = None  # type: ignore[assignment] # no built-in drafter looks at it


@pytest.mark.parametrize("name", available_drafters())
def test_spec_is_sound(name: str) -> None:
    spec = get_drafter(name)
    assert spec.name == name and spec.summary
    assert 0 <= spec.default_num_speculative_tokens <= spec.max_num_speculative_tokens
    completed = spec.complete_options({})
    assert list(completed) == [option.name for option in spec.options]
    for option in spec.options:
        assert option.help.endswith(".") and option.check(option.default) == option.default
        assert option.name not in EngineConfig.__dataclass_fields__
        for alias in option.aliases:
            assert spec.complete_options({alias: option.default}) == completed
    draft_model = str(EngineConfig().model_path) if spec.needs_draft_model else None
    spec.validate(EngineConfig(method=name, draft_model=draft_model).draft_setup(MODEL))


def test_the_two_roles() -> None:
    assert plain_method() in available_drafters()
    assert get_drafter(plain_method()).max_num_speculative_tokens == 0
    assert default_method() in available_drafters() and default_method() != plain_method()


def test_core_and_package_agree() -> None:
    from openspec import _C

    assert sorted(_C.drafter_names()) == available_drafters()


def test_alias_of_the_method() -> None:
    for name in available_drafters():
        for alias in get_drafter(name).aliases:
            assert get_drafter(alias).name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_tokens": 1000}, r"num_speculative_tokens must be in \[0, "),
        ({"draft_model": "somewhere"}, "takes no draft model"),
        ({"method_options": {"nonsense": 1}}, "has no option 'nonsense'"),
        (
            {"acceptance": "rejection"},
            f"which method '{default_method()}' does not know; .* --method",
        ),
    ],
)
def test_validate_refuses(change: dict[str, object], message: str) -> None:
    config = dataclasses.replace(EngineConfig(), **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        get_drafter(config.method).validate(config.draft_setup(MODEL))


def test_one_bound_moves_the_default_of_the_other() -> None:
    spec = get_drafter("ngram")
    assert spec.complete_options({"prompt_lookup_max": 1})["ngram_min"] == 1
    assert spec.complete_options({"ngram_min": 9})["ngram_max"] == 9
    completed = spec.complete_options({"ngram_min": 3})
    assert (completed["ngram_min"], completed["ngram_max"]) == (3, 4)
    assert spec.complete_options(completed) == completed


def test_crossed_options() -> None:
    config = EngineConfig(method="ngram", method_options={"ngram_min": 5, "ngram_max": 3})
    with pytest.raises(ConfigError, match=r"ngram_min \(5\) must not exceed ngram_max \(3\)"):
        get_drafter("ngram").validate(config.draft_setup(MODEL))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (DrafterOption(name="o", default=1, help="", minimum=1), 0, "at least 1"),
        (DrafterOption(name="o", default=1, help="", maximum=3), 4, "at most 3"),
        (DrafterOption(name="o", default=1, help=""), True, "expects a whole number"),
        (DrafterOption(name="o", default=1, help=""), "x", "expects a whole number"),
        (DrafterOption(name="o", default=0.5, help="", minimum=0), float("nan"), "at least 0"),
        (DrafterOption(name="o", default="a", help="", choices=("a", "b")), "c", "one of a, b"),
    ],
)
def test_option_refuses(option: DrafterOption, value: int | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        option.check(value)


def test_option_takes_an_integer_for_a_float() -> None:
    value = DrafterOption(name="o", default=0.5, help="").check(2)
    assert value == 2.0 and isinstance(value, float)


def read_nothing(setup: DraftSetup) -> DraftModel:
    raise AssertionError("validation opens no files")


def test_registered_drafter(tmp_path: Path) -> None:
    spec = DrafterSpec(
        name="guess",
        summary="guesses",
        default_num_speculative_tokens=2,
        max_num_speculative_tokens=2,
        read_draft_model=read_nothing,
    )
    register_drafter(spec)
    try:
        assert "guess" in available_drafters() and get_drafter("guess") is spec
        with pytest.raises(ConfigError, match="exists already"):
            register_drafter(spec)
        with pytest.raises(ConfigError, match="needs --draft-model"):
            spec.validate(EngineConfig(method="guess").draft_setup(MODEL))
        # A folder of that name in the model's own is the default.
        config = EngineConfig(method="guess", model=str(tmp_path))
        assert config.draft_model_path is None
        (tmp_path / "guess").mkdir()
        assert config.draft_model_path == tmp_path / "guess"
        spec.validate(config.draft_setup(MODEL))
        given = dataclasses.replace(config, draft_model="elsewhere")
        assert given.draft_model_path == Path("elsewhere")
        with pytest.raises(ConfigError, match="draft model folder elsewhere does not exist"):
            given.check()
    finally:
        unregister_drafter("guess")
    assert "guess" not in available_drafters()
    with pytest.raises(ConfigError, match="unknown method 'guess'; "):
        drafters.get_drafter("guess")
