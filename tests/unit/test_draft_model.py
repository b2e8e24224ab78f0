"""Draft models in general: their weights on the way to the runner, and the engine's loading."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openspec.checkpoint.draft_model import open_draft_checkpoint
from openspec.checkpoint.weights import DraftModel, load_weights
from openspec.config import config_from_settings
from openspec.drafters import register_drafter, unregister_drafter
from openspec.drafters.spec import DrafterOption, DrafterSpec
from openspec.engine.load import load_engine
from openspec.errors import ConfigError, EngineError
from openspec.specs.head import HeadSpec
from openspec.specs.runner import RunnerConfig
from tests.heads.stubs import (
    Tensors,
    tensor,
    vector,
    write_draft,
    write_safetensors,
    write_target,
)
from tests.unit.fake_runner import FakeRunner

TARGET = {"embed": tensor("BF16", [6, 4], 1)}
DRAFT = {
    "layers.0.fc": tensor("BF16", [4, 8], 2),
    "map": vector("I64", [0, 1, 2]),
    "training_only": tensor("F16", [3]),
}
NAMES = {"layers.0.fc": "fc", "map": "map"}
EXPECTED = {"fc": [4, 8], "map": [3]}


class Sink:
    """A runner with a drafter that has weights."""

    def __init__(self, expected: dict[str, list[int]] = EXPECTED) -> None:
        self.expected = expected
        self.loaded: dict[str, tuple[bytes, str]] = {}

    def expected_tensors(self) -> list[tuple[str, list[int]]]:
        return [("embed", [6, 4])]

    def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        self.loaded[name] = (bytes(data), dtype)

    def expected_draft_tensors(self) -> list[tuple[str, list[int]]]:
        return list(self.expected.items())

    def load_draft_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        if dtype == "F32":
            raise ValueError("expected BF16, got F32")
        self.load_tensor("draft:" + name, data, dtype)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    write_safetensors(target / "model.safetensors", TARGET)
    write_draft(draft, {}, DRAFT)
    return target, draft


HEAD = HeadSpec(
    layers=(),
    rms_norm_eps=1e-6,
    capture_layers=(),
    draft_vocab_size=8,
    has_embedding=False,
    has_token_map=False,
)


def draft_model(folder: Path, names: dict[str, str] = NAMES) -> DraftModel:
    return DraftModel(
        folder=folder,
        description="a draft",
        head=HEAD,
        tensor_names=names,
        ignored_tensors={"training_only": "only training needs it"},
    )


def test_target_and_draft(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    with caplog.at_level(logging.INFO):
        load_weights(sink, folders[0], draft_model(folders[1]))
    assert sink.loaded == {
        "embed": (TARGET["embed"][2], "BF16"),
        "draft:fc": (DRAFT["layers.0.fc"][2], "BF16"),
        "draft:map": (DRAFT["map"][2], "I64"),
    }
    assert "training_only is ignored: only training needs it" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.fc": None}, r"missing 1 of 2 expected tensors: layers\.0\.fc \[4, 8\]"),
        ({"bias": tensor("BF16", [4])}, "1 tensors that config.json has no place for: bias"),
        (
            {"layers.0.fc": tensor("BF16", [8, 4])},
            r"layers\.0\.fc: expected shape \[4, 8\] \(from config.json\), found \[8, 4\]",
        ),
        (
            {"layers.0.fc": tensor("BOOL", [4, 8])},
            "found BOOL; convert the checkpoint, python -m openspec.convert_drafter ",
        ),
    ],
)
def test_mismatch_is_named_as_in_the_file(
    folders: tuple[Path, Path], changes: dict[str, Any], message: str
) -> None:
    tensors: Tensors = {
        name: entry for name, entry in {**DRAFT, **changes}.items() if entry is not None
    }
    write_draft(folders[1], {}, tensors)
    sink = Sink()
    with pytest.raises(ConfigError, match=message):
        load_weights(sink, folders[0], draft_model=draft_model(folders[1]))
    assert not sink.loaded  # the target's neither: everything is checked first


def test_type_that_the_drafter_refuses(folders: tuple[Path, Path]) -> None:
    write_draft(folders[1], {}, {**DRAFT, "layers.0.fc": tensor("F32", [4, 8])})
    message = r"layers\.0\.fc: expected BF16, got F32: python -m openspec\.convert_drafter"
    with pytest.raises(ConfigError, match=message):
        load_weights(Sink(), folders[0], draft_model=draft_model(folders[1]))


@pytest.mark.parametrize(
    ("names", "named"), [({"layers.0.fc": "fc"}, "map"), ({**NAMES, "more": "more"}, "more")]
)
def test_module_and_core_disagree(
    folders: tuple[Path, Path], names: dict[str, str], named: str
) -> None:
    with pytest.raises(EngineError, match=f"disagree about tensors: {named}; reinstall"):
        load_weights(Sink(), folders[0], draft_model=draft_model(folders[1], names))


def test_odd_integers(tmp_path: Path) -> None:
    folder = write_draft(tmp_path, {}, {"a": vector("I32", [-1, 5]), "b": tensor("I64", [2, 2])})
    checkpoint = open_draft_checkpoint(folder)
    assert checkpoint.integers("a") == [-1, 5]
    with pytest.raises(ConfigError, match=r"b: expected a vector .* found I64 \[2, 2\]"):
        checkpoint.integers("b")
    with pytest.raises(ConfigError, match="missing tensor c; the tensors there are a, b"):
        checkpoint.tensor("c")


def test_engine_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole path, with a runner that only looks like one."""
    from openspec.config import EngineConfig
    from openspec.engine import load as engine_loader
    from openspec.engine import plan as engine_plan

    write_target(tmp_path / "target")
    folder = write_draft(tmp_path / "target" / "guess", {}, DRAFT)
    configs: list[RunnerConfig] = []
    parts: list[object] = []

    class Runner(FakeRunner):
        def __init__(self, config: RunnerConfig, num_pages: int, drafter: object) -> None:
            super().__init__(num_pages=num_pages)
            configs.append(config)
            assert drafter is None

        def finish_loading(self) -> None:
            assert parts

        def non_finite_tensors(self) -> tuple[list[str], list[str]]:
            return [], []

        def measure_step_times(self, budget_s: float) -> list[object]:
            return []

    plan = SimpleNamespace(
        weight_bytes=1,
        scratch_bytes=1,
        exchange_bytes=0,
        table_bytes=1,
        draft_fixed_bytes=1,
        state_bytes=0,
        page_bytes=4096,
        draft_page_bytes=1024,
        num_base_pages=0,
    )
    core = SimpleNamespace(
        why_no_cuda=lambda: "none here",
        drafter_names=lambda: ["guess", "none"],
        memory_plan=lambda config: plan,
    )
    for module in (engine_loader, engine_plan):
        monkeypatch.setattr(module, "_C", core)
    monkeypatch.setattr(engine_loader, "CompiledRunner", Runner)
    monkeypatch.setattr(
        engine_loader,
        "load_weights",
        lambda runner, path, draft_model, **_: parts.extend([path, draft_model]),
    )
    model = draft_model(folder)
    register_drafter(
        DrafterSpec(
            name="guess",
            summary="guesses",
            default_num_speculative_tokens=2,
            max_num_speculative_tokens=2,
            options=(DrafterOption(name="luck", default=0.5, help="How much."),),
            read_draft_model=lambda setup: model,
        )
    )
    try:
        config = EngineConfig(
            model=str(tmp_path / "target"), method="guess", adaptive_speculation=False
        )
        with caplog.at_level(logging.INFO):
            engine_loader.load_engine(config)
        assert (configs[-1].method, configs[-1].head) == ("guess", HEAD)
        assert configs[-1].method_options == {"luck": 0.5}
        assert parts == [tmp_path / "target", model]
        assert "draft model: a draft" in caplog.text
        assert f"{folder}, which came with the model; --draft-model takes another" in caplog.text

        off = EngineConfig(model=str(tmp_path / "target"), method="guess", num_speculative_tokens=0)
        engine_loader.load_engine(off)
        assert (configs[-1].method, configs[-1].method_options) == ("none", {})
        assert parts[-1] is None  # what drafts nothing needs no draft model
    finally:
        unregister_drafter("guess")


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"max_model_len": 2048}, True),
        ({"max_model_len": 1024}, False),
        ({"max_model_len": 2048, "method_options": {"draft_window": 64}}, False),
    ],
)
@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3"])
def test_the_start_suggests_a_window(
    caplog: pytest.LogCaptureFixture, method: str, settings: dict[str, Any], is_said: bool
) -> None:
    """For texts longer than those that the head was trained on."""
    with caplog.at_level(logging.INFO):
        load_engine(
            config_from_settings(
                {"method": method, "num_threads": 1, "adaptive_speculation": False, **settings}
            )
        )
    said = "trained on 1024 tokens; --method-option draft_window=256 suggested"
    assert (said in caplog.text) == is_said
