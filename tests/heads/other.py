"""A head with the form of another one and other numbers, for heads that take each other's place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[str, Tensor], Tensor]


def noisy(_: str, tensor: Tensor) -> Tensor:
    """Numbers of the same size without sense; norms and maps of tokens stay."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
    return (noise * tensor.float().std()).to(tensor.dtype)


def make(source: Path, folder: Path, change: Change = noisy) -> Path:
    """A copy of the checkpoint in `source` with each tensor as `change` has it, by its name."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            changed = {name: change(name, one) for name, one in load_file(path).items()}
            save_file(changed, folder / path.name)
        elif path.is_file():
            shutil.copy(path, folder / path.name)
    return folder
