"""The P-EAGLE head: the EAGLE-3 head with an embedding of its own, and masks for what is not known.

Step s of a chain is a mask s places behind the token that the chain began with: its token is MASK,
and `mask_hidden` stands for the target's states. It sees what the same step of an EAGLE-3 chain
sees, but needs nothing of the steps before it except their entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..eagle3.head import AFTER_LAYERS, DRAFT_VOCAB, GEOMETRY, Eagle3Head, head_config
from ..model import TinyConfig

MASK = 4081  # an id of no token, as the block heads have it


class PEagleHead(Eagle3Head):
    """One layer; the embedding begins as the target's and is trained."""

    def __init__(self, draft_vocab: int = DRAFT_VOCAB, config: TinyConfig = GEOMETRY) -> None:
        super().__init__(draft_vocab, config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        states = len(AFTER_LAYERS) * config.hidden_size
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, states))

    def mask_inputs(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding and feature of a mask at every position of `like` [n, t, hidden]."""
        embedded = self.embed_tokens.weight[MASK].expand(*like.shape[:2], -1)
        return embedded, self.fc(self.mask_hidden).expand(*like.shape[:2], -1)


def peagle_config(draft_vocab: int, config: TinyConfig = GEOMETRY) -> dict[str, Any]:
    """config.json, with the keys that vLLM reads."""
    masks = {"parallel_drafting": True, "ptd_token_id": MASK}
    return {**head_config(draft_vocab, config), **masks}
