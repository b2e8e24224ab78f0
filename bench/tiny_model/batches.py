"""Rows of tokens from a corpus: documents drawn group by group, packed end to end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import GROUPS, UNLEARNED

IGNORED = -100  # target of a position without loss
SHARD = 512  # rows packed at a time


class Corpus:
    """The documents of one .npz file, by group."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.tokens = file["tokens"]
            starts, groups = file["starts"].astype(np.int64), file["groups"]
        ends = np.append(starts[1:], len(self.tokens))
        self.spans = {
            name: np.stack((starts, ends), 1)[groups == index]
            for index, name in enumerate(GROUPS)
            if (groups == index).any()
        }

    def size(self, group: str) -> int:
        """Tokens of a group."""
        spans = self.spans[group]
        return int((spans[:, 1] - spans[:, 0]).sum())

    def endless(self, group: str, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The documents of a group in random order, over and over."""
        spans = self.spans[group]
        while True:
            for start, end in spans[rng.permutation(len(spans))]:
                yield self.tokens[start:end]


class Mixture:
    """An endless supply of training rows in which every group has its share of the tokens."""

    def __init__(self, corpus: Corpus, shares: dict[str, float], length: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.length = length
        self.shares = shares
        self.used = dict.fromkeys(shares, 0.0)
        self.supply = {name: corpus.endless(name, self.rng) for name in shares}
        self.passes = dict.fromkeys(shares, 0.0)
        self.sizes = {name: corpus.size(name) for name in shares}

    def shard(self) -> np.ndarray:
        """SHARD rows of length + 1 tokens; a row begins with a document's beginning."""
        rows = np.empty((SHARD, self.length + 1), dtype=np.uint16)
        for row in rows:
            filled = 0
            while filled < len(row):
                group = self._next_group()
                document = next(self.supply[group])[: len(row) - filled]
                row[filled : filled + len(document)] = document
                filled += len(document)
                self.used[group] += len(document)
        self.passes = {name: self.used[name] / self.sizes[name] for name in self.shares}
        return rows[self.rng.permutation(SHARD)]

    def _next_group(self) -> str:
        """The group that lags behind its share most, with a little chance."""
        chance = self.rng.uniform(0.98, 1, len(self.shares))
        lag = {
            name: self.used[name] / share * factor
            for (name, share), factor in zip(self.shares.items(), chance, strict=True)
        }
        return min(lag, key=lag.__getitem__)

    def batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) on the device; the next shard is packed while this one is used."""
        with ThreadPoolExecutor(1) as worker:
            coming = worker.submit(self.shard)
            while True:
                rows, coming = coming.result(), worker.submit(self.shard)
                on_device = torch.from_numpy(rows.astype(np.int32)).to(device)
                for batch in on_device.split(size):
                    yield split_targets(batch)


def held_out_rows(corpus: Corpus, group: str, length: int, count: int) -> np.ndarray:
    """Up to `count` rows of one group, each document cut to a row, padded with unlearned tokens."""
    rows = np.full((count, length + 1), UNLEARNED, dtype=np.uint16)
    at, filled = 0, 0
    for start, end in corpus.spans[group]:
        document = corpus.tokens[start:end][: length + 1]
        if filled + len(document) > length + 1:
            at, filled = at + 1, 0
        if at == count:
            return rows
        rows[at, filled : filled + len(document)] = document
        filled += len(document)
    return rows[: at + 1]


def split_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of marked tokens -> inputs and next-token targets."""
    rows = rows.long()
    ids = rows & (UNLEARNED - 1)
    targets = torch.where(rows >= UNLEARNED, IGNORED, ids)
    return ids[:, :-1], targets[:, 1:]
