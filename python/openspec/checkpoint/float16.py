"""Weights of float16 as bfloat16, which has fewer digits and a wider range, and what that loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

FLOAT16 = "F16"
"""The format's code."""
CHUNK = 1 << 22


class Float16Weights:
    """Converts tensors, and sums up what a log line says of them.

    Every float16 number, the smallest (6e-8) and the largest (65504) too, has a bfloat16 number
    within 1/256 of it. So only NaN and infinity cannot be held; a model that has them computes NaN.
    """

    def __init__(self) -> None:
        self.num_tensors = 0
        self.largest_error = 0.0
        """Of a weight: |bfloat16 - float16|."""
        self.largest_relative_error = 0.0
        self.num_underflows = 0
        """Numbers that became zero."""

    def convert(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        """The tensor as bfloat16, rounded to nearest; `where` names it in messages.

        Raises:
            ConfigError: it holds NaN, infinity or what bfloat16 would make infinite.
        """
        import torch

        converted = tensor.contiguous().to(torch.bfloat16)
        self.num_tensors += 1
        num_overflows = 0
        given, made = tensor.flatten(), converted.flatten()
        for first in range(0, given.numel(), CHUNK):
            exact, rounded = (one[first : first + CHUNK].float() for one in (given, made))
            num_overflows += rounded.numel() - int(torch.isfinite(rounded).sum())
            errors = (rounded - exact).abs()
            self.largest_error = max(self.largest_error, float(errors.max()))
            relative = (errors / exact.abs()).nan_to_num_(0.0)  # 0 / 0
            self.largest_relative_error = max(self.largest_relative_error, float(relative.max()))
            self.num_underflows += int(((rounded == 0.0) & (exact != 0.0)).sum())
        if num_overflows:
            raise ConfigError(
                f"{where}: {num_overflows} overflows: numbers of float16 that are NaN or infinite "
                "in bfloat16; take another checkpoint, or one that was saved as bfloat16"
            )
        return converted

    def describe(self) -> str | None:
        """What was lost, on one line; None: nothing was converted."""
        if self.num_tensors == 0:
            return None
        return (
            f"{self.num_tensors} tensors of float16 became bfloat16: largest error "
            f"{self.largest_error:.2g} absolute, {self.largest_relative_error:.2%} relative; 0 "
            f"overflows, {self.num_underflows} underflows"
        )
