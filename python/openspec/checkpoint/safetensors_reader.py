"""Safetensors files, mapped into memory and trusted in nothing."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from openspec.checkpoint.folder import find_file, is_plain_name, open_folder
from openspec.checkpoint.strict_json import (
    JsonValue,
    describe_value,
    parse_json_object,
    read_json_object,
)
from openspec.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_NUM_DIMS = 16
MAX_ELEMENTS = 1 << 60
DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_NAMED = 8  # tensors that one message lists


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file. Views from it end with it: `close` fails while any is held."""

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its whole header.

        Raises:
            ConfigError: with file, tensor, expected and found.
        """
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise ConfigError(f"{path}: {size} bytes, too short for a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: cannot be mapped: {error}") from None
        try:
            self.tensors: Mapping[str, TensorInfo] = _read_header(path, self._map)
        except ConfigError:
            self._map.close()
            raise

    def view(self, name: str) -> memoryview:
        """The tensor's bytes, read-only and not copied."""
        if self._map is None:
            raise ConfigError(f"{self.path}: is closed")
        info = self.tensors.get(name)
        if info is None:
            raise ConfigError(f"{self.path}: has no tensor {name}")
        return memoryview(self._map)[info.begin : info.end]

    def close(self) -> None:
        """Unmaps the file; may be called twice."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def __enter__(self) -> SafetensorsFile:
        """The file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes; while an error passes, views may still be held by its frames."""
        try:
            self.close()
        except BufferError:
            if error is None:
                raise


def read_index(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard, from the folder's index; shards are files of the folder itself.

    Raises:
        ConfigError: no index, not of the format, a shard that is absent or outside.
    """
    source = f"{folder / INDEX_FILE}"
    file = find_file(folder, INDEX_FILE)
    if file is None:
        raise ConfigError(f"{source} does not exist")
    weight_map = read_json_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{source}: weight_map: expected an object with tensors, "
            f"found {describe_value(weight_map)}"
        )
    shards: dict[str, Path] = {}
    result: dict[str, Path] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise ConfigError(
                f"{source}: {tensor}: expected the name of a file in the same folder, "
                f"found {describe_value(shard)}"
            )
        if shard not in shards:
            path = find_file(folder, shard)
            if path is None:
                raise ConfigError(
                    f"{folder / shard} does not exist, but {INDEX_FILE} places {tensor} there; "
                    "finish the download"
                )
            shards[shard] = path
        result[tensor] = shards[shard]
    return result


def checkpoint_files(folder: str | Path) -> list[SafetensorsFile]:
    """All safetensors files of a checkpoint, opened and checked against the index if there is one.

    Raises:
        ConfigError: no weights, a broken file, or files and index that disagree.
    """
    root = open_folder(folder)
    single = find_file(root, SINGLE_FILE)
    if single is not None:
        return [SafetensorsFile(single)]
    if find_file(root, INDEX_FILE) is None:
        pickled = any(find_file(root, f"pytorch_model.bin{end}") for end in ("", ".index.json"))
        remedy = (
            "pytorch_model.bin is not read because it can run code; "
            "save the model again with safe_serialization=True"
            if pickled
            else "give the folder of a complete Hugging Face checkpoint"
        )
        raise ConfigError(f"{root} has neither {SINGLE_FILE} nor {INDEX_FILE}; {remedy}")
    weight_map = read_index(root)
    files: list[SafetensorsFile] = []
    try:
        for path in dict.fromkeys(weight_map.values()):
            files.append(SafetensorsFile(path))
            _check_shard(files[-1], weight_map)
    except ConfigError:
        for file in files:
            file.close()
        raise
    return files


def _read_header(path: Path, data: mmap.mmap) -> dict[str, TensorInfo]:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{path}: header: expected at most {MAX_HEADER_BYTES} bytes, found a length of {length}"
        )
    data_begin = 8 + length
    if data_begin > len(data):
        raise ConfigError(
            f"{path}: header: expected {length} bytes, found {len(data) - 8} in the whole file; "
            "the file is cut short"
        )
    if data[8:9] != b"{":
        raise ConfigError(f"{path}: header: expected a JSON object, found {data[8:9]!r}")
    entries = parse_json_object(data[8:data_begin], f"{path}: header")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            _check_metadata(path, entry)
        else:
            tensors[name] = _parse_entry(path, name, entry, data_begin, len(data))
    _check_layout(path, tensors, data_begin, len(data))
    return tensors


def _check_metadata(path: Path, entry: JsonValue) -> None:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise ConfigError(
            f"{path}: __metadata__: expected an object of strings, found {describe_value(entry)}"
        )


def _parse_entry(
    path: Path, name: str, entry: JsonValue, data_begin: int, file_size: int
) -> TensorInfo:
    where = f"{path}: {shown_name(name)}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, found {describe_value(entry)}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ConfigError(
            f"{where}: dtype: expected one of {', '.join(DTYPE_BITS)}, "
            f"found {describe_value(dtype)}"
        )
    shape = _parse_sizes(where, "shape", entry.get("shape"), MAX_NUM_DIMS)
    offsets = _parse_sizes(where, "data_offsets", entry.get("data_offsets"), 2)
    num_elements = 1
    for size in shape:
        num_elements *= size
        if num_elements > MAX_ELEMENTS:
            raise ConfigError(f"{where}: shape: {describe_value(list(shape))} is too large")
    num_bits = num_elements * DTYPE_BITS[dtype]
    data_size = file_size - data_begin
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        raise ConfigError(
            f"{where}: data_offsets: expected begin <= end <= {data_size} (the data in the file), "
            f"found {describe_value(list(offsets))}"
        )
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise ConfigError(
            f"{where}: {dtype} {list(shape)}: expected {num_bits / 8:g} bytes, "
            f"found {offsets[1] - offsets[0]}"
        )
    return TensorInfo(name, dtype, shape, path, data_begin + offsets[0], data_begin + offsets[1])


def _parse_sizes(where: str, key: str, value: JsonValue, max_len: int) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) <= max_len:
        sizes = tuple(
            size
            for size in value
            if isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_ELEMENTS
        )
        if len(sizes) == len(value):
            return sizes
    raise ConfigError(
        f"{where}: {key}: expected at most {max_len} non-negative integers, "
        f"found {describe_value(value)}"
    )


def _check_layout(
    path: Path, tensors: Mapping[str, TensorInfo], data_begin: int, file_size: int
) -> None:
    """The format's rule: the tensors cover the data exactly, without overlap, hole or rest."""
    position = data_begin
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            what = "overlaps the tensor before it" if info.begin < position else "leaves a hole"
            raise ConfigError(
                f"{path}: {shown_name(info.name)} {what}: expected its data at offset "
                f"{position - data_begin}, found {info.begin - data_begin}"
            )
        position = info.end
    if position != file_size:
        raise ConfigError(
            f"{path}: expected {position - data_begin} bytes of data, "
            f"found {file_size - data_begin}"
        )


def _check_shard(file: SafetensorsFile, weight_map: Mapping[str, Path]) -> None:
    listed = {tensor for tensor, path in weight_map.items() if path == file.path}
    absent = sorted(listed - set(file.tensors))
    if absent:
        raise ConfigError(
            f"{file.path}: lacks {name_some(absent)}, which {INDEX_FILE} places there"
        )
    unlisted = sorted(set(file.tensors) - listed)
    if unlisted:
        raise ConfigError(
            f"{file.path}: holds {name_some(unlisted)}, which {INDEX_FILE} does not place there"
        )


def name_some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - MAX_NAMED
    shown = ", ".join(shown_name(name) for name in names[:MAX_NAMED])
    return f"{shown} and {rest} more" if rest > 0 else shown


def shown_name(name: str) -> str:
    """A tensor's name on one line, whatever is in it."""
    return name if name.isprintable() and 0 < len(name) <= 120 else describe_value(name)
