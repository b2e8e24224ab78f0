"""DFlash2 in fp32: convolutions around what a layer does, and drafts chosen among candidates.

Written from the format's description alone, as the reference that it extends.

Around each attention and each MLP stand two convolutions along the block, one for what goes in and
one for what comes out. A channel of a row becomes its own value times one coefficient plus the
value of the row before times another; both coefficients are a learned number of the channel plus a
number that the row's own normed state gives to the channel's group. The first row of a block has no
row before it, and context rows are not convolved.

The candidates of a place are the tokens with the highest logits. A candidate's score behind a token
is its logit plus a product of three vectors: the token's, the candidate's, and one projected from
the state of the place. A sampled request adds the noise of its place to scores over temperature.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .dflash_reference import Chain, Config, Context, DFlashReference, Tree
from .noise import gumbel


@dataclass
class Draw:
    """How a request samples."""

    temperature: float
    seed: int


class DFlash2Reference(DFlashReference):
    """One drafter with its target's embedding and LM head."""

    def __init__(
        self, config: Config, weights: dict[str, Tensor], embedding: Tensor, lm_head: Tensor,
        num_target_layers: int,
    ) -> None:  # fmt: skip
        super().__init__(config, weights, embedding, lm_head, num_target_layers)
        block = config.get("dflash_config", config)
        self.group, self.num_candidates = block["conv_group_size"], block["selector_top_k"]

    def surround(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Both convolutions take their coefficients from what goes in."""
        groups = x.shape[-1] // self.group
        own = self.linear(f"{name}.kernel_projection", x).view(len(x), 2, 2, groups)
        own = own.repeat_interleave(self.group, -1)
        taps = self.weights[f"{name}.base_kernel"] + own  # [rows, in or out, tap, channel]

        def mixed(side: int, rows: Tensor) -> Tensor:
            before = torch.cat((torch.zeros_like(rows[:1]), rows[:-1]))
            return taps[:, side, 0] * rows + taps[:, side, 1] * before

        return mixed(0, x), lambda out: mixed(1, out)

    def scores(
        self, state: Tensor, before: int, place: int, draw: Draw | None
    ) -> tuple[list[int], Tensor]:
        """The candidates of a place, best logits first, and their scores behind a token."""
        logits = self.lm_head @ state
        ids = logits.sort(descending=True, stable=True).indices[: self.num_candidates]
        selector = "candidate_selector"
        context = self.weights[f"{selector}.predecessor_codebook"][before]
        context = context * self.linear(f"{selector}.hidden_projection", state)
        values = logits[ids] + self.weights[f"{selector}.successor_codebook"][ids] @ context
        if draw is not None:
            noise = [gumbel(draw.seed, place, token) for token in ids.tolist()]
            values = values / draw.temperature + torch.tensor(noise)
        return ids.tolist(), values

    def select(
        self, context: Context, token: int, num_drafts: int, draw: Draw | None = None
    ) -> Chain:
        """The best candidate of every place, given the draft before it."""
        tokens, logits = [token], []
        first = len(context) + 1  # the place of the first draft
        for index, state in enumerate(self.block(context, token, num_drafts)):
            ids, values = self.scores(state, tokens[-1], first + index, draw)
            logits.append(self.lm_head @ state)
            tokens.append(ids[int(values.argmax())])
        return Chain(tokens[1:], torch.stack(logits), [])

    def grow(
        self, context: Context, token: int, depth: int, num_children: int, num_nodes: int,
        draw: Draw | None = None,
    ) -> Tree:  # fmt: skip
        """The `num_nodes` paths of the highest score, best first.

        A path's score is the sum of its tokens' log-probabilities among the candidates of their
        places, each behind the token before it. A node has the best `num_children` of them as
        children. Among equal scores the one found earlier comes first.
        """
        states, first = self.block(context, token, depth), len(context) + 1
        found = Tree([], [], [], [])
        waiting: list[tuple[float, int, int, list[tuple[float, int]]]] = []
        order = iter(range(2 * num_nodes + 1))

        def find(parent: int, siblings: list[tuple[float, int]]) -> None:
            above = found.scores[parent] if parent >= 0 else 0.0
            heapq.heappush(waiting, (-above - siblings[0][0], next(order), parent, siblings))

        def children(level: int, before: int) -> list[tuple[float, int]]:
            ids, values = self.scores(states[level], before, first + level, draw)
            best, at = values.log_softmax(-1).sort(descending=True, stable=True)
            pairs = zip(best.tolist(), (ids[i] for i in at.tolist()), strict=True)
            return list(pairs)[:num_children]

        find(-1, children(0, token))
        while waiting and len(found.tokens) < num_nodes:
            negative, _, parent, siblings = heapq.heappop(waiting)
            level = found.depths[parent] + 1 if parent >= 0 else 1
            found.tokens.append(siblings[0][1])
            found.parents.append(parent)
            found.depths.append(level)
            found.scores.append(-negative)
            if len(siblings) > 1:
                find(parent, siblings[1:])
            if level < depth:
                find(len(found.tokens) - 1, children(level, siblings[0][1]))
        return found
