"""Stage 2: the target's own texts, many at a time, and the rows a head is trained on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ..data import UNLEARNED
from ..model import Layer, TinyConfig, TinyQwen3, rotary_tables, rotate
from ..tokenizer import ADDED_TOKENS, END_OF_TEXT, TURN_END
from .prompts import GROUPS, LIMITS

STOPS = (ADDED_TOKENS[TURN_END], ADDED_TOKENS[END_OF_TEXT])
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # drawn per text
# Share of the generated texts.
SHARES = {
    "problems": 0.40,
    "thinking": 0.20,
    "copy": 0.14,
    "functions": 0.11,
    "python": 0.05,
    "scenes": 0.05,
    "talk": 0.05,
}
ROUND = 64  # lengths of attention are rounded up to this
PREFILL_ROWS = 512  # prompts read at a time


def load_target(folder: Path, device: torch.device, dtype: torch.dtype) -> TinyQwen3:
    """The shipped checkpoint."""
    model = TinyQwen3()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def load_prompts(path: Path) -> dict[str, list[np.ndarray]]:
    """Prompts by group."""
    with np.load(path) as file:
        tokens, starts, groups = file["tokens"], file["starts"].astype(np.int64), file["groups"]
    ends = np.append(starts[1:], len(tokens))
    return {
        name: [tokens[a:b] for a, b in zip(starts[groups == i], ends[groups == i], strict=True)]
        for i, name in enumerate(GROUPS)
    }


@dataclass
class Texts:
    """Prompts with their continuations: row i is tokens[i, :ends[i]], of which prompts[i] given."""

    tokens: Tensor  # [n, length]
    prompts: Tensor  # [n]
    ends: Tensor  # [n]


def pad(prompts: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one matrix and their lengths."""
    lengths = np.array([len(ids) for ids in prompts])
    matrix = np.zeros((len(prompts), lengths.max()), dtype=np.int64)
    for row, ids in zip(matrix, prompts, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(matrix).to(device), torch.from_numpy(lengths).to(device)


class _Cache:
    """Keys and values of all layers, [rows, length, head_dim]: there is one KV head."""

    def __init__(self, model: TinyQwen3, rows: int, length: int) -> None:
        like = model.model.embed_tokens.weight
        shape = (rows, length, model.config.head_dim)
        self.keys = [like.new_zeros(shape) for _ in model.model.layers]
        self.values = [like.new_zeros(shape) for _ in model.model.layers]


def project_heads(layer: Layer, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Rotated queries [..., 4, 128] and keys, and values [..., 128], of rows [..., hidden]."""
    return project_normed(layer, layer.input_layernorm(x), tables)


def project_normed(
    layer: Layer, normed: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Rotated queries [..., 4, 128] and keys, and values [..., 128], of rows already normed."""
    attention = layer.self_attn
    cos, sin = tables
    query = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, cos.shape[-1] * 2)))
    query = rotate(query, (cos.unsqueeze(-2), sin.unsqueeze(-2)))
    key = rotate(attention.k_norm(attention.k_proj(normed)), tables)
    return query, key, attention.v_proj(normed)


def _prefill(model: TinyQwen3, tokens: Tensor, cache: _Cache, first: int) -> None:
    """Fills the cache of rows first.. with a whole prompt each."""
    rows, length = tokens.shape
    tables = rotary_tables(model.config, length, tokens.device)
    x = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers):
        query, key, value = project_heads(layer, x, tables)
        cache.keys[index][first : first + rows, :length] = key
        cache.values[index][first : first + rows, :length] = value
        if index + 1 == len(model.model.layers):
            return  # the last prompt token is read again by the first step
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key[:, None], value[:, None], is_causal=True, enable_gqa=True
        )
        x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))


def attend_heads(
    layer: Layer, x: Tensor, places: Tensor, mask: Tensor, config: TinyConfig
) -> Tensor:
    """A whole layer over packed rows: positions `places`, attention where `mask` [n, t, t] is."""
    cos, sin = rotary_tables(config, places.shape[1], x.device)
    query, key, value = project_heads(layer, x, (cos[places], sin[places]))
    scores = (query.flatten(1, 2) @ key.mT).unflatten(1, query.shape[1:3]).float()
    scores = (scores * key.shape[-1] ** -0.5).masked_fill(~mask[:, :, None], -torch.inf)
    weights = scores.softmax(-1).to(value.dtype)
    x = x + layer.self_attn.o_proj((weights.flatten(1, 2) @ value).view_as(query).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x))


@torch.no_grad()
def generate(
    model: TinyQwen3, prompts: list[np.ndarray], limit: int, temperatures: Tensor
) -> Texts:
    """Continues all prompts; temperature 0 takes the most likely token."""
    device = temperatures.device
    given, lengths = pad(prompts, device)
    rows, longest = given.shape
    total = longest + limit
    tokens = F.pad(given, (0, limit))
    cache = _Cache(model, rows, -(-total // ROUND) * ROUND)
    for first in range(0, rows, PREFILL_ROWS):
        _prefill(model, given[first : first + PREFILL_ROWS], cache, first)
    cos, sin = rotary_tables(model.config, total, device)
    row = torch.arange(rows, device=device)
    at = lengths - 1  # of the token that is read next
    end = lengths + limit
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    stops = torch.tensor(STOPS, device=device)
    places = torch.arange(cache.keys[0].shape[1], device=device)
    warmth = temperatures.clamp(min=1e-6)[:, None]
    for step in range(limit):
        span = min(-(-(longest + step) // ROUND) * ROUND, len(places))
        unseen = (places[:span] > at[:, None])[:, None, :]
        tables = cos[at], sin[at]
        x = model.model.embed_tokens(tokens[row, at])
        for index, layer in enumerate(model.model.layers):
            query, key, value = project_heads(layer, x, tables)
            keys, values = cache.keys[index], cache.values[index]
            keys[row, at], values[row, at] = key, value
            scores = torch.bmm(query, keys[:, :span].mT) * keys.shape[-1] ** -0.5
            weights = scores.masked_fill_(unseen, -torch.inf).softmax(-1)
            mixed = torch.bmm(weights, values[:, :span]).flatten(1)
            x = x + layer.self_attn.o_proj(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = model.logits(model.model.norm(x)).float()
        noise = -torch.empty_like(logits).exponential_().log()
        chosen = (logits / warmth + noise * (temperatures > 0)[:, None]).argmax(-1)
        at += 1
        tokens[row, at] = torch.where(done, tokens[row, at], chosen)
        stopped = ~done & torch.isin(chosen, stops)
        end = torch.where(stopped, at + 1, end)
        done |= stopped
        # A finished text reads its last token again and again; nothing of that is kept.
        at = torch.where(done, end - 1, at)
        if step % 16 == 15 and float(done.float().mean()) > 0.97:
            end = torch.where(done, end, at + 1)
            break
    return Texts(tokens, lengths, end)


def endless_texts(
    model: TinyQwen3, prompts: dict[str, list[np.ndarray]], rows: int, seed: int
) -> Iterator[tuple[str, Texts]]:
    """Batches of texts, each of one group, so that every group has its share."""
    rng = np.random.default_rng(seed)
    device = model.model.embed_tokens.weight.device
    used = dict.fromkeys(SHARES, 0.0)
    order: dict[str, list[int]] = {name: [] for name in SHARES}
    while True:
        group = min(SHARES, key=lambda name: used[name] / SHARES[name])
        while len(order[group]) < rows:
            order[group] += rng.permutation(len(prompts[group])).tolist()
        chosen, order[group] = order[group][:rows], order[group][rows:]
        temperatures = torch.from_numpy(rng.choice(TEMPERATURES, rows)).float().to(device)
        used[group] += rows
        asked = [prompts[group][index] for index in chosen]
        yield group, generate(model, asked, LIMITS[group], temperatures)


def documents_of(texts: Texts) -> Iterator[np.ndarray]:
    """Token ids of each text, what was given marked as unlearned."""
    tokens = texts.tokens.to(torch.int32).cpu().numpy().astype(np.uint16)
    prompts, ends = texts.prompts.tolist(), texts.ends.tolist()
    for row, prompt, end in zip(tokens, prompts, ends, strict=True):
        row[:prompt] |= UNLEARNED
        yield row[:end].copy()


def generate_for(
    model: TinyQwen3, prompts: dict[str, list[np.ndarray]], rows: int, seconds: float, seed: int
) -> tuple[list[np.ndarray], dict[str, int]]:
    """Documents made in about `seconds`, and new tokens per group."""
    begin = time.monotonic()
    documents: list[np.ndarray] = []
    counts = dict.fromkeys(SHARES, 0)
    for group, texts in endless_texts(model, prompts, rows, seed):
        documents += documents_of(texts)
        counts[group] += int((texts.ends - texts.prompts).sum())
        if time.monotonic() - begin > seconds:
            return documents, counts
    raise AssertionError


def pack(documents: list[np.ndarray], length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `length` tokens, documents end to end, and every token's place in its document.

    A document that reaches over the end of a row goes on in no other: a cut-off rest would miss
    its beginning.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    tokens, places, filled = [], [], length
    for index in order:
        document = documents[index][:length]
        if filled + min(len(document), length // 4) > length:
            tokens.append(np.zeros(length, dtype=np.uint16) | UNLEARNED)
            places.append(np.zeros(length, dtype=np.uint16))
            filled = 0
        part = document[: length - filled]
        tokens[-1][filled : filled + len(part)] = part
        places[-1][filled : filled + len(part)] = np.arange(len(part))
        filled += len(part)
    return np.stack(tokens), np.stack(places)
