"""The weights of checkpoint folders: files mapped, checked against the runner, and loaded."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import math
import mmap
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from openspec.checkpoint.float16 import FLOAT16, Float16Weights
from openspec.checkpoint.folder import find_file, is_plain_name, open_folder
from openspec.checkpoint.quantization.declared import CODES
from openspec.checkpoint.quantization.made import load_made
from openspec.checkpoint.quantization.weight_format import WeightFormat
from openspec.checkpoint.strict_json import JsonKeys, parse_json_object, read_json_object
from openspec.checkpoint.tensor_info import TensorInfo, name_some, shown_name, split_experts
from openspec.errors import ConfigError, EngineError, RequestError
from openspec.specs.head import HeadSpec

if TYPE_CHECKING:
    import torch

    from openspec import _C

logger = logging.getLogger(__name__)

LIBRARY = "numpy"
"""What safetensors imports to read a header; it loads ten times as fast as torch."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONVERTER = "python -m openspec.convert_drafter"
LOADABLE_DTYPES = ("BF16", FLOAT16, "F32")
DRAFT_DTYPES = (*LOADABLE_DTYPES, "I64", "I32")
TIED_SURPLUS = "lm_head.weight"
TEXT_PREFIX = "model.language_model."
"""Of the text model's tensors, `model.` elsewhere, in a checkpoint that reads images as well."""
IMAGE_PREFIX = "model.visual."
"""Of the tensors of such a checkpoint that read images, which are left out."""


class SafetensorsFile:
    """One file, mapped; the `safetensors` library checks the whole header before it is used."""

    def __init__(self, path: Path) -> None:
        """Maps the file.

        Raises:
            ConfigError: it cannot be read, or is not of the format.
        """
        self.path = path
        try:
            with safe_open(path, framework=LIBRARY):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path}: not a whole safetensors file: {shown_name(str(error))}; download it again"
            ) from None
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._first_byte = 8 + len(header)
        stored = _tensor_headers(header, path)
        self.stored_names = frozenset(stored)
        """As the file has them: experts may be stored together."""
        self._headers = split_experts(stored)
        self.tensors = {
            name: TensorInfo(name, one["dtype"], tuple(one["shape"]), path)
            for name, one in self._headers.items()
        }
        """In the order of the header, which is that of the data."""

    def data(self, name: str) -> memoryview:
        """The bytes of one of `tensors`, read-only: the file's own pages."""
        start, end = self._headers[name]["data_offsets"]
        return memoryview(self._map)[self._first_byte + start : self._first_byte + end]

    def tensor(self, name: str) -> torch.Tensor:
        """One of `tensors` for torch, over pages that stay mapped as long as it lives."""
        part_of = self._headers[name].get("part_of")
        with safe_open(self.path, framework="torch") as file:
            if part_of is None:
                tensor: torch.Tensor = file.get_tensor(name)
            else:
                stored, expert, rows = part_of
                tensor = file.get_slice(stored)[expert, rows]
        return tensor

    def close(self) -> None:
        """Unmaps the file, once nobody holds bytes of it; may be called twice."""
        self._map.close()


def _tensor_headers(header: bytes, path: Path) -> dict[str, Any]:
    """What a header says of each tensor. The library lets one of two of the same name win."""
    if header[:1] != b"{":
        raise ConfigError(f"{path}: header: expected a JSON object, found {header[:1]!r}")
    tensors = parse_json_object(header, f"{path}: header")
    tensors.pop("__metadata__", None)
    return tensors


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
    edits: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    weight_format: WeightFormat = field(default_factory=WeightFormat)
    float16: Float16Weights = field(default_factory=Float16Weights)

    @property
    def scales(self) -> frozenset[str]:
        """Names of tensors of scales, as the runner has them."""
        return frozenset(scale.name for scale in self.weight_format.quantized.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A draft checkpoint that fits the target, as the method describes it to the engine."""

    folder: Path
    description: str
    """One line for the log: format, size, what it reads of the target."""
    head: HeadSpec
    """What it computes, for the compiled drafter."""
    tensor_names: Mapping[str, str]
    """Tensor in the files -> the name under which the runner expects it. All have to be there."""
    ignored_tensors: Mapping[str, str]
    """Tensors in the files that are not loaded -> why."""
    details: tuple[str, ...] = ()
    """More lines, for whoever looks closer."""
    weight_format: WeightFormat = field(default_factory=WeightFormat)
    """How its matrices are stored."""
    edits: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    """What is made at load of tensors in the files, of the same shape."""
    trained_length: int | None = None
    """Tokens of the longest texts that it was trained on, as far as config.json tells."""


def load_weights(
    runner: _C.Runner,
    folder: str | Path,
    draft_model: DraftModel | None = None,
    weight_format: WeightFormat | None = None,
    load_format: str = "auto",
    other_parts: Mapping[str, str] | None = None,
) -> None:
    """Gives every tensor of the checkpoints to the runner; with "dummy" the target's are random.

    `weight_format` is the target's, bfloat16 if there is none. `other_parts` are
    parts of its files that are left out: start of their tensors' names -> why. All names, shapes
    and types are checked before the first tensor is loaded.

    Raises:
        ConfigError: missing, surplus or mis-shaped tensors, with expected and found.
    """
    is_dummy = load_format == "dummy"
    parts = []
    if not is_dummy:
        left_out = {IMAGE_PREFIX: "it reads images", **(other_parts or {})}
        parts.append(_target_part(runner, folder, weight_format or WeightFormat(), left_out))
    if draft_model is not None:
        parts.append(_draft_part(runner, draft_model))
    for part in parts:
        _check_tensors(part)
    files = [(part, file) for part in parts for file in part.files]
    total = sum(file.path.stat().st_size for _, file in files)
    done = 0
    last_log = start = time.monotonic()
    if is_dummy:
        from openspec.checkpoint.dummy import load_dummy_weights  # which imports numpy

        done = load_dummy_weights(runner, (weight_format or WeightFormat()).quantized)
        logger.warning("weights: random ones, as load_format is dummy; the model writes nonsense")
    for part, file in files:
        for name in filter(part.expected.__contains__, file.tensors):
            done += _load(part, file, name)
            if time.monotonic() - last_log >= 2.0:
                last_log = time.monotonic()
                logger.info("weights: %.1f of %.1f GB", done / 1e9, total / 1e9)
        file.close()  # before the next one, so that read pages do not count as ours
    for part in parts:
        if (lost := part.float16.describe()) is not None:
            logger.info("%s: %s", part.root, lost)
    logger.info("weights: %.3f GB in %.1f s", done / 1e9, time.monotonic() - start)


class OtherHead:
    """A draft checkpoint that is loaded beside the one that drafts."""

    def __init__(self, runner: _C.Runner, draft_model: DraftModel) -> None:
        """Checks names, shapes, types and numbers; loads nothing.

        Raises:
            ConfigError: missing, surplus or mis-shaped tensors, or of types that are not taken.
            RequestError: a number is NaN or infinite.
        """
        self._runner = runner
        self._part = _draft_part(runner, draft_model)
        _check_tensors(self._part)
        not_finite = []

        def check(name: str, data: memoryview, dtype: str) -> None:
            if not runner.check_spare_tensor(name, data, dtype):
                not_finite.append(name)

        self._give_all(check)
        if not_finite:
            raise RequestError(
                f"{draft_model.folder}: {len(not_finite)} tensors hold NaN or infinity: "
                f"{name_some(not_finite)}; get the head anew",
                "path",
                "drafter_not_finite",
            )

    def load(self) -> None:
        """Loads all of it, on the thread that calls."""
        self._runner.begin_spare_loading()
        self._give_all(self._runner.load_spare_tensor)
        self._runner.finish_spare_loading()
        for file in self._part.files:
            file.close()

    def _give_all(self, load: Callable[[str, memoryview, str], None]) -> None:
        part = dataclasses.replace(self._part, load=load)
        for file in part.files:
            for name in filter(part.expected.__contains__, file.tensors):
                _load(part, file, name)


def target_tensors(
    folder: str | Path, other_parts: Mapping[str, str] | None = None
) -> dict[str, TensorInfo]:
    """The engine's names of a checkpoint's tensors -> what its headers say.

    Parts that are left out, which `load_weights` explains, are not among them.

    Raises:
        ConfigError: no weights, a broken file, or files and index that disagree.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in checkpoint_files(folder):
        tensors |= {
            engine_name(name): info
            for name, info in file.tensors.items()
            if not name.startswith((IMAGE_PREFIX, *(other_parts or ())))
        }
        file.close()
    return tensors


def engine_name(name: str) -> str:
    """The name under which the engine expects a target's tensor of the files."""
    inner = name.removeprefix(TEXT_PREFIX)
    return name if inner == name else f"model.{inner}"


def _target_part(
    runner: _C.Runner,
    folder: str | Path,
    weight_format: WeightFormat,
    other_parts: Mapping[str, str],
) -> _Part:
    root = open_folder(folder)
    made = {scale.name for scale in weight_format.quantized.values() if weight_format.is_made}
    expected = {name: tuple(shape) for name, shape in runner.expected_tensors() if name not in made}
    files = checkpoint_files(root)
    found = [name for file in files for name in file.tensors]
    ignored = {
        name: reason
        for name in found
        for prefix, reason in other_parts.items()
        if name.startswith(prefix)
    }
    if TIED_SURPLUS not in expected:
        ignored[TIED_SURPLUS] = "config.json ties it to the embedding"
    prefix = TEXT_PREFIX if any(name.startswith(TEXT_PREFIX) for name in found) else "model."
    names = {re.sub(r"^model\.", prefix, name): name for name in expected}
    return _Part(
        root=root,
        files=files,
        expected={name: expected[inner] for name, inner in names.items()},
        runner_names=names,
        ignored=ignored,
        dtypes=LOADABLE_DTYPES,
        remedy="for instance with transformers: model.to(torch.bfloat16).save_pretrained(folder)",
        load=runner.load_tensor,
        weight_format=weight_format,
    )


def _draft_part(runner: _C.Runner, model: DraftModel) -> _Part:
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
        remedy=f"{CONVERTER} {model.folder} NEW_FOLDER",
        load=runner.load_draft_tensor,
        edits=model.edits,
        weight_format=model.weight_format,
    )


def _load(part: _Part, file: SafetensorsFile, name: str) -> int:
    """Gives one tensor to the runner; returns its bytes."""
    dtype, data = file.tensors[name].dtype, file.data(name)
    num_bytes, where, inner = len(data), f"{file.path}: {name}", part.runner_names[name]
    scale = part.weight_format.quantized.get(inner)
    is_made = scale is not None and part.weight_format.is_made
    if dtype == FLOAT16 and inner in part.scales:
        import numpy

        wide = numpy.frombuffer(data, numpy.float16).astype(numpy.float32)
        dtype, data = "F32", memoryview(wide.tobytes())
    elif name in part.edits:
        converted = part.edits[name](file.tensor(name).float()).bfloat16().contiguous()
        dtype, data = "BF16", _memory_of(converted)
    elif dtype == FLOAT16 and not is_made:
        converted = part.float16.convert(file.tensor(name), where)
        dtype, data = "BF16", _memory_of(converted)
    try:
        if scale is not None and is_made:
            load_made(part.load, inner, data, dtype, file.tensors[name].shape, scale, where)
        else:
            part.load(inner, data, dtype)
    except ConfigError:
        raise
    except ValueError as error:  # a type that the runner does not take for this tensor
        remedy = f": {part.remedy}" if dtype == "F32" else ""
        raise ConfigError(f"{where}: {error}{remedy}") from None
    return num_bytes


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory: numpy has no bfloat16."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B").toreadonly()


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
    quantized = {} if part.weight_format.is_made else part.weight_format.quantized
    coded = {name for name in expected if part.runner_names[name] in quantized}
    for name in expected:
        if found[name].dtype == CODES and name not in coded:  # before its scale: that has no place
            raise ConfigError(
                f"{found[name].path}: {name} is {CODES}, but neither config.json nor "
                "hf_quant_config.json says that it is quantised; get the checkpoint anew"
            )
    surplus = sorted(name for name in found if name not in expected)
    for reason in dict.fromkeys(part.ignored.values()):
        names = [name for name in surplus if part.ignored.get(name) == reason]
        if names:
            verb = "is" if len(names) == 1 else "are"
            logger.info("%s: %s %s ignored: %s", root, name_some(names), verb, reason)
    known = part.ignored.keys() | part.weight_format.unused
    extra = [name for name in surplus if name not in known]
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
        dtypes = (CODES,) if name in coded else part.dtypes
        if info.dtype not in dtypes:
            raise ConfigError(
                f"{info.path}: {name}: expected dtype {' or '.join(dtypes)}, "
                f"found {info.dtype}; convert the checkpoint, {part.remedy}"
            )


def checkpoint_files(folder: str | Path) -> list[SafetensorsFile]:
    """All safetensors files of a checkpoint, opened and checked against the index if there is one.

    Raises:
        ConfigError: no weights, a broken file, or files and index that disagree.
    """
    root = open_folder(folder)
    single = find_file(root, SINGLE_FILE)
    if single is not None:
        return [SafetensorsFile(single)]
    index = find_file(root, INDEX_FILE)
    if index is not None:
        shards = read_index(index, root / INDEX_FILE)
        return [_shard(root, name, listed) for name, listed in shards.items()]
    pickled = any(find_file(root, f"pytorch_model.bin{end}") for end in ("", ".index.json"))
    remedy = (
        "pytorch_model.bin is not read because it can run code; "
        "save the model again with safe_serialization=True"
        if pickled
        else "give the folder of a complete Hugging Face checkpoint"
    )
    raise ConfigError(f"{root} has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")


def read_index(path: Path, shown: Path) -> dict[str, set[str]]:
    """File of the same folder -> its tensors; messages name the index as `shown`.

    Raises:
        ConfigError: it says nothing, or names files elsewhere.
    """
    index = JsonKeys(read_json_object(path), str(shown))
    weight_map = index.object("weight_map")
    if weight_map is None or not weight_map.values:
        index.refuse("weight_map", "an object with tensors")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.values.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            weight_map.refuse(tensor, "the name of a file in the same folder")
        shards.setdefault(shard, set()).add(tensor)
    return shards


def _shard(root: Path, name: str, listed: set[str]) -> SafetensorsFile:
    """A file that holds the `listed` tensors and no others."""
    path = find_file(root, name)
    if path is None:
        raise ConfigError(
            f"{root / name} does not exist, but {INDEX_FILE} places {name_some(sorted(listed))} "
            "there; finish the download"
        )
    file = SafetensorsFile(path)
    absent, unlisted = listed - file.stored_names, file.stored_names - listed
    if absent:
        raise ConfigError(
            f"{path}: lacks {name_some(sorted(absent))}, which {INDEX_FILE} places there; "
            "get both anew"
        )
    if unlisted:
        raise ConfigError(
            f"{path}: holds {name_some(sorted(unlisted))}, which {INDEX_FILE} does not place "
            "there; get both anew"
        )
    return file


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number of the tensor is NaN or infinite."""
    # Both ends are NaN if one number is; unlike torch.isfinite() this needs no memory.
    return not tensor.numel() or all(math.isfinite(end) for end in tensor.aminmax())
