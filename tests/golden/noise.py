"""The noise of a sampled choice, in plain integers and doubles.

Philox4x32-10 (Salmon et al., 2011) keyed by the seed, counting places and token ids; a choice is
the largest logit / temperature + noise.
"""

from __future__ import annotations

import math

WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four words of noise."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (second >> 32) ^ b ^ k, second & WORD, (first >> 32) ^ d ^ m, first & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d


def gumbel(seed: int, position: int, token: int) -> float:
    """Of the token at the place `position`, from 0, of a sequence."""
    block, offset = divmod(token, 64)
    seed %= 1 << 64
    words = philox((16 * block + offset % 16, position, 0, 0), (seed & WORD, seed >> 32))
    uniform = (words[offset // 16] + 0.5) / 2**32
    return -math.log(-math.log(uniform))
