"""Writes data/dflash.safetensors: what the reference drafts for the shipped heads and others.

    python -m tests.golden.make_dflash

One case is a prompt, what the head drafts after it, the verification of its chain by the target
(greedy), and what the head drafts with what was committed; what comes in twos is of these two. Per
case, n being the tokens at the end:

    tokens [n]             prompt, the target's first token, then what the verification committed
    num_prefilled []       prompt tokens
    logits [2, V]          of a block of one draft
    chain_tokens [2, 7]    drafted by a block of seven
    chain_logprobs [2, 7]
    confidences [2, 7]     where there is a confidence head
    path_tokens [2, 7]     where there is a Markov head: after the first draft, each of 64
                           candidates and 32 successors
    tree_tokens [2, 15]    of a block of seven, top_k 4
    tree_parents [2, 15]   -1: the last committed token
    tree_scores [2, 15]    sums of log-probabilities, falling
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.heads import seeded
from tests.heads.seeded import Checkpoint

from .dflash_reference import Context, DFlashReference
from .make_eagle3 import PROMPTS, TINY, load
from .stored_cases import target_says, verified, write_cases

DATA = Path(__file__).parent / "data" / "dflash.safetensors"

Head = TypeVar("Head", bound=DFlashReference)
CHAIN = 7
CANDIDATES, SUCCESSORS = 64, 32
TOP_K, NODES = 4, 15
SHIPPED = ("dflash", "dspark")


class Case(NamedTuple):
    """What a case is made of."""

    target: Checkpoint
    head: Checkpoint
    prompt: list[int]

    def reference(self) -> DFlashReference:
        """The head with its target's tables."""
        config, weights = self.target
        embedding = weights["model.embed_tokens.weight"]
        lm_head = embedding if config["tie_word_embeddings"] else weights["lm_head.weight"]
        return DFlashReference(*self.head, embedding, lm_head, config["num_hidden_layers"])


def drafted(reference: DFlashReference, context: Context, token: int) -> dict[str, Tensor]:
    """All that is drafted after one token."""
    chain = reference.chain(context, token, CHAIN)
    made = {
        "logits": reference.chain(context, token, 1).logits[0],
        "chain_tokens": torch.tensor(chain.tokens),
        "chain_logprobs": chain.logits.log_softmax(-1).amax(-1),
    }
    tree = reference.tree(context, token, CHAIN, TOP_K, NODES)
    made["tree_tokens"] = torch.tensor(tree.tokens)
    made["tree_parents"] = torch.tensor(tree.parents)
    made["tree_scores"] = torch.tensor(tree.scores)
    if chain.confidences:
        made["confidences"] = torch.tensor(chain.confidences)
    if reference.has_markov:
        path = reference.chain(context, token, CHAIN, CANDIDATES, SUCCESSORS)
        made["path_tokens"] = torch.tensor(path.tokens)
    return made


def make(case: Case) -> dict[str, Tensor]:
    """All tensors of one case; names as in the module's docstring."""
    return make_with(case, case.reference(), drafted)


def make_with(
    case: Case, reference: Head, drafted: Callable[[Head, Context, int], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """All tensors of one case; `drafted` returns all that a reference drafts after one token."""
    layers = reference.format.captured_layers

    best, captured = target_says(case.target, layers, case.prompt)
    context = reference.extend(reference.empty(), captured)
    tokens = [*case.prompt, best[-1]]
    first = drafted(reference, context, tokens[-1])

    chain = first["chain_tokens"].tolist()
    best, captured = target_says(case.target, layers, tokens + chain)
    tokens += verified(chain, best[len(tokens) - 1 :])
    captured = captured[: len(tokens) - 1]
    context = reference.extend(context, captured[len(context) :])
    second = drafted(reference, context, tokens[-1])
    return {
        "tokens": torch.tensor(tokens),
        "num_prefilled": torch.tensor(len(case.prompt)),
        **{name: torch.stack((first[name], second[name])) for name in first},
    }


def cases() -> Iterator[tuple[str, Case]]:
    """By name: the shipped heads after three prompts, and a small random one of each kind."""
    target = load(TINY)
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for head in SHIPPED:
        for name, text in PROMPTS.items():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            yield f"{head}_{name}", Case(target, load(TINY / head), ids)
    target = seeded.target()
    for kind in seeded.DFLASH_KINDS:
        prompt = [2 + 7 * i % 250 for i in range(20)]
        yield kind, Case(target, seeded.dflash(kind), prompt)


def main() -> None:
    """Writes the file."""
    write_cases(DATA, ((name, make(case)) for name, case in cases()))


if __name__ == "__main__":
    main()
