"""The converter, on pickles that are what they should be and on some that are not."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from openspec import convert_drafter
from openspec.draft_model import opened_draft_checkpoint
from openspec.errors import ConfigError
from tests.unit.draft_checkpoints import tensor, write_json, write_safetensors

torch = pytest.importorskip("torch")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write_json(folder / "config.json", {"draft_vocab_size": 3})
    return folder


def converted(source: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    target = source.parent / "new"
    assert convert_drafter.main([str(source), str(target)]) == 0
    with opened_draft_checkpoint(target) as checkpoint:
        assert checkpoint.keys.get("draft_vocab_size") == 3
        result = {}
        for name, info in checkpoint.tensors.items():
            with checkpoint.view(name) as view:
                result[name] = (info.dtype, info.shape, bytes(view))
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
        },
        source / "pytorch_model.bin",
    )
    found = converted(source)
    assert "5 tensors" in capsys.readouterr().out
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
