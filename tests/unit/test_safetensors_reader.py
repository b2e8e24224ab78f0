from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest

from openspec.checkpoint.folder import find_file
from openspec.checkpoint.safetensors_reader import (
    DTYPE_BITS,
    SafetensorsFile,
    checkpoint_files,
    read_index,
)
from openspec.checkpoint.weights import load_weights
from openspec.errors import ConfigError

TENSORS: dict[str, tuple[str, list[int]]] = {
    "model.embed_tokens.weight": ("BF16", [6, 4]),
    "model.norm.weight": ("F32", [4]),
    "empty": ("F32", [0, 4]),
    "scalar": ("F32", []),
}


def pack(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def build(tensors: dict[str, tuple[str, list[int]]], metadata: bool = True) -> tuple[dict, bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    data = b""
    for name, (dtype, shape) in tensors.items():
        num_bytes = DTYPE_BITS[dtype] // 8
        for size in shape:
            num_bytes *= size
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + num_bytes],
        }
        data += bytes((len(data) + i) % 251 for i in range(num_bytes))
    return header, data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


class Sink:
    """Takes weights as a runner does."""

    def __init__(self, expected: dict[str, tuple[str, list[int]]]) -> None:
        self.expected = expected
        self.loaded: dict[str, tuple[bytes, str]] = {}
        self.is_finished = False

    def expected_tensors(self) -> list[tuple[str, list[int]]]:
        return [(name, shape) for name, (_, shape) in self.expected.items()]

    def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        assert name not in self.loaded
        self.loaded[name] = (bytes(data), dtype)

    def finish_loading(self) -> None:
        self.is_finished = True


def test_views_are_the_data_uncopied(tmp_path: Path) -> None:
    header, data = build(TENSORS)
    path = write(tmp_path / "a.safetensors", pack(header, data))
    with SafetensorsFile(path) as file:
        assert list(file.tensors) == list(TENSORS)
        for name, (dtype, shape) in TENSORS.items():
            info = file.tensors[name]
            begin, end = header[name]["data_offsets"]
            assert (info.dtype, info.shape) == (dtype, tuple(shape))
            view = file.view(name)
            assert view.readonly
            assert bytes(view) == data[begin:end]
            view.release()
        with pytest.raises(ConfigError, match="has no tensor"):
            file.view("nothing")
    with pytest.raises(ConfigError, match="closed"):
        file.view("scalar")
    file.close()


def test_the_reference_writer(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    safetensors_numpy = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
        "b": numpy.zeros((0, 2), dtype=numpy.int64),
        "c": numpy.arange(5, dtype=numpy.uint8),
    }
    safetensors_numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"k": "v"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        for name, array in arrays.items():
            assert file.tensors[name].shape == array.shape
            with file.view(name) as view:
                assert bytes(view) == array.tobytes()


BASE, BASE_DATA = build(TENSORS)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, name: {**BASE[name], **changes}}


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["0 bytes"]),
        (b"\0" * 7, ["7 bytes"]),
        (b"\0" * 8, ["expected a JSON object"]),
        (pack(BASE, BASE_DATA, 2**63), ["header", str(2**63), "100000000"]),
        (pack(BASE, BASE_DATA, 2**64 - 1), ["header"]),
        (pack(BASE, BASE_DATA, 100_000_000), ["cut short", "100000000"]),
        (pack(BASE, BASE_DATA, 100_000_001), ["at most"]),
        (pack(b"[]", b""), ["JSON object"]),
        (pack(b" {}", b""), ["JSON object"]),
        (pack(b"{", b""), ["not valid JSON"]),
        (pack(b'{"a":\xff}', b""), ["not valid JSON"]),
        (pack(b'{"a":1,"a":1}', b""), ['"a" appears twice']),
        (pack(b'{"a":{"dtype":"U8","dtype":"U8"}}', b""), ['"dtype" appears twice']),
        (pack(b'{"a":' + b"[" * 100_000, b""), ["not valid JSON"]),
        (pack(b'{"a":' + b"9" * 10_000 + b"}", b""), ["not valid JSON"]),
        (pack(b'{"a":NaN}', b""), ["NaN"]),
        (pack({"a": 3}, b""), ["a: expected an object", "3"]),
        (pack({"__metadata__": {"a": 1}}, b""), ["__metadata__"]),
        (pack({"__metadata__": []}, b""), ["__metadata__"]),
        (pack(changed(NORM, dtype="F31"), BASE_DATA), [NORM, "dtype", "F31"]),
        (pack(changed(NORM, dtype=None), BASE_DATA), [NORM, "dtype", "null"]),
        (pack(changed(NORM, dtype="BF16"), BASE_DATA), [NORM, "expected 8 bytes", "found 16"]),
        (pack(changed(NORM, shape=[5]), BASE_DATA), [NORM, "expected 20 bytes", "found 16"]),
        (pack(changed(NORM, shape=[-4]), BASE_DATA), [NORM, "shape", "-4"]),
        (pack(changed(NORM, shape=[4.0]), BASE_DATA), [NORM, "shape", "4.0"]),
        (pack(changed(NORM, shape=[True]), BASE_DATA), [NORM, "shape", "true"]),
        (pack(changed(NORM, shape="4"), BASE_DATA), [NORM, "shape"]),
        (pack(changed(NORM, shape=[2**62, 4]), BASE_DATA), [NORM, "shape"]),
        (pack(changed(NORM, shape=[2**40, 2**40, 0]), BASE_DATA), [NORM, "too large"]),
        (pack(changed(NORM, shape=[2**32, 2**32 + 1]), BASE_DATA), [NORM, "too large"]),
        (pack(changed(NORM, shape=[1] * 99), BASE_DATA), [NORM, "shape"]),
        (pack(changed(NORM, data_offsets=[48]), BASE_DATA), [NORM, "data_offsets"]),
        (pack(changed(NORM, data_offsets=[64, 48]), BASE_DATA), [NORM, "data_offsets"]),
        (pack(changed(NORM, data_offsets=[-16, 0]), BASE_DATA), [NORM, "data_offsets"]),
        (pack(changed(NORM, data_offsets=[2**63, 2**63 + 16]), BASE_DATA), [NORM]),
        (pack(changed(NORM, data_offsets=[56, 72]), BASE_DATA), [NORM, "<= 68"]),
        (pack(changed(NORM, data_offsets=[47, 63]), BASE_DATA), [NORM, "overlaps", "48", "47"]),
        (pack(changed(NORM, data_offsets=[49, 65]), BASE_DATA), [NORM, "hole", "48", "49"]),
        (pack(BASE, BASE_DATA + b"x"), ["expected 68 bytes of data, found 69"]),
        (pack(BASE, BASE_DATA[:-1]), ["scalar"]),
        (pack({}, b"x"), ["expected 0 bytes of data, found 1"]),
        (pack({"a\nb" * 999: 3}, b""), ["expected an object"]),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = write(tmp_path / "x.safetensors", content)
    with pytest.raises(ConfigError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert "x.safetensors" in message
    assert len(message) < 600
    assert "\n" not in message
    for word in words:
        assert word in message


def test_empty_header_and_padding_are_fine(tmp_path: Path) -> None:
    SafetensorsFile(write(tmp_path / "a", pack({}, b""))).close()
    padded = json.dumps(BASE).encode() + b"     "
    SafetensorsFile(write(tmp_path / "b", pack(padded, BASE_DATA))).close()


NUMBERS = [0, 1, -1, 3, 4, 7, 8, 16, 47, 49, 68, 69, 2**31, 2**32, 2**53, 2**63, 2**64, 2**200]
VALUES = [
    *NUMBERS,
    None,
    True,
    False,
    "",
    "F32",
    "BF16",
    "F16",
    "x",
    1.5,
    1e300,
    [],
    {},
    [1],
    [0, 0],
]


def mutate(rng: random.Random, value: Any) -> Any:
    """The value with one thing in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.2:
            return {**value, rng.choice(["a", "__metadata__", "", key + "x"]): value[key]}
        return {**value, key: mutate(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            return value[:index] + value[index + 1 :]
        if kind < 0.2:
            return [*value, rng.choice(VALUES)]
        return [*value[:index], mutate(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 16, -16, 2**32, 2**64])
    return rng.choice(VALUES)


def mutated_file(rng: random.Random) -> bytes:
    header: Any = BASE
    for _ in range(rng.randint(1, 3)):
        header = mutate(rng, header)
    text = json.dumps(header).encode()
    kind = rng.random()
    if kind < 0.5:
        return pack(text, BASE_DATA)
    whole = bytearray(pack(json.dumps(BASE).encode(), BASE_DATA))
    if kind < 0.6:
        return bytes(whole[: rng.randrange(len(whole))])
    if kind < 0.7:
        return pack(text, BASE_DATA, rng.choice([*NUMBERS[:15], len(text) - 1]) % 2**64)
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(whole)


def test_fuzz_only_config_errors(tmp_path: Path) -> None:
    """A file is refused with ConfigError, or every view of it lies within its data."""
    rng = random.Random(2024)
    path = tmp_path / "model.safetensors"
    num_refused = 0
    for _ in range(5000):
        content = mutated_file(rng)
        path.write_bytes(content)
        try:
            with SafetensorsFile(path) as file:
                total = 0
                for name, info in file.tensors.items():
                    with file.view(name) as view:
                        assert len(view) == info.end - info.begin
                        total += len(bytes(view))
                header_size = 8 + int.from_bytes(content[:8], "little")
                assert total == len(content) - header_size
        except ConfigError as error:
            assert len(str(error)) < 1000
            num_refused += 1
        sink = Sink(TENSORS)
        try:
            load_weights(sink, tmp_path)
        except ConfigError:
            assert not sink.loaded  # everything is checked before anything is loaded
    assert 3000 < num_refused < 5000


# ---- Folders -------------------------------------------------------------------------------------


def write_sharded(folder: Path, tensors: dict[str, tuple[str, list[int]]] = TENSORS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    names = list(tensors)
    for index, part in enumerate((names[:2], names[2:])):
        shard = f"model-{index + 1:05}-of-00002.safetensors"
        header, data = build({name: tensors[name] for name in part})
        write(folder / shard, pack(header, data))
        weight_map.update(dict.fromkeys(part, shard))
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def expected_data() -> dict[str, tuple[bytes, str]]:
    result = {}
    for part in (list(TENSORS)[:2], list(TENSORS)[2:]):
        header, data = build({name: TENSORS[name] for name in part})
        for name in part:
            begin, end = header[name]["data_offsets"]
            result[name] = (data[begin:end], TENSORS[name][0])
    return result


def test_sharded_folder(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path)
    sink = Sink(TENSORS)
    load_weights(sink, folder)
    assert sink.loaded == expected_data()
    assert sink.is_finished


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write(tmp_path / "model.safetensors", pack(*build(TENSORS)))
    files = checkpoint_files(tmp_path)
    assert [file.path.name for file in files] == ["model.safetensors"]
    files[0].close()


def test_hugging_face_cache_layout(tmp_path: Path) -> None:
    blobs = write_sharded(tmp_path / "models--q--m" / "blobs")
    snapshot = tmp_path / "models--q--m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(blobs.iterdir())):
        blob = path.rename(blobs / f"blob{index}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    sink = Sink(TENSORS)
    load_weights(sink, snapshot)
    assert sink.loaded == expected_data()
    (tmp_path / "link").symlink_to(snapshot)
    load_weights(Sink(TENSORS), tmp_path / "link")
    # A head that came with the model lies in a folder of the snapshot, its files in the same blobs.
    inner = snapshot / "eagle3"
    inner.mkdir()
    for path in list(snapshot.iterdir()):
        if path.is_symlink():
            (inner / path.name).symlink_to(os.path.relpath(path.resolve(), inner))
    load_weights(Sink(TENSORS), inner)
    (inner / "config.json").symlink_to("../../../../secret.json")
    (tmp_path / "secret.json").touch()
    with pytest.raises(ConfigError, match="outside of the model folder"):
        find_file(inner, "config.json")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside = write_sharded(tmp_path / "elsewhere")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in outside.iterdir():
        (folder / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match="outside of the model folder"):
        load_weights(Sink(TENSORS), folder)
    (folder / "loop.safetensors").symlink_to("loop.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    write_index(folder, {"a": "loop.safetensors"})
    with pytest.raises(ConfigError, match=r"loop\.safetensors"):
        read_index(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../elsewhere/model-00001-of-00002.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "a\\b.safetensors",
        "..",
        ".",
        "",
        "a\0b",
        "a\nb",
        3,
        None,
        ["a"],
    ],
)
def test_shards_are_plain_names(tmp_path: Path, shard: object) -> None:
    write_sharded(tmp_path / "elsewhere")
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, {"a": shard})
    with pytest.raises(ConfigError, match="the name of a file in the same folder"):
        load_weights(Sink(TENSORS), folder)


def test_odd_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_weights(Sink(TENSORS), tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="safe_serialization"):
        load_weights(Sink(TENSORS), tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_weights(Sink(TENSORS), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ConfigError, match="not a regular file"):
        load_weights(Sink(TENSORS), tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, 3, "x"])
def test_bad_weight_map(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(ConfigError, match="weight_map"):
        checkpoint_files(tmp_path)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    names = list(TENSORS)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    right = {names[0]: first, names[1]: first, names[2]: second, names[3]: second}
    write_index(tmp_path, {**right, names[1]: second})
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.*holds model\.norm\.weight"):
        checkpoint_files(tmp_path)
    write_index(tmp_path, {**right, "new": second})
    with pytest.raises(ConfigError, match="lacks new"):
        checkpoint_files(tmp_path)
    write_index(tmp_path, {**right, "new": "model-00003-of-00002.safetensors"})
    with pytest.raises(ConfigError, match=r"does not exist.*places new there"):
        checkpoint_files(tmp_path)


def write_single(folder: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    write(folder / "model.safetensors", pack(*build(tensors)))
    return folder


def test_mismatches_are_named(tmp_path: Path) -> None:
    def message(tensors: dict[str, tuple[str, list[int]]]) -> str:
        sink = Sink(TENSORS)
        with pytest.raises(ConfigError) as caught:
            load_weights(sink, write_single(tmp_path, tensors))
        assert not sink.loaded
        return str(caught.value)

    without = {name: entry for name, entry in TENSORS.items() if name != NORM}
    assert f"missing 1 of 4 expected tensors: {NORM} [4]" in message(without)
    many = message({"scalar": TENSORS["scalar"]})
    assert "missing 3 of 4" in many
    extra = message({**TENSORS, **{f"extra.{i}": ("F32", [1]) for i in range(20)}})
    assert "20 tensors that config.json has no place for: extra.0, " in extra
    assert "and 12 more" in extra
    shape = message({**TENSORS, EMBED: ("BF16", [4, 6])})
    assert f"{EMBED}: expected shape [6, 4] (from config.json), found [4, 6]" in shape
    half = message({**TENSORS, NORM: ("F16", [4])})
    assert f"{NORM}: expected dtype BF16 or F32, found F16; convert" in half


def test_a_tied_model_may_ship_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(TENSORS)
    folder = write_single(tmp_path, {**TENSORS, "lm_head.weight": ("BF16", [6, 4])})
    with caplog.at_level(logging.INFO):
        load_weights(sink, folder)
    assert set(sink.loaded) == set(TENSORS)
    assert "lm_head.weight is ignored" in caplog.text


def test_an_error_in_the_runner_passes_and_unmaps(tmp_path: Path) -> None:
    class Broken(Sink):
        def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
            raise MemoryError("no")

    with pytest.raises(MemoryError):
        load_weights(Broken(TENSORS), write_single(tmp_path, TENSORS))
