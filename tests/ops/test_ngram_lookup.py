from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from openspec import ops
from tests.ops.ngram_lookup_cases import LookupOptions, batch, brute_force, random_case


def lookup(
    histories: list[list[int]], num_wanted: int, options: LookupOptions
) -> list[tuple[list[int], int]]:
    tokens, num_tokens = batch(histories)
    drafts, num_drafts, match_len = ops.ngram_lookup(
        tokens,
        num_tokens,
        torch.arange(len(histories), dtype=torch.int32),
        torch.full((len(histories),), num_wanted, dtype=torch.int32),
        **asdict(options),
    )
    return [
        (row[:n], m)
        for row, n, m in zip(drafts.tolist(), num_drafts.tolist(), match_len.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("history", "num_wanted", "options", "drafts", "match_len"),
    [
        # The longest match wins over the more recent one.
        ([1, 2, 3, 9, 3, 8, 1, 2, 3], 2, LookupOptions(4), [9, 3], 3),
        # Among equals the most recent, or the earliest.
        ([5, 6, 5, 7, 5], 1, LookupOptions(4), [7], 1),
        ([5, 6, 5, 7, 5], 1, LookupOptions(4, earliest=True), [6], 1),
        # The copy goes on through the draft: period 2, period 1.
        ([4, 1, 2, 1, 2], 5, LookupOptions(5), [1, 2, 1, 2, 1], 2),
        ([7, 7], 4, LookupOptions(4), [7, 7, 7, 7], 1),
        # Too short a match, nothing to match.
        ([1, 2, 3, 2], 2, LookupOptions(4, ngram_min=2), [], 0),
        ([], 2, LookupOptions(4), [], 0),
        # The occurrence lies before the window.
        ([3, 4, 5, 6, 3], 1, LookupOptions(4, max_lookback=4), [], 0),
    ],
)
def test_by_hand(
    history: list[int],
    num_wanted: int,
    options: LookupOptions,
    drafts: list[int],
    match_len: int,
) -> None:
    assert brute_force(history, num_wanted, options) == (drafts, match_len)
    assert lookup([history], num_wanted, options) == [(drafts, match_len)]


def test_equals_brute_force() -> None:
    for seed in range(300):
        histories, seq, num_wanted, options = random_case(random.Random(seed))
        tokens, num_tokens = batch(histories)
        drafts, num_drafts, match_len = ops.ngram_lookup(
            tokens,
            num_tokens,
            torch.tensor(seq, dtype=torch.int32),
            torch.tensor(num_wanted, dtype=torch.int32),
            **asdict(options),
        )
        assert drafts.shape == (len(seq), options.max_drafts)
        for i, slot in enumerate(seq):
            expected, expected_len = brute_force(histories[slot], num_wanted[i], options)
            padding = [-1] * (options.max_drafts - len(expected))
            assert drafts[i].tolist() == expected + padding, seed
            assert num_drafts[i] == len(expected), seed
            assert match_len[i] == expected_len, seed


def arguments() -> dict[str, object]:
    tokens, num_tokens = batch([[1, 2, 1, 2], [3, 3, 3], [1, 2, 3]])
    return {
        "tokens": tokens,
        "num_tokens": num_tokens,
        "seq": torch.tensor([2, 0, 1], dtype=torch.int32),
        "num_wanted": torch.tensor([3, 2, 1], dtype=torch.int32),
        "max_drafts": 3,
        "ngram_min": 1,
        "ngram_max": 4,
        "max_lookback": 64,
        "earliest": False,
    }


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.openspec.ngram_lookup.default, tuple(arguments().values()))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("tokens", torch.zeros(3, 4), TypeError, "tokens must be int32"),
        ("tokens", torch.zeros(7, 3, dtype=torch.int32).T, ValueError, "contiguous"),
        ("num_tokens", torch.zeros(2, dtype=torch.int32), ValueError, "one entry for each of 3"),
        ("num_tokens", torch.tensor([4, 3, 99]).int(), ValueError, "num_tokens must be in"),
        ("seq", torch.tensor(1).int(), ValueError, "must have 1 dimensions"),
        ("seq", torch.tensor([0, 1, 3]).int(), ValueError, "seq must be in"),
        ("num_wanted", torch.tensor([4, 0, 0]).int(), ValueError, "num_wanted must be in"),
        ("max_drafts", -1, ValueError, "max_drafts must be in"),
        ("max_drafts", 2**31, ValueError, "max_drafts must be in"),
        ("ngram_min", 0, ValueError, "ngram_min must be in"),
    ],
)
def test_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ops.ngram_lookup(**(arguments() | {name: value}))  # type: ignore[arg-type]
