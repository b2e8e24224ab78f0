"""The draft vocabulary for other texts: rows that are seldom drafted give way, without a gradient.

A row of a token that was not drafted before is what a ridge regression makes of the target's own LM
head; it is fitted on the tokens that both have. Counts of the traffic are mixed with those of base
texts: chosen by the traffic alone, a vocabulary ruins everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from openspec.adapt.heads.parts import HeadKind, HeadPlan, TargetEnds, VocabularyHead
from openspec.adapt.texts import Text

CHANGED = (32, 10)  # one row of so many: a few of them may be better than many
TRAFFIC_SHARE = 0.7
RIDGE = 1e-2  # of the mean square of the target's rows, by column


def shares(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """Of each token, among those that the target wrote; zeros without texts, [vocab_size]."""
    written = [token for text in texts for token in text.tokens[text.prompt :]]
    counts = torch.bincount(torch.tensor(written, dtype=torch.long), minlength=vocab_size).double()
    return counts / max(1, len(written))


def coverage(vocabulary: Tensor, traffic: Tensor) -> float:
    """Share of the traffic's tokens that can be drafted at all."""
    return float(traffic[vocabulary.cpu()].sum())


def chosen(vocabulary: Tensor, traffic: Tensor, base: Tensor, most: int) -> Tensor:
    """A vocabulary of the same size for the mixture, at most `most` rows of it new, rising."""
    weight = TRAFFIC_SHARE if float(base.sum()) else 1.0
    mixed = weight * traffic + (1 - weight) * base
    has = torch.zeros(len(mixed), dtype=torch.bool)
    has[vocabulary] = True
    new = mixed.masked_fill(has, -1.0).topk(min(most, len(mixed) - len(vocabulary))).indices
    old = vocabulary[mixed[vocabulary].argsort(stable=True)[: len(new)]]
    better = mixed[new] > mixed[old]  # the best new one against the worst old one, and so on
    has[old[better]], has[new[better]] = False, True
    return has.nonzero()[:, 0]


def with_vocabulary(
    head: VocabularyHead, kind: HeadKind, plan: HeadPlan, vocabulary: Tensor, ends: TargetEnds
) -> VocabularyHead:
    """The same head for another vocabulary of the same size; `plan` is what it was made from."""
    old, rows = head.vocabulary, head.lm_head.weight.detach().float()
    known = ends.head[old].float()
    ridge = RIDGE * known.square().mean() * len(known)
    gram = known.T @ known + ridge * torch.eye(known.shape[1], device=known.device)
    every = ends.head[vocabulary.to(old.device)].float() @ torch.linalg.solve(gram, known.T @ rows)
    place = torch.full((len(ends.head),), -1, device=old.device)
    place[old] = torch.arange(len(old), device=old.device)
    at = place[vocabulary.to(old.device)]
    every[at >= 0] = rows[at[at >= 0]]
    made = kind.make(dataclasses.replace(plan, vocabulary=vocabulary.cpu()))
    assert isinstance(made, VocabularyHead)
    made.learn_for(head.most_drafts)
    made.load_state_dict({**head.state_dict(), "lm_head.weight": every})
    return made.to(old.device)
