"""An EAGLE-3 head, row by row, in fp32: what the engine's drafter is compared with.

Written from the format alone and for reading, without any code of the engine or of bench. It takes
the three dialects of published heads: classic (`midlayer.*`, target's embeddings, d2t), speculators
(`layers.0.*`, own embeddings, perhaps norm_before_residual) and DeepSpec (any number of captured
states, norms on queries and keys, the whole vocabulary). Layers behind the first one are plain;
their norm before attention is `input_layernorm` or `hidden_norm`. EAGLE-3.1 norms captured states
before fc (each, or all at once) and feeds the normed state back.

An entry joins the token at position p with the target's captured states of position p-1 and is kept
at position p; its output predicts the token at p+1. Position 0 has none. RoPE takes `first` for the
entry at position 1: the engine counts 1, SafeAILab 0; only distances matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]


LEGACY_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def modern(name: str) -> str:
    """A tensor's name in today's dialect."""
    for old, new in LEGACY_NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def captured_layers(config: Config, num_target_layers: int) -> list[int]:
    """The layers after which the target's residual stream is read, in the order of fc's columns."""
    if "target_layer_ids" in config:  # DeepSpec counts layers by what leaves them
        return list(config["target_layer_ids"])
    key = "eagle_aux_hidden_state_layer_ids"
    if key in config.get("eagle_config", {}):  # so does the classic format
        return list(config["eagle_config"][key])
    default = [2, num_target_layers // 2, num_target_layers - 3]
    entering: list[int] = config.get(key, default)  # speculators counts by what they enter
    return [layer - 1 for layer in entering]


@dataclass
class Cache:
    """Keys and values of entries in order, [layers, entries, kv heads, head_dim]."""

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[1]

    def with_entry(self, keys: Tensor, values: Tensor) -> Cache:
        """These entries and one more, [layers, kv heads, head_dim]."""
        return Cache(
            torch.cat((self.keys, keys[:, None]), 1), torch.cat((self.values, values[:, None]), 1)
        )

    def up_to(self, count: int) -> Cache:
        """The first `count` entries."""
        return Cache(self.keys[:, :count], self.values[:, :count])


@dataclass
class Chain:
    """Drafts in a row: token i was drawn from logits[i], the output of states[i]."""

    tokens: list[int]
    logprobs: list[float]
    states: Tensor  # [drafts, hidden], before the final norm
    logits: Tensor  # [drafts, draft vocabulary]


@dataclass
class Tree:
    """Nodes, parents before children; parent -1 is the last committed token."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]  # 1 for the root's children
    scores: list[float]  # sum of log-probabilities from the root


class Eagle3Reference:
    """One head; `embedding` is the target's, for heads that bring none."""

    def __init__(
        self, config: Config, weights: dict[str, Tensor], embedding: Tensor, first: int = 1
    ) -> None:
        layer = config.get("transformer_layer_config", config)
        self.weights = {
            modern(name): tensor if tensor.dtype in (torch.bool, torch.int64) else tensor.float()
            for name, tensor in weights.items()
        }
        self.embedding = self.weights.get("embed_tokens.weight", embedding).float()
        self.num_heads = layer["num_attention_heads"]
        self.num_kv_heads = layer["num_key_value_heads"]
        self.head_dim = layer["head_dim"]
        self.eps = layer["rms_norm_eps"]
        self.rope_theta = layer["rope_theta"]
        self.is_normed_before_residual = config.get("norm_before_residual", False)
        self.feeds_normed_state_back = config.get("norm_output", False)
        self.num_layers = layer.get("num_hidden_layers", 1)
        types = layer.get("layer_types") or ["full_attention"] * self.num_layers
        self.windows = [
            layer["sliding_window"] if kind == "sliding_attention" else None for kind in types
        ]
        self.first = first

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm over the last axis."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x @ W^T."""
        return x @ self.weights[f"{name}.weight"].T

    def rope(self, x: Tensor, entry: int) -> Tensor:
        """Rotates [heads, head_dim] of the entry with this index, counted from 0."""
        half = self.head_dim // 2
        frequency = self.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = (entry + self.first) * frequency
        left, right = x[:, :half], x[:, half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), 1)

    def empty(self) -> Cache:
        """No entries."""
        none = torch.zeros(self.num_layers, 0, self.num_kv_heads, self.head_dim)
        return Cache(none, none)

    def row(self, token: int, state: Tensor, entry: int, seen: Cache) -> tuple[Tensor, Cache]:
        """One forward pass of one row: its new state, and the cache with its entry.

        `state` is [hidden]: fc of the captured states, or the state of an earlier row. `seen` holds
        what the row may look at apart from itself.
        """
        normed = self.norm("layers.0.hidden_norm", state)
        x = torch.cat((self.norm("layers.0.input_layernorm", self.embedding[token]), normed))
        if self.is_normed_before_residual:
            state = normed
        keys, values = [], []
        for i in range(self.num_layers):
            at = f"layers.{i}"
            if i > 0:
                is_plain = f"{at}.input_layernorm.weight" in self.weights
                x = self.norm(f"{at}.{'input_layernorm' if is_plain else 'hidden_norm'}", state)
            mixed, key, value = self.attention(i, x, entry, seen)
            keys.append(key)
            values.append(value)
            state = state + self.linear(f"{at}.self_attn.o_proj", mixed)
            x = self.norm(f"{at}.post_attention_layernorm", state)
            gate, up = (self.linear(f"{at}.mlp.{part}_proj", x) for part in ("gate", "up"))
            state = state + self.linear(f"{at}.mlp.down_proj", F.silu(gate) * up)
        return state, seen.with_entry(torch.stack(keys), torch.stack(values))

    def attention(
        self, layer: int, x: Tensor, entry: int, seen: Cache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads put out, and the row's own key and value."""
        at = f"layers.{layer}.self_attn"
        query = self.linear(f"{at}.q_proj", x).view(self.num_heads, self.head_dim)
        key = self.linear(f"{at}.k_proj", x).view(self.num_kv_heads, self.head_dim)
        value = self.linear(f"{at}.v_proj", x).view(self.num_kv_heads, self.head_dim)
        if f"{at}.q_norm.weight" in self.weights:
            query = self.norm(f"{at}.q_norm", query)
            key = self.norm(f"{at}.k_norm", key)
        query, key = self.rope(query, entry), self.rope(key, entry)
        keys = torch.cat((seen.keys[layer], key[None]))
        values = torch.cat((seen.values[layer], value[None]))
        window = self.windows[layer]
        if window is not None:  # itself and window - 1 before it
            keys, values = keys[-window:], values[-window:]
        group = self.num_heads // self.num_kv_heads
        mixed = []
        for head in range(self.num_heads):
            scores = keys[:, head // group] @ query[head] * self.head_dim**-0.5
            mixed.append(scores.softmax(0) @ values[:, head // group])
        return torch.cat(mixed), key, value

    def fed_back(self, state: Tensor) -> Tensor:
        """What the next row takes for captured states of its own."""
        return self.norm("norm", state) if self.feeds_normed_state_back else state

    def feature(self, captured: Tensor) -> Tensor:
        """fc of the target's states side by side, normed before where the head does that."""
        captured = captured.float()
        if "input_norm.weight" in self.weights:
            captured = self.norm("input_norm", captured)
        if "fc_norm.0.weight" in self.weights:
            slices = captured.split(self.weights["fc_norm.0.weight"].shape[0])
            captured = torch.cat([self.norm(f"fc_norm.{i}", one) for i, one in enumerate(slices)])
        return self.linear("fc", captured)

    def extend(self, cache: Cache, tokens: list[int], captured: Tensor) -> tuple[Tensor, Cache]:
        """Entries of real tokens: captured[i] are the states of the position before tokens[i].

        Both prefill and the extension after a verification. Returns the states of all rows.
        """
        states = []
        for token, features in zip(tokens, captured, strict=True):
            state, cache = self.row(token, self.feature(features), len(cache), cache)
            states.append(state)
        return torch.stack(states), cache

    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        return self.linear("lm_head", self.norm("norm", state))

    def token(self, draft: int) -> int:
        """The target's id of a draft id: d2t holds differences."""
        return draft + int(self.weights["d2t"][draft]) if "d2t" in self.weights else draft

    def best(self, state: Tensor, count: int) -> tuple[list[int], list[float]]:
        """The most likely tokens and their log-probabilities; the smaller id first among equals."""
        logprobs = self.logits(state).log_softmax(-1)
        values, drafts = logprobs.sort(descending=True, stable=True)
        return [self.token(int(d)) for d in drafts[:count]], values[:count].tolist()

    def chain(self, cache: Cache, state: Tensor, num_drafts: int) -> Chain:
        """Drafts after the row whose state this is; `cache` ends with that row and stays as is."""
        tokens: list[int] = []
        logprobs: list[float] = []
        states = [state]
        while True:
            (token,), (logprob,) = self.best(states[-1], 1)
            tokens.append(token)
            logprobs.append(logprob)
            if len(tokens) == num_drafts:
                break
            state, cache = self.row(token, self.fed_back(states[-1]), len(cache), cache)
            states.append(state)
        all_states = torch.stack(states)
        return Chain(tokens, logprobs, all_states, self.logits(all_states))

    def tree(self, cache: Cache, state: Tensor, depth: int, top_k: int, num_nodes: int) -> Tree:
        """EAGLE-2's tree: at every level the best `top_k` nodes get `top_k` children each.

        `depth` counts levels of nodes, so the head runs depth - 1 times after the row of `state`.
        Of all nodes ever made, the `num_nodes` of the highest score stay, in the order in which
        they were made; among equal scores the earlier made wins, which keeps parents.
        """
        tokens, logprobs = self.best(state, top_k)
        parents, depths, scores = [-1] * top_k, [1] * top_k, logprobs
        made = {-1: (state, cache)}  # of a node: its state and what its children see
        frontier = list(range(top_k))
        for level in range(2, depth + 1):
            new: list[int] = []
            for node in frontier:
                before, seen = made[parents[node]]
                entry = len(cache) + level - 2
                made[node] = self.row(tokens[node], self.fed_back(before), entry, seen)
                children, logprobs = self.best(made[node][0], top_k)
                new += range(len(tokens), len(tokens) + top_k)
                tokens = tokens + children
                scores = scores + [scores[node] + logprob for logprob in logprobs]
                parents += [node] * top_k
                depths += [level] * top_k
            frontier = sorted(new, key=lambda node: (-scores[node], node))[:top_k]
        kept = sorted(range(len(tokens)), key=lambda node: (-scores[node], node))[:num_nodes]
        kept.sort()
        place = {node: index for index, node in enumerate(kept)} | {-1: -1}
        return Tree(
            [tokens[node] for node in kept],
            [place[parents[node]] for node in kept],
            [depths[node] for node in kept],
            [scores[node] for node in kept],
        )
