"""Weights of checkpoint folders: good files as `safetensors` writes them, and hostile ones."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from bench.random_target import PUBLISHED, tensor_shapes

from openspec.checkpoint.folder import find_file
from openspec.checkpoint.weights import (
    SafetensorsFile,
    checkpoint_files,
    is_finite,
    load_weights,
    read_index,
)
from openspec.errors import ConfigError

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1}

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
        num_bytes = SIZES[dtype]
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

    def expected_tensors(self) -> list[tuple[str, list[int]]]:
        return [(name, shape) for name, (_, shape) in self.expected.items()]

    def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
        assert name not in self.loaded
        self.loaded[name] = (bytes(data), dtype)


def raw(tensor: Any) -> bytes:
    return bytes(tensor.flatten().view(torch.uint8).tolist())


def test_the_library_s_own_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = torch.arange(24).reshape(4, 6) - 12.5
    tensors = {
        "bf16": values.to(torch.bfloat16),
        "f16": values.half(),
        "f32": values,
        "i64": torch.arange(-3, 5),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(2.5),
        "one byte": torch.zeros(1, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"k": "v"})
    (file,) = checkpoint_files(tmp_path)
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        found = file.tensor(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert file.tensors[name].shape == tuple(tensor.shape)
        assert raw(found) == raw(tensor)
    assert [
        file.tensors[name].dtype for name in list(tensors)[:5]
    ] == "BF16 F16 F32 I64 BOOL".split()

    expected = {"bf16": ("BF16", [4, 6]), "f32": ("F32", [4, 6]), "scalar": ("F32", [])}
    only = {name: tensors[name] for name in expected}
    save_file(only, tmp_path / "model.safetensors")
    sink = Sink(expected)
    load_weights(sink, tmp_path)
    assert sink.loaded == {
        name: (raw(tensors[name]), dtype) for name, (dtype, _) in expected.items()
    }


def test_dummy_weights_follow_from_a_tensor_s_name_and_shape(tmp_path: Path) -> None:
    shapes = {
        "model.layers.0.mlp.up_proj.weight": ("BF16", [3000, 3000]),  # longer than what is drawn
        "model.layers.1.mlp.up_proj.weight": ("BF16", [3000, 3000]),
        "model.layers.0.self_attn.k_proj.bias": ("BF16", [64]),
        "model.norm.weight": ("BF16", [3000]),
    }
    once, again = Sink(shapes), Sink(dict(reversed(shapes.items())))
    for sink in (once, again):
        load_weights(sink, tmp_path, load_format="dummy")
    assert once.loaded == again.loaded
    matrix, other, bias, norm = (
        torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float()
        for data, _ in once.loaded.values()
    )
    assert len(matrix) == 9_000_000
    assert not torch.equal(matrix, other)
    assert matrix.std() == pytest.approx(1.2 / 3000**0.5, rel=0.01)
    assert abs(matrix.mean()) < 1e-4
    assert 0 < bias.abs().max() <= 0.18
    assert norm.min() >= 0.5
    assert norm.max() <= 1.5


def test_data_need_not_be_aligned(tmp_path: Path) -> None:
    header, data = build({"a": ("BF16", [1]), "b": ("F32", [2])}, metadata=False)
    text = json.dumps(header).encode()
    write(tmp_path / "model.safetensors", pack(text + b" " * (-len(text) % 2 + 1), data))
    sink = Sink({"a": ("BF16", [1]), "b": ("F32", [2])})
    load_weights(sink, tmp_path)
    assert sink.loaded["b"] == (data[2:], "F32")


def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """200 MB on their way to the runner add nothing to the memory that is this process's own."""
    code = """
import sys
import torch  # beforehand, for it takes memory of its own
from openspec.checkpoint.weights import load_weights

def own_bytes():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0]) * 1024

class Sink:
    def expected_tensors(self):
        return [(f"w{i}", [5000, 1000]) for i in range(10)]
    def load_tensor(self, name, data, dtype):
        assert data.readonly and len(data) == 20_000_000
        self.most = max(own_bytes(), self.most)
        self.pages = self.pages + sum(data[3::4096])

sink = Sink()
sink.pages, sink.most = 0, 0
start = own_bytes()
load_weights(sink, sys.argv[1])
assert sink.pages > 0
print(sink.most - start)
"""
    entries = {
        f"w{i}": {
            "dtype": "F32",
            "shape": [5000, 1000],
            "data_offsets": [i * 20_000_000, (i + 1) * 20_000_000],
        }
        for i in range(10)
    }
    ones = b"\0\0\x80\x3f" * 5_000_000
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(pack(entries, ones))
        for _ in range(9):
            file.write(ones)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 10_000_000


def test_is_finite() -> None:
    for values, expected in (([], True), ([1.0], True), ([1.0, float("nan")], False)):
        assert is_finite(torch.tensor(values)) is expected
    assert not is_finite(torch.tensor([0.0, float("-inf"), 1.0], dtype=torch.bfloat16))


BASE, BASE_DATA = build(TENSORS)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, name: {**BASE[name], **changes}}


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        pack(BASE, BASE_DATA, 2**63),
        pack(BASE, BASE_DATA, 2**64 - 1),
        pack(BASE, BASE_DATA, 100_000_000),
        pack(BASE, BASE_DATA, 100_000_001),
        pack(b"[]", b""),
        pack(b" {}", b""),
        pack(b"{", b""),
        pack(b'{"a":\xff}', b""),
        pack(b'{"a":1,"a":1}', b""),
        pack(b'{"a":{"dtype":"U8","dtype":"U8"}}', b""),
        pack(b'{"a":' + b"[" * 100_000, b""),
        pack(b'{"a":' + b"9" * 10_000 + b"}", b""),
        pack(b'{"a":NaN}', b""),
        pack({"a": 3}, b""),
        pack({"__metadata__": {"a": 1}}, b""),
        pack({"__metadata__": []}, b""),
        pack(changed(NORM, dtype="F31"), BASE_DATA),
        pack(changed(NORM, dtype=None), BASE_DATA),
        pack(changed(NORM, dtype="BF16"), BASE_DATA),
        pack(changed(NORM, shape=[5]), BASE_DATA),
        pack(changed(NORM, shape=[-4]), BASE_DATA),
        pack(changed(NORM, shape=[4.0]), BASE_DATA),
        pack(changed(NORM, shape=[True]), BASE_DATA),
        pack(changed(NORM, shape="4"), BASE_DATA),
        pack(changed(NORM, shape=[2**62, 4]), BASE_DATA),
        pack(changed(NORM, shape=[2**40, 2**40, 0]), BASE_DATA),
        pack(changed(NORM, shape=[2**32, 2**32 + 1]), BASE_DATA),
        pack(changed(NORM, shape=[1] * 99), BASE_DATA),
        pack(changed(NORM, data_offsets=[48]), BASE_DATA),
        pack(changed(NORM, data_offsets=[64, 48]), BASE_DATA),
        pack(changed(NORM, data_offsets=[-16, 0]), BASE_DATA),
        pack(changed(NORM, data_offsets=[2**63, 2**63 + 16]), BASE_DATA),
        pack(changed(NORM, data_offsets=[56, 72]), BASE_DATA),
        pack(changed(NORM, data_offsets=[47, 63]), BASE_DATA),
        pack(changed(NORM, data_offsets=[49, 65]), BASE_DATA),
        pack(BASE, BASE_DATA + b"x"),
        pack(BASE, BASE_DATA[:-1]),
        pack({}, b"x"),
        pack({"a\nb" * 999: 3}, b""),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "x.safetensors", content)
    with pytest.raises(ConfigError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message) < 600
    assert "\n" not in message


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b' {"a":%s}', "expected a JSON object"),
        (b'{"a":%s,"a":%s}', '"a" appears twice'),
    ],
)
def test_what_the_library_takes_and_we_do_not(tmp_path: Path, header: bytes, message: str) -> None:
    entry = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = header % ((entry,) * header.count(b"%"))
    with pytest.raises(ConfigError, match=message):
        SafetensorsFile(write(tmp_path / "x.safetensors", pack(text, b"x")))


def test_empty_header_and_padding_are_fine(tmp_path: Path) -> None:
    assert not SafetensorsFile(write(tmp_path / "a", pack({}, b""))).tensors
    padded = json.dumps(BASE).encode() + b"     "
    assert SafetensorsFile(write(tmp_path / "b", pack(padded, BASE_DATA))).tensors


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


@pytest.mark.slow
def test_fuzz_only_config_errors(tmp_path: Path) -> None:
    """A file is refused with ConfigError, or its tensors cover its data."""
    rng = random.Random(2024)
    path = tmp_path / "model.safetensors"
    num_refused = 0
    for _ in range(5000):
        content = mutated_file(rng)
        path.write_bytes(content)
        try:
            file = SafetensorsFile(path)
            total = sum(file.tensor(name).nbytes for name in file.tensors)
            assert total == len(content) - 8 - int.from_bytes(content[:8], "little")
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


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write(tmp_path / "model.safetensors", pack(*build(TENSORS)))
    files = checkpoint_files(tmp_path)
    assert [file.path.name for file in files] == ["model.safetensors"]


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
        checkpoint_files(folder)


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


def test_experts_stored_together(tmp_path: Path) -> None:
    """As transformers holds them: each expert has its tensors, by any way of reading them."""
    at = "model.layers.0.mlp.experts."
    fused = {f"{at}gate_up_proj": ("BF16", [3, 4, 5]), f"{at}down_proj": ("BF16", [3, 5, 2])}
    others = {f"{at}9.down_proj": ("BF16", [2, 3, 4]), "x.mlp.experts.down_proj": ("F32", [4])}
    header, data = build({**fused, **others, f"{at}down_proj_scale_inv": ("F32", [3, 1, 2])})
    write(tmp_path / "model-1.safetensors", pack(header, data))
    write_index(tmp_path, dict.fromkeys(set(header) - {"__metadata__"}, "model-1.safetensors"))
    (file,) = checkpoint_files(tmp_path)
    whole = safetensors.torch.load_file(tmp_path / "model-1.safetensors")
    shapes = {name: info.shape for name, info in file.tensors.items()}
    assert all(shapes.pop(name) == tuple(shape) for name, (_, shape) in others.items())
    for expert in range(3):
        gate, up = whole[f"{at}gate_up_proj"][expert].chunk(2)
        parts = {"gate_proj.weight": gate, "up_proj.weight": up}
        parts["down_proj.weight"] = whole[f"{at}down_proj"][expert]
        parts["down_proj.weight_scale_inv"] = whole[f"{at}down_proj_scale_inv"][expert]
        for part, expected in parts.items():
            name = f"{at}{expert}.{part}"
            assert shapes.pop(name) == tuple(expected.shape)
            assert bytes(file.data(name)) == raw(expected.contiguous())
            assert raw(file.tensor(name).contiguous()) == raw(expected.contiguous())
    assert not shapes


def test_index_of_many_experts(tmp_path: Path) -> None:
    """All names of Qwen3-30B-A3B, within a second."""
    names = [name for name, _ in tensor_shapes(PUBLISHED["qwen3-30b-a3b"])]
    write_index(tmp_path, dict.fromkeys(names, "model.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    began = time.process_time()
    assert len(read_index(index, index)["model.safetensors"]) == len(names) == 18867
    assert time.process_time() - began < 1.0


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    names = list(TENSORS)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    right = {names[0]: first, names[1]: first, names[2]: second, names[3]: second}
    write_index(tmp_path, {**right, names[1]: second})
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.*holds model\.norm\.weight.*anew"):
        checkpoint_files(tmp_path)
    write_index(tmp_path, {**right, "new": second})
    with pytest.raises(ConfigError, match=r"lacks new.*get both anew"):
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
    eighth = message({**TENSORS, NORM: ("F8_E4M3", [4])})
    assert f"{NORM} is F8_E4M3, but neither config.json nor hf_quant_config.json says" in eighth
    # Also where its scale has no place.
    assert message({**TENSORS, NORM: ("F8_E4M3", [4]), "scale": ("F32", [1])}) == eighth


def test_a_tied_model_may_ship_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(TENSORS)
    folder = write_single(tmp_path, {**TENSORS, "lm_head.weight": ("BF16", [6, 4])})
    with caplog.at_level(logging.INFO):
        load_weights(sink, folder)
    assert set(sink.loaded) == set(TENSORS)
    assert "lm_head.weight is ignored" in caplog.text


def test_an_error_in_the_runner_passes(tmp_path: Path) -> None:
    class Broken(Sink):
        def load_tensor(self, name: str, data: memoryview, dtype: str) -> None:
            raise MemoryError("no")

    with pytest.raises(MemoryError):
        load_weights(Broken(TENSORS), write_single(tmp_path, TENSORS))
