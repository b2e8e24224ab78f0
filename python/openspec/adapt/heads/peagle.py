"""P-EAGLE heads: EAGLE-3 with an embedding of its own, and masks for what is not known.

Step s of a chain is a mask s places behind the token that the chain began with: its token is the
mask token, and `mask_hidden` stands for the target's states. It sees what the same step of an
EAGLE-3 chain sees, but needs nothing of the steps before it except their entries. All depths of
every position are trained; published recipes sample them, for longer texts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openspec.adapt.heads.eagle3 import KINDS as SEQUENTIAL_KINDS
from openspec.adapt.heads.eagle3 import Eagle3Head
from openspec.adapt.heads.parts import HeadPlan, TargetEnds
from openspec.drafters.eagle3.eagle3_format import PARALLEL


class PEagleHead(Eagle3Head):
    """One layer; the embedding begins as the target's and is trained."""

    most_drafts = 8

    def __init__(self, plan: HeadPlan) -> None:
        super().__init__(plan)
        size = plan.geometry.hidden_size
        self.mask_token = plan.mask_token
        self.embed_tokens = nn.Embedding(plan.geometry.vocab_size, size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(plan.capture_layers) * size))

    def begin_as(self, ends: TargetEnds) -> None:
        """The embedding, too."""
        super().begin_as(ends)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(ends.embedding)

    def embedded(self, tokens: Tensor, ends: TargetEnds) -> Tensor:
        """By the head's own embedding."""
        return F.embedding(tokens, self.embed_tokens.weight)

    def read(self, tokens: Tensor, state: Tensor, ends: TargetEnds) -> tuple[Tensor, Tensor]:
        """A mask at every position, whatever the tokens and the states."""
        masks = torch.full_like(tokens, self.mask_token)
        feature = self.fc(self.mask_hidden).expand(*tokens.shape, -1)
        return self.embedded(masks, ends), feature

    def config(self) -> dict[str, Any]:
        """With the keys that vLLM reads."""
        masks = {"parallel_drafting": True, "ptd_token_id": self.mask_token}
        return {**super().config(), **masks}


KINDS = (replace(SEQUENTIAL_KINDS[0], name=PARALLEL, method=PARALLEL, make=PEagleHead),)
