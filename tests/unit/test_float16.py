"""float16 weights as bfloat16: every number there is, and heads that come as float16."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from openspec.checkpoint.draft_model import is_same_tensor, open_draft_checkpoint
from openspec.checkpoint.float16 import Float16Weights
from openspec.checkpoint.weights import load_weights
from openspec.errors import ConfigError
from tests.heads.stubs import write_draft, write_safetensors
from tests.unit.test_draft_model import DRAFT, TARGET, Sink, draft_model


def all_numbers() -> torch.Tensor:
    """Each finite float16, subnormals too."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16)
    return numbers[torch.isfinite(numbers)]


def test_every_number() -> None:
    numbers = all_numbers()
    assert len(numbers) == 65536 - 2 * 1024
    weights = Float16Weights()
    found = weights.convert(numbers.reshape(2, -1), "all")
    assert found.dtype is torch.bfloat16 and found.shape == (2, len(numbers) // 2)
    exact = numbers.double()
    errors = (found.flatten().double() - exact).abs()
    assert bool((errors <= exact.abs() / 256).all())
    assert weights.largest_error == float(errors.max()) == 128.0
    assert weights.largest_relative_error == pytest.approx(1 / 256, rel=0.02)
    assert weights.num_underflows == 0
    assert weights.describe() == (
        "1 tensors of float16 became bfloat16: largest error 1.3e+02 absolute, 0.39% relative; "
        "0 overflows, 0 underflows"
    )


def test_nothing_to_say() -> None:
    weights = Float16Weights()
    assert weights.describe() is None
    assert weights.convert(torch.zeros(0, 3, dtype=torch.float16), "none").shape == (0, 3)


def test_what_cannot_be_held() -> None:
    numbers = torch.tensor([1.0, float("inf"), float("nan"), -float("inf")], dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"^here: 3 overflows: .*take another checkpoint"):
        Float16Weights().convert(numbers, "here")


def half(shape: list[int], values: torch.Tensor) -> tuple[str, list[int], bytes]:
    return "F16", shape, bytes(values.to(torch.float16).view(torch.uint8).tolist())


def test_a_copy_of_the_targets_tensor_is_known(tmp_path: Path) -> None:
    """Both become the same bfloat16 numbers."""
    values = torch.linspace(-2.0, 2.0, 32).to(torch.bfloat16)
    as_bf16 = ("BF16", [8, 4], bytes(values.view(torch.uint8).tolist()))
    (tmp_path / "target").mkdir()
    write_safetensors(tmp_path / "target" / "model.safetensors", {"embed": as_bf16})
    for tensor, is_copy in ((half([8, 4], values), True), (half([8, 4], values * 1.5), False)):
        head = open_draft_checkpoint(write_draft(tmp_path / "head", {}, {**DRAFT, "e": tensor}))
        assert is_same_tensor(head, "e", tmp_path / "target", "embed") is is_copy


def test_a_head_of_float16_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for the head, none for its target."""
    values = torch.linspace(-1.0, 1.0, 32)
    (tmp_path / "target").mkdir()
    write_safetensors(tmp_path / "target" / "model.safetensors", TARGET)
    tensors = {**DRAFT, "layers.0.fc": half([4, 8], values)}
    head, sink = write_draft(tmp_path / "head", {}, tensors), Sink()
    with caplog.at_level(logging.INFO):
        load_weights(sink, tmp_path / "target", draft_model(head))
    expected = values.to(torch.float16).to(torch.bfloat16)
    assert sink.loaded["draft:fc"] == (bytes(expected.view(torch.uint8).tolist()), "BF16")
    said = [text for text in caplog.messages if "became bfloat16" in text]
    assert len(said) == 1 and said[0].startswith(f"{head}: 1 tensors of float16 became")
