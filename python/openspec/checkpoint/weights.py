"""The weights of checkpoint folders, checked against what the runner expects, and loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openspec.checkpoint import draft_model as draft_models
from openspec.checkpoint.draft_model import DraftModel
from openspec.checkpoint.folder import open_folder
from openspec.checkpoint.safetensors_reader import (
    SafetensorsFile,
    TensorInfo,
    checkpoint_files,
    name_some,
)
from openspec.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

LOADABLE_DTYPES = ("BF16", "F32")
DRAFT_DTYPES = (*LOADABLE_DTYPES, "I64", "I32")
TIED_SURPLUS = "lm_head.weight"


class WeightSink(Protocol):
    """What takes weights: `_C.Runner`."""

    def expected_tensors(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all tensors that it needs."""

    def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        """Takes one tensor; `data` is only valid during the call."""

    def expected_draft_tensors(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all tensors that its drafter needs."""

    def load_draft_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        """Takes one tensor of the drafter."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One checkpoint and where its tensors go. All names are those in its files."""

    root: Path
    files: list[SafetensorsFile]
    expected: Mapping[str, tuple[int, ...]]
    runner_names: Mapping[str, str]
    ignored: Mapping[str, str]
    """Tensors that may be there and are not loaded -> why."""
    dtypes: tuple[str, ...]
    remedy: str
    """For a tensor of another type."""
    load: Callable[[str, memoryview, str], None]


def load_weights(
    runner: WeightSink,
    folder: str | Path,
    draft_model: DraftModel | None = None,
) -> None:
    """Gives every tensor of the checkpoints to the runner.

    All names, shapes and types are checked before the first tensor is loaded.

    Raises:
        ConfigError: missing, surplus or mis-shaped tensors, with expected and found.
    """
    parts: list[_Part] = []
    try:
        parts.append(_target_part(runner, folder))
        if draft_model is not None:
            parts.append(_draft_part(runner, draft_model))
        for part in parts:
            _check_tensors(part)
        total = sum(
            info.end - info.begin
            for part in parts
            for file in part.files
            for info in file.tensors.values()
            if info.name in part.expected
        )
        done = 0
        last_log = start = time.monotonic()
        for part, file in [(one, file) for one in parts for file in one.files]:
            for info in sorted(file.tensors.values(), key=lambda info: info.begin):
                if info.name not in part.expected:
                    continue
                with file.view(info.name) as data:
                    _load(part, info, data)
                done += info.end - info.begin
                if time.monotonic() - last_log >= 2.0:
                    last_log = time.monotonic()
                    logger.info("weights: %.1f of %.1f GB", done / 1e9, total / 1e9)
            file.close()  # before the next one, so that read pages do not count as ours
        runner.finish_loading()
        logger.info("weights: %.3f GB in %.1f s", total / 1e9, time.monotonic() - start)
    finally:
        for part in parts:
            for file in part.files:
                file.close()


def _target_part(runner: WeightSink, folder: str | Path) -> _Part:
    root = open_folder(folder)
    expected = {name: tuple(shape) for name, shape in runner.expected_tensors()}
    is_tied = TIED_SURPLUS not in expected
    return _Part(
        root=root,
        files=checkpoint_files(root),
        expected=expected,
        runner_names={name: name for name in expected},
        ignored={TIED_SURPLUS: "config.json ties it to the embedding"} if is_tied else {},
        dtypes=LOADABLE_DTYPES,
        remedy="for instance with transformers: model.to(torch.bfloat16).save_pretrained(folder)",
        load=runner.load_tensor,
    )


def _draft_part(runner: WeightSink, model: DraftModel) -> _Part:
    shapes = {name: tuple(shape) for name, shape in runner.expected_draft_tensors()}
    named = set(model.tensor_names.values())
    if named != set(shapes) or len(named) != len(model.tensor_names):
        raise EngineError(
            "the compiled drafter and its module in openspec.drafters disagree about tensors: "
            f"{name_some(sorted(named ^ set(shapes)))}; reinstall openspec"
        )
    return _Part(
        root=model.folder,
        files=checkpoint_files(model.folder),
        expected={name: shapes[inner] for name, inner in model.tensor_names.items()},
        runner_names=model.tensor_names,
        ignored=model.ignored_tensors,
        dtypes=DRAFT_DTYPES,
        remedy=f"{draft_models.CONVERTER} {model.folder} NEW_FOLDER",
        load=runner.load_draft_tensor,
    )


def _load(part: _Part, info: TensorInfo, data: memoryview) -> None:
    try:
        part.load(part.runner_names[info.name], data, info.dtype)
    except ValueError as error:  # a type that the runner does not take for this tensor
        remedy = f": {part.remedy}" if info.dtype == "F32" else ""
        raise ConfigError(f"{info.path}: {info.name}: {error}{remedy}") from None


def _check_tensors(part: _Part) -> None:
    """Compares the checkpoint with what the runner expects."""
    root, expected = part.root, part.expected
    found = {name: info for file in part.files for name, info in file.tensors.items()}
    missing = [name for name in expected if name not in found]
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        raise ConfigError(
            f"{root}: missing {len(missing)} of {len(expected)} expected tensors: "
            f"{name_some(shapes)}; config.json and weights belong to different models, "
            "or the checkpoint is incomplete"
        )
    surplus = sorted(name for name in found if name not in expected)
    for name in surplus:
        if name in part.ignored:
            logger.info("%s: %s is ignored: %s", root, name, part.ignored[name])
    extra = [name for name in surplus if name not in part.ignored]
    if extra:
        raise ConfigError(
            f"{root}: {len(extra)} tensors that config.json has no place for: "
            f"{name_some(extra)}; config.json and weights belong to different models"
        )
    for name, shape in expected.items():
        info = found[name]
        if info.shape != shape:
            raise ConfigError(
                f"{info.path}: {name}: expected shape {list(shape)} (from config.json), "
                f"found {list(info.shape)}"
            )
        if info.dtype not in part.dtypes:
            raise ConfigError(
                f"{info.path}: {name}: expected dtype {' or '.join(part.dtypes)}, "
                f"found {info.dtype}; convert the checkpoint, {part.remedy}"
            )
