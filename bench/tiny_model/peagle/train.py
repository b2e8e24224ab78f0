"""The P-EAGLE head, trained as the EAGLE-3 head beside it.

    python -m bench.tiny_model.peagle.train --data .tiny/eagle3 --out .tiny/peagle \\
        --generate-seconds 60 --max-seconds 280 --compile

Every position begins a chain of STEPS rows, all depths of which are trained (published recipes
sample them, for longer texts). Writes `head.pt` and `curve.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..eagle3.head import Eagle3Head, Entries
from ..eagle3.train import Lesson, Trainer, arguments, measure, train
from ..model import TinyQwen3
from .head import PEagleHead

STEPS = 8  # rows of a chain, of which all but the first are masks


def begin(
    head: PEagleHead, embedding: Tensor, fields: tuple[Tensor, ...], places: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Step 0 of every position: its sums, states and entries."""
    lesson = Lesson(*fields)
    embedded = F.embedding(lesson.tokens, embedding)
    tables = head.tables(places, places.shape[1] + STEPS)
    state, entries = head.first(embedded, lesson.features, lesson.mask, tables, STEPS - 1)
    none = torch.zeros((), dtype=torch.long, device=places.device)
    return measure(head, state, lesson, places, none), state, tuple(entries)


def go_on(
    head: PEagleHead, embedding: Tensor, fields: tuple[Tensor, ...], places: Tensor,
    state: Tensor, entries: tuple[Tensor, ...], step: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """A mask behind every position; of the states before it none is read."""
    embedded, feature = head.mask_inputs(state)
    tables = head.tables(places + step, places.shape[1] + STEPS)
    state, made = head.further(embedded, feature, Entries(*entries), tables, step)
    return measure(head, state, Lesson(*fields), places, step), state, tuple(made)


class PEagleTrainer(Trainer):
    """The same with masks."""

    num_steps = STEPS
    step_functions: tuple[Any, Any] = (begin, go_on)

    def __init__(self, target: TinyQwen3, vocabulary: Tensor, is_compiled: bool) -> None:
        super().__init__(target, vocabulary, is_compiled)
        with torch.no_grad():
            self.embedding().copy_(target.model.embed_tokens.weight)

    def make_head(self, draft_vocab: int) -> Eagle3Head:
        """With random weights."""
        return PEagleHead(draft_vocab)

    def embedding(self) -> Tensor:
        """The head's own."""
        return cast(PEagleHead, self.head).embed_tokens.weight


def main() -> None:
    """Command line."""
    train(arguments("Trains the P-EAGLE head.", Path(".tiny/peagle")), PEagleTrainer)


if __name__ == "__main__":
    main()
