"""The CUDA kernel against the CPU engine, bit for bit."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch

from openspec import ops
from tests.ops.ngram_lookup_cases import LookupOptions, batch, random_case, random_history

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.has_cuda(), reason="needs a CUDA device and the CUDA build"),
]


def check_equal(
    histories: list[list[int]], seq: list[int], num_wanted: list[int], options: LookupOptions
) -> None:
    tensors = [
        *batch(histories),
        torch.tensor(seq, dtype=torch.int32),
        torch.tensor(num_wanted, dtype=torch.int32),
    ]
    expected = ops.ngram_lookup(*tensors, **asdict(options))
    got = ops.ngram_lookup(*(t.cuda() for t in tensors), **asdict(options))
    for name, e, g in zip(("drafts", "num_drafts", "match_len"), expected, got, strict=True):
        assert g.is_cuda
        assert torch.equal(e, g.cpu()), (name, options)


@pytest.mark.parametrize("seed", range(200))
def test_random_small(seed: int) -> None:
    check_equal(*random_case(random.Random(seed)))


# Around one round of a block (1024 threads, 8 tokens each) and past several.
LENGTHS = [0, 1, 2, 31, 32, 33, 1023, 1024, 1025, 8191, 8192, 8193, 8194, 20_000]


@pytest.mark.parametrize("earliest", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 2, 30, 30_000])
@pytest.mark.parametrize("max_lookback", [1, 1000, 8193, 1 << 20])
def test_lengths(earliest: bool, vocab_size: int, max_lookback: int) -> None:
    rng = random.Random(vocab_size)
    histories = [random_history(rng, length, vocab_size) for length in LENGTHS]
    for ngram_min, ngram_max in [(1, 4), (3, 3), (2, 64)]:
        options = LookupOptions(33, ngram_min, ngram_max, max_lookback, earliest)
        check_equal(histories, list(range(len(LENGTHS))), [33] * len(LENGTHS), options)


def test_no_sequences_and_no_drafts() -> None:
    check_equal([[1, 1]], [], [], LookupOptions(4))
    check_equal([[1, 1]], [0], [0], LookupOptions(0))


def test_more_drafts_than_threads() -> None:
    check_equal([[1, 2, 3, 1, 2, 3]], [0], [3000], LookupOptions(4000))


def test_graph_replay_sees_new_lengths() -> None:
    """Lengths are read on the device: a captured launch follows a growing history."""
    history = random_history(random.Random(1), 600, 3)
    tokens, _ = batch([history])
    tokens = tokens.cuda()
    num_tokens = torch.tensor([100], dtype=torch.int32, device="cuda")
    seq = torch.tensor([0], dtype=torch.int32, device="cuda")
    num_wanted = torch.tensor([8], dtype=torch.int32, device="cuda")
    options = asdict(LookupOptions(8))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.ngram_lookup(tokens, num_tokens, seq, num_wanted, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ops.ngram_lookup(tokens, num_tokens, seq, num_wanted, **options)
    for length in (100, 257, 600):
        num_tokens.fill_(length)
        graph.replay()
        expected = ops.ngram_lookup(
            tokens.cpu(), num_tokens.cpu(), seq.cpu(), num_wanted.cpu(), **options
        )
        for e, g in zip(expected, result, strict=True):
            assert torch.equal(e, g.cpu())


def test_opcheck() -> None:
    tokens, num_tokens = batch([[1, 2, 1, 2], [3, 3, 3]])
    seq = torch.tensor([1, 0], dtype=torch.int32)
    num_wanted = torch.tensor([3, 2], dtype=torch.int32)
    tensors = tuple(t.cuda() for t in (tokens, num_tokens, seq, num_wanted))
    torch.library.opcheck(torch.ops.openspec.ngram_lookup.default, (*tensors, 3, 1, 4, 64, False))
