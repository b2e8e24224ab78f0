"""Inputs and the brute-force answer for ngram_lookup, shared by the CPU and the CUDA tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LookupOptions:
    max_drafts: int
    ngram_min: int = 1
    ngram_max: int = 4
    max_lookback: int = 4096
    earliest: bool = False


def brute_force(
    history: list[int], num_wanted: int, options: LookupOptions
) -> tuple[list[int], int]:
    """Drafts and match length by the definition: every length, every occurrence."""
    window = history[-options.max_lookback :]
    if num_wanted == 0:
        return [], 0
    for length in range(min(options.ngram_max, len(window) - 1), options.ngram_min - 1, -1):
        suffix = window[-length:]
        ends = [e for e in range(length, len(window)) if window[e - length : e] == suffix]
        if not ends:
            continue
        end = ends[0] if options.earliest else ends[-1]
        text = list(window)
        for i in range(num_wanted):
            text.append(text[end + i])
        return text[len(window) :], length
    return [], 0


def batch(histories: list[list[int]], *, spare: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens by slot ([num_slots, stride], a lure past the end of each history) and lengths."""
    stride = max(len(h) for h in histories) + spare
    tokens = torch.full((len(histories), stride), -7, dtype=torch.int32)
    for slot, history in enumerate(histories):
        tokens[slot, : len(history)] = torch.tensor(history, dtype=torch.int32)
        # What would match if the length were ignored.
        tokens[slot, len(history) :] = history[-1] if history else 0
    return tokens, torch.tensor([len(h) for h in histories], dtype=torch.int32)


def random_history(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Random tokens with copied stretches, so that long matches, ties and overlaps occur."""
    history: list[int] = []
    while len(history) < length:
        if len(history) > 4 and rng.random() < 0.4:
            begin = rng.randrange(len(history))
            # May run past the end: a periodic stretch.
            for i in range(rng.randrange(1, 12)):
                history.append(history[begin + i])
        else:
            history.append(rng.randrange(vocab_size))
    return history[:length]


def random_case(
    rng: random.Random, *, max_len: int = 200
) -> tuple[list[list[int]], list[int], list[int], LookupOptions]:
    """Histories by slot, slots to look up (some twice, some not), drafts wanted, options."""
    histories = [
        random_history(rng, rng.randrange(max_len + 1), rng.choice([1, 2, 3, 5, 50]))
        for _ in range(rng.randrange(1, 9))
    ]
    seq = [rng.randrange(len(histories)) for _ in range(rng.randrange(0, 9))]
    ngram_min = rng.randrange(1, 5)
    options = LookupOptions(
        max_drafts=rng.randrange(0, 20),
        ngram_min=ngram_min,
        ngram_max=ngram_min + rng.randrange(0, 6),
        max_lookback=rng.choice([1, 2, 3, 7, 50, 150, 4096]),
        earliest=rng.random() < 0.5,
    )
    num_wanted = [rng.randrange(options.max_drafts + 1) for _ in seq]
    return histories, seq, num_wanted, options
