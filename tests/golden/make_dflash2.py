"""Writes data/dflash2.safetensors: what the reference drafts for random heads of both formats.

    python -m tests.golden.make_dflash2

A case is what make_dflash.py says of one, without confidences and paths: logits are those of the
candidates' choice, without what the selector adds, and chains and trees are the selector's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.heads import seeded

from .dflash2_reference import DFlash2Reference
from .dflash_reference import Context
from .make_dflash import CHAIN, NODES, TOP_K, Case, make_with
from .stored_cases import write_cases

DATA = Path(__file__).parent / "data" / "dflash2.safetensors"


def reference_of(case: Case) -> DFlash2Reference:
    """The head with its target's tables."""
    config, weights = case.target
    embedding = weights["model.embed_tokens.weight"]
    lm_head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
    return DFlash2Reference(*case.head, embedding, lm_head, config["num_hidden_layers"])


def drafted(reference: DFlash2Reference, context: Context, token: int) -> dict[str, Tensor]:
    """All that is drafted after one token."""
    chain = reference.select(context, token, CHAIN)
    tree = reference.grow(context, token, CHAIN, TOP_K, NODES)
    return {
        "logits": reference.select(context, token, 1).logits[0],
        "chain_tokens": torch.tensor(chain.tokens),
        "tree_tokens": torch.tensor(tree.tokens),
        "tree_parents": torch.tensor(tree.parents),
        "tree_scores": torch.tensor(tree.scores),
    }


def make(case: Case) -> dict[str, Tensor]:
    """All tensors of one case."""
    return make_with(case, reference_of(case), drafted)


def cases() -> Iterator[tuple[str, Case]]:
    """By name: a small random head of each format."""
    target = seeded.target()
    for name in seeded.DFLASH2_FORMATS:
        prompt = [3 + 11 * i % 250 for i in range(21)]
        yield name, Case(target, seeded.dflash2(name), prompt)


def main() -> None:
    """Writes the file."""
    write_cases(DATA, ((name, make(case)) for name, case in cases()))


if __name__ == "__main__":
    main()
