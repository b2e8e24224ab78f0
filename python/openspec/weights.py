"""The weights of a checkpoint folder, checked against what the runner expects, and loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from openspec.checkpoint_folder import open_folder
from openspec.errors import ConfigError
from openspec.safetensors_reader import SafetensorsFile, TensorInfo, checkpoint_files, name_some

logger = logging.getLogger(__name__)

LOADABLE_DTYPES = ("BF16", "F32")
TIED_SURPLUS = "lm_head.weight"


class WeightSink(Protocol):
    """What takes weights: `_C.Runner`."""

    def expected_tensors(self) -> list[tuple[str, list[int]]]:
        """Names and shapes of all tensors that it needs."""

    def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        """Takes one tensor; `data` is only valid during the call."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor."""


def load_weights(
    runner: WeightSink,
    folder: str | Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Gives every tensor of the checkpoint to the runner; returns the number of bytes read.

    All names, shapes and types are checked before the first tensor is loaded. BF16 and F32 are
    taken as they are; other types are refused. `on_progress` gets (bytes done, bytes in all).

    Raises:
        ConfigError: missing, surplus or mis-shaped tensors, with expected and found.
    """
    root = open_folder(folder)
    expected = {name: tuple(shape) for name, shape in runner.expected_tensors()}
    files = checkpoint_files(root)
    try:
        surplus = _check_tensors(root, files, expected)
        total = sum(
            info.end - info.begin
            for file in files
            for info in file.tensors.values()
            if info.name in expected
        )
        done = 0
        last_log = start = time.monotonic()
        for file in files:
            for info in sorted(file.tensors.values(), key=lambda info: info.begin):
                if info.name in surplus:
                    continue
                with file.view(info.name) as data:
                    _load(runner, info, data)
                done += info.end - info.begin
                if on_progress is not None:
                    on_progress(done, total)
                if time.monotonic() - last_log >= 2.0:
                    last_log = time.monotonic()
                    logger.info("weights: %.1f of %.1f GB", done / 1e9, total / 1e9)
            file.close()  # before the next one, so that read pages do not count as ours
        runner.finish_loading()
        logger.info("weights: %.3f GB in %.1f s", total / 1e9, time.monotonic() - start)
        return total
    finally:
        for file in files:
            file.close()


def _load(runner: WeightSink, info: TensorInfo, data: memoryview) -> None:
    try:
        runner.load_tensor(info.name, data, info.dtype)
    except ValueError as error:  # a type that the runner does not take for this tensor
        raise ConfigError(f"{info.path}: {info.name}: {error}") from None


def _check_tensors(
    root: Path, files: list[SafetensorsFile], expected: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Compares the checkpoint with what the runner expects; returns what may be left out."""
    found = {name: info for file in files for name, info in file.tensors.items()}
    missing = [name for name in expected if name not in found]
    if missing:
        shapes = [f"{name} {list(expected[name])}" for name in missing]
        raise ConfigError(
            f"{root}: missing {len(missing)} of {len(expected)} expected tensors: "
            f"{name_some(shapes)}; config.json and weights belong to different models, "
            "or the checkpoint is incomplete"
        )
    surplus = {name for name in found if name not in expected}
    if TIED_SURPLUS in surplus:
        logger.info("%s: %s is ignored: config.json ties it to the embedding", root, TIED_SURPLUS)
    extra = sorted(surplus - {TIED_SURPLUS})
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
        if info.dtype not in LOADABLE_DTYPES:
            raise ConfigError(
                f"{info.path}: {name}: expected dtype {' or '.join(LOADABLE_DTYPES)}, "
                f"found {info.dtype}; convert the checkpoint, for instance with transformers: "
                "model.to(torch.bfloat16).save_pretrained(folder)"
            )
    return surplus
