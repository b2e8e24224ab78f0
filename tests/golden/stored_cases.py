"""How cases come into tests/golden/data and out of it, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.heads.seeded import Checkpoint

from .target_reference import forward

Stored = dict[str, Tensor]


def target_says(
    target: Checkpoint, layers: Sequence[int], tokens: list[int]
) -> tuple[list[int], Tensor]:
    """Its choice after every token, and what leaves these layers, side by side."""
    logits, states = forward(*target, tokens)
    return logits.argmax(-1).tolist(), torch.cat([states[layer] for layer in layers], -1)


def verified(chain: list[int], answers: list[int]) -> list[int]:
    """What a verification commits: accepted drafts and the target's own token after them."""
    accepted = 0
    while accepted < len(chain) and chain[accepted] == answers[accepted]:
        accepted += 1
    return answers[: accepted + 1]


def write_cases(data: Path, cases: Iterable[tuple[str, Stored]]) -> None:
    """Writes the file."""
    tensors = {}
    for name, case in cases:
        tensors.update({f"{name}.{key}": value for key, value in case.items()})
        num_prompt = int(case["num_prefilled"])
        print(name, num_prompt, "tokens, committed after the first verification:",
              case["tokens"][num_prompt + 1 :].tolist())  # fmt: skip
    data.parent.mkdir(exist_ok=True)
    save_file(tensors, data)
    data.chmod(0o644)
    print(f"{data}: {data.stat().st_size / 1e3:.0f} kB")


def read_cases(data: Path) -> dict[str, Stored]:
    """By name; a case's tensors by the names in the docstring of what made it."""
    cases: dict[str, Stored] = {}
    for key, value in load_file(data).items():
        name, tensor = key.split(".", 1)
        cases.setdefault(name, {})[tensor] = value
    return cases


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def check_same(made: Stored, stored: Stored) -> None:
    assert made.keys() == stored.keys()
    for key, value in made.items():
        if value.is_floating_point():
            close(value, stored[key])
        else:
            assert torch.equal(value, stored[key])
