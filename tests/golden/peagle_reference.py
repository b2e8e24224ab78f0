"""A P-EAGLE head, row by row, in fp32: what the engine's drafter is compared with.

Rows of known tokens are those of an EAGLE-3 head. Behind the last one stand masks: a token of its
own each, and for captured states the parameter `mask_hidden`. Every row sees those before it; the
last known token's row drafts the first token, each mask the next one.
"""

from __future__ import annotations

import heapq
import itertools

import torch
from torch import Tensor

from .eagle3_reference import Cache, Chain, Config, Eagle3Reference, Tree


class PEagleReference(Eagle3Reference):
    """One head; `embedding` is the target's, for heads that bring none."""

    def __init__(
        self, config: Config, weights: dict[str, Tensor], embedding: Tensor, first: int = 1
    ) -> None:
        super().__init__(config, weights, embedding, first)
        names = ("mask_token_id", "ptd_token_id", "pard_token")
        self.mask = next(config[name] for name in names if name in config)
        self.mask_feature = self.feature(self.weights["mask_hidden"].flatten())

    def masked(self, cache: Cache, state: Tensor, num_drafts: int) -> Tensor:
        """States [drafts, hidden] of the last known token's row and of the masks behind it."""
        states = [state]
        while len(states) < num_drafts:
            state, cache = self.row(self.mask, self.mask_feature, len(cache), cache)
            states.append(state)
        return torch.stack(states)

    def chain(self, cache: Cache, state: Tensor, num_drafts: int) -> Chain:
        """The most likely token of every depth, whatever stands before it."""
        states = self.masked(cache, state, num_drafts)
        best = [self.best(one, 1) for one in states]
        tokens = [token for (token,), _ in best]
        return Chain(tokens, [logprob for _, (logprob,) in best], states, self.logits(states))

    def tree(self, cache: Cache, state: Tensor, depth: int, top_k: int, num_nodes: int) -> Tree:
        """The `num_nodes` paths of the highest score, best first.

        A path's score is the sum of its tokens' log-probabilities, each at its own depth. Among
        equal scores the one found earlier comes first.
        """
        levels = [self.best(one, top_k) for one in self.masked(cache, state, depth)]
        found = Tree([], [], [], [])
        order = itertools.count()
        waiting = [(-levels[0][1][0], next(order), -1, 1, 0)]
        while waiting and len(found.tokens) < num_nodes:
            negative, _, parent, level, rank = heapq.heappop(waiting)
            above = found.scores[parent] if parent >= 0 else 0.0
            node = len(found.tokens)
            found.tokens.append(levels[level - 1][0][rank])
            found.parents.append(parent)
            found.depths.append(level)
            found.scores.append(-negative)
            if rank + 1 < top_k:
                score = above + levels[level - 1][1][rank + 1]
                heapq.heappush(waiting, (-score, next(order), parent, level, rank + 1))
            if level < depth:
                score = found.scores[node] + levels[level][1][0]
                heapq.heappush(waiting, (-score, next(order), node, level + 1, 0))
        return found
