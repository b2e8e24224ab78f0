"""The converter, on pickles that are what they should be and on some that are not."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from openspec.checkpoint.draft_model import open_draft_checkpoint
from openspec.errors import ConfigError
from openspec.tools import convert_drafter
from tests.heads.stubs import tensor, write_json, write_safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_json(folder / "config.json", {"draft_vocab_size": 3})
    return folder


def converted(source: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    target = source.parent / "new"
    assert convert_drafter.main([str(source), str(target)]) == 0
    checkpoint = open_draft_checkpoint(target)
    assert checkpoint.keys.get("draft_vocab_size") == 3
    result = {}
    for name, info in checkpoint.tensors.items():
        values = checkpoint.values(name).flatten().view(torch.uint8)
        result[name] = (info.dtype, info.shape, bytes(values.tolist()))
    return result


def test_state_dict(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = torch.tensor([[1.0, -2.0, 0.5], [3.0, 4.0, 5.0]])
    torch.save(
        {
            "fc.weight": weights.half().t(),  # not contiguous
            "norm.weight": weights[0],
            "d2t": torch.tensor([0, 4, 9]),
            "t2d": torch.tensor([True, False, True]),
            "empty": torch.zeros(0, 2),
            "tied": weights,
            "part": weights[:1],
        },
        source / "pytorch_model.bin",
    )
    found = converted(source)
    said = capsys.readouterr().out
    assert "7 tensors" in said and "1 tensors of float16 became bfloat16: largest error 0 " in said
    assert "0 overflows" in said
    assert found["fc.weight"][:2] == ("BF16", (3, 2)) and found["empty"] == ("BF16", (0, 2), b"")
    values = torch.frombuffer(bytearray(found["fc.weight"][2]), dtype=torch.bfloat16)
    assert torch.equal(values.reshape(3, 2).float(), weights.t())
    assert found["norm.weight"][0] == "BF16"
    assert found["d2t"] == ("I64", (3,), b"".join(n.to_bytes(8, "little") for n in (0, 4, 9)))
    assert found["t2d"] == ("BOOL", (3,), b"\1\0\1")


def test_safetensors_of_another_type(source: Path) -> None:
    write_safetensors(
        source / "model.safetensors",
        {"a": ("F16", [2], b"\x00\x3c\x00\xc0"), "b": tensor("I32", [2], 1)},
    )
    found = converted(source)
    assert found["a"] == ("BF16", (2,), b"\x80\x3f\x00\xc0")
    assert found["b"] == ("I32", (2,), b"\1" * 8)


def test_a_pickle_beside_safetensors_is_not_opened(source: Path) -> None:
    write_safetensors(source / "model.safetensors", {"a": ("F16", [1], b"\x00\x3c")})
    (source / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert converted(source)["a"] == ("BF16", (1,), b"\x80\x3f")


class Command:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch gotcha",)


def test_code_in_a_pickle_is_not_run(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(source)
    for content in (Command(), {"a": Command()}):
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(content))
        assert convert_drafter.main([str(source), str(source.parent / "new")]) == 2
        shown = capsys.readouterr().err
        assert "torch does not load it as weights only" in shown
        assert "weights_only" not in shown, "no advice to load it with the code in it"
        torch.save(content, source / "pytorch_model.bin")
        assert convert_drafter.main([str(source), str(source.parent / "new")]) == 2
    assert not (source / "gotcha").exists() and not (source.parent / "new").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, device="meta"), "a: expected a dense tensor.* on meta"),
        (lambda: torch.eye(3).to_sparse(), "a: expected a dense tensor.*sparse_coo"),
        (lambda: torch.tensor([1.0, float("nan")]), "a: holds NaN"),
        (lambda: torch.tensor([1.0, float("-inf")]), "a: holds.*infinite in bfloat16"),
        (lambda: torch.tensor([3.4e38]), "a: holds.*infinite in bfloat16"),
    ],
    ids=["meta", "sparse", "nan", "inf", "overflow"],
)
def test_refused_tensors(source: Path, make: Callable[[], Any], message: str) -> None:
    torch.save({"a": make()}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=message):
        convert_drafter.convert(source, source.parent / "new")
    assert not (source.parent / "new").exists()


def test_a_name_that_the_format_keeps(source: Path) -> None:
    torch.save({"__metadata__": torch.zeros(1)}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="__metadata__: a safetensors file has no tensor"):
        convert_drafter.convert(source, source.parent / "new")


def test_shards_are_those_of_the_index(source: Path) -> None:
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    write_json(source / "pytorch_model.bin.index.json", index)
    torch.save({"a": torch.zeros(1)}, source / names[0])
    with pytest.raises(ConfigError, match=r"index\.json names b, which.*finish the download"):
        convert_drafter.convert(source, source.parent / "new")
    torch.save({"b": torch.zeros(1)}, source / names[1])
    assert set(converted(source)) == {"a", "b"}
    write_json(source / "pytorch_model.bin.index.json", {})
    with pytest.raises(ConfigError, match="weight_map: expected an object"):
        convert_drafter.convert(source, source.parent / "newer")


def test_nowhere_to_write(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a": torch.zeros(1)}, source / "pytorch_model.bin")
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for target in (tmp_path / "file" / "new", Path("/proc/new"), tmp_path / "dangling"):
        assert convert_drafter.main([str(source), str(target)]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"error: {target}") and shown.count("\n") == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"source", "file", "dangling"}


@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_is_left_of_a_failure(
    source: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    torch.save({"a": torch.zeros(1)}, source / "pytorch_model.bin")
    new = source.parent / "new"
    if is_there:
        new.mkdir()

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"the first half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(ConfigError, match=r"new: cannot be written: .*No space left"):
            convert_drafter.convert(source, new)
    assert new.exists() == is_there and not (is_there and any(new.iterdir()))
    assert set(converted(source)) == {"a"}
    assert {entry.name for entry in new.iterdir()} == {"config.json", "model.safetensors"}


def test_nothing_to_convert(source: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(ConfigError, match=r"neither pytorch_model\.bin nor model\.safetensors"):
        convert_drafter.convert(source, new)
    torch.save([torch.zeros(1)], source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="expected a mapping of names to tensors"):
        convert_drafter.convert(source, new)
    torch.save({"a": torch.zeros(1, dtype=torch.complex64)}, source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="complex64 has no place in a draft model"):
        convert_drafter.convert(source, new)
    assert not new.exists()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        convert_drafter.convert(source, source)
    with pytest.raises(ConfigError, match=r"draft model folder .*/missing does not exist"):
        convert_drafter.convert(tmp_path / "missing", new)
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        convert_drafter.convert(source, new)
