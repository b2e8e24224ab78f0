"""What some block heads have more: convolutions along the block, and a selector of candidates."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SELECTOR_SHARE = 1.0  # of the selector's loss beside that of all tokens, as speculators has it


class BlockConv(nn.Module):
    """Two convolutions, of what goes in and of what comes out; at first they change nothing."""

    def __init__(self, hidden_size: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, hidden_size))  # [side, tap, channel]
        self.kernel_projection = nn.Linear(hidden_size, 4 * hidden_size // group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1

    def taps(self, x: Tensor) -> Tensor:
        """Coefficients [..., side, tap, hidden] of both, from normed rows [..., hidden]."""
        own: Tensor = self.kernel_projection(x).unflatten(-1, (2, 2, -1))
        return self.base_kernel + own.repeat_interleave(self.group, -1)

    @staticmethod
    def mix(taps: Tensor, side: int, rows: Tensor) -> Tensor:
        """Rows [..., rows of a block, hidden] with those before them."""
        before = F.pad(rows[..., :-1, :], (0, 0, 1, 0))
        return taps[..., side, 0, :] * rows + taps[..., side, 1, :] * before


class CandidateSelector(nn.Module):
    """Scores of the best tokens of a place behind the token before it."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, num_candidates: int) -> None:
        super().__init__()
        self.num_candidates = num_candidates
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank) * 0.3)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=hidden_size**-0.5)

    def scores(self, state: Tensor, before: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """Of candidates [..., n] of places with these states and logits of all tokens."""
        context = F.embedding(before, self.predecessor_codebook) * self.hidden_projection(state)
        worth: Tensor = (context[..., None, :] * F.embedding(ids, self.successor_codebook)).sum(-1)
        return logits.gather(-1, ids) + worth

    def among_all(self, state: Tensor, before: Tensor, logits: Tensor) -> Tensor:
        """Scores over the vocabulary; tokens that are no candidates have none."""
        ids = logits.topk(self.num_candidates, -1).indices
        none = torch.full_like(logits, -torch.inf)
        return none.scatter(-1, ids, self.scores(state, before, logits, ids).to(logits.dtype))

    def lesson(
        self, state: Tensor, before: Tensor, logits: Tensor, best: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of every place, `best` being the target's token, and the token that is chosen.

        Where the target's is no candidate it takes the last one's place to be learned, never to be
        chosen.
        """
        ids = logits.detach().topk(self.num_candidates, -1).indices
        scores = self.scores(state, before, logits, ids).float()
        chosen = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        is_best = ids == best[..., None]
        is_there = is_best.any(-1)
        injected = self.scores(state, before, logits, best[..., None]).float()
        own = (scores * is_best).sum(-1) + injected[..., 0] * ~is_there
        last = torch.where(is_there, scores[..., -1], injected[..., 0])
        total = torch.cat((scores[..., :-1], last[..., None]), -1).logsumexp(-1)
        return total - own, chosen
