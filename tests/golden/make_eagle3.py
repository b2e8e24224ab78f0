"""Writes data/eagle3.safetensors: what the reference drafts for the shipped head and others.

    python -m tests.golden.make_eagle3

One case is a prompt, what the head drafts after it, the verification of its chain by the target
(greedy), the re-extension by what was committed, and what the head drafts then. Per case, with C
captured values per position, H the head's width, n = the tokens at the end:

    tokens [n]             prompt, the target's first token, then what the verification committed
    num_prefilled []       entries made by the prefill: prompt tokens, for position 0 has none
    captured [n-1, C]      the target's states of positions 0.., those of the entries 1..
    states [n-1, H]        the head's output rows, before its final norm
    logits [2, D]          of the last prefilled row and of the last row
    chain_tokens [2, 5]    drafted after each of the two; the target's ids
    chain_logprobs [2, 5]
    tree_tokens [2, 15]    depth 4, top_k 4
    tree_parents [2, 15]   -1: the last committed token
    tree_scores [2, 15]    sums of log-probabilities
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.heads import seeded
from tests.heads.seeded import Checkpoint

from .eagle3_reference import Eagle3Reference, captured_layers
from .stored_cases import target_says, verified, write_cases

TINY = Path(__file__).parents[2] / "python" / "openspec" / "models" / "tiny"
DATA = Path(__file__).parent / "data" / "eagle3.safetensors"

CHAIN = 5
DEPTH, TOP_K, NODES = 4, 4, 15
PROMPTS = {
    "problem": "<|im_start|>user\nTom has 3 red apples and 4 green apples. How many apples does"
    " he have?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nTom has",
    "copy": "<|im_start|>user\nRepeat this: blue river stone 42<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\nblue",
    "code": "def add(a, b):\n    return",
}


def load(folder: Path) -> Checkpoint:
    """A checkpoint in one file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


class Case(NamedTuple):
    """What a case is made of."""

    target: Checkpoint
    head: Checkpoint
    prompt: list[int]

    def reference(self, first: int = 1) -> Eagle3Reference:
        """The head with its target's embeddings."""
        embedding = self.target[1]["model.embed_tokens.weight"]
        return Eagle3Reference(*self.head, embedding=embedding, first=first)


def make(case: Case) -> dict[str, Tensor]:
    """All tensors of one case; names as in the module's docstring."""
    target, head, prompt = case
    reference = case.reference()
    layers = captured_layers(head[0], target[0]["num_hidden_layers"])

    best, captured = target_says(target, layers, prompt)
    tokens = [*prompt, best[-1]]
    states, cache = reference.extend(reference.empty(), tokens[1:], captured)
    drafted = [(reference.chain(cache, states[-1], CHAIN), reference.tree(
        cache, states[-1], DEPTH, TOP_K, NODES))]  # fmt: skip
    num_prefilled = len(cache)

    chain = drafted[0][0].tokens
    best, captured = target_says(target, layers, tokens + chain)
    tokens += verified(chain, best[len(tokens) - 1 :])
    captured = captured[: len(tokens) - 1]
    more, cache = reference.extend(cache, tokens[num_prefilled + 1 :], captured[num_prefilled:])
    states = torch.cat((states, more))
    drafted.append((reference.chain(cache, states[-1], CHAIN), reference.tree(
        cache, states[-1], DEPTH, TOP_K, NODES)))  # fmt: skip
    chains, trees = zip(*drafted, strict=True)
    return {
        "tokens": torch.tensor(tokens),
        "num_prefilled": torch.tensor(num_prefilled),
        "captured": captured.contiguous(),
        "states": states,
        "logits": reference.logits(states[[num_prefilled - 1, -1]]),
        "chain_tokens": torch.tensor([chain.tokens for chain in chains]),
        "chain_logprobs": torch.tensor([chain.logprobs for chain in chains]),
        "tree_tokens": torch.tensor([tree.tokens for tree in trees]),
        "tree_parents": torch.tensor([tree.parents for tree in trees]),
        "tree_scores": torch.tensor([tree.scores for tree in trees]),
    }


def cases() -> Iterator[tuple[str, Case]]:
    """By name: the shipped head after three prompts, and a small random one of each other kind."""
    target, head = load(TINY), load(TINY / "eagle3")
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for name, text in PROMPTS.items():
        yield name, Case(target, head, tokenizer.encode(text, add_special_tokens=False).ids)
    target = seeded.target()
    prompt = [2 + 7 * i % 250 for i in range(20)]
    for dialect in seeded.EAGLE3_DIALECTS:
        yield dialect, Case(target, seeded.eagle3(dialect), prompt)
    for variant in seeded.EAGLE3_VARIANTS:
        yield variant, Case(target, seeded.eagle3_variant(variant), prompt)


def main() -> None:
    """Writes the file."""
    write_cases(DATA, ((name, make(case)) for name, case in cases()))


if __name__ == "__main__":
    main()
