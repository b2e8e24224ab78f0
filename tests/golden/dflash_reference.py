"""A block drafter of the DFlash family, in fp32: what the engine's drafter is compared with.

Written from the formats alone and for reading, without any code of the engine or of bench.

A known token at position p has keys and values in every layer, made of the target's captured states
at p alone. A draft is one pass over a block [last token, mask, mask, ...] at the positions that
follow the known ones: its rows see all of them and each other. Where the block's first row only
carries the token ("anchor-drop") row k drafts the k-th token after it; where it drafts as well
("anchor-first") row k - 1 does. A Markov head adds, to the scores at every place, a bias that the
token drafted before it chooses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Config = dict[str, Any]


@dataclass
class Format:
    """What differs between the dialects."""

    captured_layers: list[int]  # the target's residual stream after these, in the order of fc
    block_size: int  # rows of a block as trained
    mask: int
    is_anchor_first: bool
    is_causal: bool  # within the block
    slides: list[bool]  # by layer: it sees the last `window` tokens of the context only
    window: int
    sliding_is_causal: bool  # within the block, in layers that slide
    follows_rows: bool  # whether the window ends with each row, not with the context

    @property
    def num_drafts(self) -> int:
        """Of a whole block."""
        return self.block_size if self.is_anchor_first else self.block_size - 1


def read_format(config: Config, num_target_layers: int) -> Format:
    """z-lab, JetSpec and DeepSpec name a state by the layer it leaves, speculators by the next."""
    block = config.get("dflash_config", config)
    layer = config.get("transformer_layer_config", config)
    count = layer["num_hidden_layers"]
    types = layer.get("layer_types", ["full_attention"] * count)
    window = layer.get("sliding_window") or 0
    if not layer.get("use_sliding_window", False):
        window = 0  # transformers' configuration drops it
    if block.get("use_swa"):
        window = block["swa_window_size"]
        types = ["sliding_attention"] * count
    slides = [kind == "sliding_attention" and window > 0 for kind in types]
    said = {**config, **block}
    is_full = said.get("speculators_model_type") == "dflash2"  # that class's default
    is_causal, sliding_is_causal = False, not said.get("sliding_window_non_causal", is_full)
    for key in ("causal", "is_causal", "causal_head"):
        if key in said:
            is_causal = sliding_is_causal = said[key]
    if "aux_hidden_state_layer_ids" in config:
        layers = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
    else:
        step = (num_target_layers - 4) / max(1, count - 1)
        default = [round(1 + index * step) for index in range(count)]
        if count == 1:
            default = [num_target_layers // 2]
        layers = list(block.get("target_layer_ids", default))
    return Format(
        captured_layers=layers,
        block_size=config["block_size"],
        mask=block["mask_token_id"],
        is_anchor_first=config.get("sample_from_anchor", "num_anchors" in config),
        is_causal=is_causal,
        slides=slides,
        window=window,
        sliding_is_causal=sliding_is_causal,
        follows_rows=sliding_is_causal and "speculators_model_type" not in config,
    )


@dataclass
class Context:
    """Keys and values of the known tokens, by layer: [tokens, kv heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    def __len__(self) -> int:
        return len(self.keys[0])


@dataclass
class Chain:
    """Drafts in a row, the scores they were taken from, and the chance of each to be accepted."""

    tokens: list[int]
    logits: Tensor  # [drafts, vocabulary]
    confidences: list[float]  # empty without a confidence head


@dataclass
class Tree:
    """Nodes, parents before children; parent -1 is the last committed token."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]  # 1 for the root's children
    scores: list[float]  # sum of log-probabilities from the root


class DFlashReference:
    """One drafter with its target's embedding and LM head."""

    def __init__(
        self, config: Config, weights: dict[str, Tensor], embedding: Tensor, lm_head: Tensor,
        num_target_layers: int,
    ) -> None:  # fmt: skip
        layer = config.get("transformer_layer_config", config)
        self.format = read_format(config, num_target_layers)
        self.weights = {name: tensor.float() for name, tensor in weights.items()}
        self.embedding, self.lm_head = embedding.float(), lm_head.float()
        self.token_of = list(range(len(self.lm_head)))  # of columns of the logits
        if "d2t" in weights:  # holds differences
            self.lm_head = self.weights["lm_head.weight"]
            self.token_of = (torch.arange(len(self.lm_head)) + weights["d2t"]).tolist()
        self.has_markov = "markov_head.markov_w1.weight" in self.weights
        self.num_layers = layer["num_hidden_layers"]
        self.head_dim = layer["head_dim"]
        self.eps = layer["rms_norm_eps"]
        self.rope_theta = layer.get("rope_parameters", layer)["rope_theta"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm over the last axis."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weights[f"{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x @ W^T."""
        return x @ self.weights[f"{name}.weight"].T

    def heads(self, name: str, x: Tensor) -> Tensor:
        """A projection of rows, [rows, heads, head_dim]."""
        return self.linear(name, x).view(len(x), -1, self.head_dim)

    def rope(self, x: Tensor, first: int) -> Tensor:
        """Rotates [rows, heads, head_dim], the rows' positions being first, first + 1, ..."""
        half = self.head_dim // 2
        frequency = self.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = (first + torch.arange(len(x), dtype=torch.float32))[:, None, None] * frequency
        left, right = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def keys_values(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Of rows that already have their norm."""
        p = f"layers.{layer}.self_attn"
        keys = self.norm(f"{p}.k_norm", self.heads(f"{p}.k_proj", x))
        return self.rope(keys, first), self.heads(f"{p}.v_proj", x)

    def empty(self) -> Context:
        """No tokens."""
        width = self.weights["layers.0.self_attn.k_proj.weight"].shape[0] // self.head_dim
        none = torch.zeros(0, width, self.head_dim)
        return Context([none] * self.num_layers, [none] * self.num_layers)

    def extend(self, context: Context, captured: Tensor) -> Context:
        """With the tokens whose captured states [tokens, states * hidden] these are.

        They are known to the target: the last committed token, which it has not read, is not one.
        """
        z = self.norm("hidden_norm", self.linear("fc", captured.float()))
        made = [self.keys_values(layer, z, len(context)) for layer in range(self.num_layers)]
        return Context(
            [torch.cat((old, new)) for old, (new, _) in zip(context.keys, made, strict=True)],
            [torch.cat((old, new)) for old, (_, new) in zip(context.values, made, strict=True)],
        )

    def seen(self, layer: int, num_known: int, count: int) -> Tensor:
        """Which known tokens and rows of the block each of its rows sees [count, known + count]."""
        seen = torch.ones(count, num_known + count, dtype=torch.bool)
        slides = self.format.slides[layer]
        if self.format.sliding_is_causal if slides else self.format.is_causal:
            seen = seen.tril(num_known)
        for row in range(count if slides else 0):
            end = num_known + row + 1 if self.format.follows_rows else num_known
            seen[row, : max(0, end - self.format.window)] = False
        return seen

    def block(self, context: Context, token: int, num_drafts: int) -> Tensor:
        """Normed states [num_drafts, hidden] of the rows that draft after `token`."""
        count = num_drafts + (not self.format.is_anchor_first)
        assert num_drafts > 0 and count <= self.format.block_size
        x = self.embedding[[token] + [self.format.mask] * (count - 1)]
        for layer in range(self.num_layers):
            p = f"layers.{layer}"
            normed, finish = self.surround(
                f"{p}.attention_conv", self.norm(f"{p}.input_layernorm", x)
            )
            query = self.norm(f"{p}.self_attn.q_norm", self.heads(f"{p}.self_attn.q_proj", normed))
            query = self.rope(query, len(context))
            seen = self.seen(layer, len(context), count)
            keys, values = self.keys_values(layer, normed, len(context))
            keys = torch.cat((context.keys[layer], keys))
            values = torch.cat((context.values[layer], values))
            group = query.shape[1] // keys.shape[1]
            mixed = []
            for head in range(query.shape[1]):
                scores = query[:, head] @ keys[:, head // group].T * self.head_dim**-0.5
                weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
                mixed.append(weights @ values[:, head // group])
            x = x + finish(self.linear(f"{p}.self_attn.o_proj", torch.cat(mixed, -1)))
            normed = self.norm(f"{p}.post_attention_layernorm", x)
            normed, finish = self.surround(f"{p}.mlp_conv", normed)
            gate = F.silu(self.linear(f"{p}.mlp.gate_proj", normed))
            gated = gate * self.linear(f"{p}.mlp.up_proj", normed)
            x = x + finish(self.linear(f"{p}.mlp.down_proj", gated))
        return self.norm("norm", x[count - num_drafts :])

    def surround(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What an attention or MLP reads where its input is `x`, and what becomes of its output."""
        return x, lambda out: out

    def logits(self, state: Tensor, before: int) -> Tensor:
        """Scores [vocabulary] of a place whose normed state this is, after the token `before`."""
        logits = self.lm_head @ state
        if self.has_markov:
            logits = logits + self.bias(before)
        return logits

    def bias(self, before: int) -> Tensor:
        """What the Markov head adds to the scores [vocabulary] after the token `before`."""
        row = self.weights["markov_head.markov_w1.weight"][before]
        return self.weights["markov_head.markov_w2.weight"] @ row

    def confidence(self, state: Tensor, before: int) -> float:
        """The chance that the draft of this place is accepted if those before it are."""
        x = state
        if self.weights["confidence_head.proj.weight"].shape[1] > len(state):
            x = torch.cat((state, self.weights["markov_head.markov_w1.weight"][before]))
        bias = self.weights["confidence_head.proj.bias"]
        return float((self.weights["confidence_head.proj.weight"] @ x + bias).sigmoid())

    def chain(
        self, context: Context, token: int, num_drafts: int, num_candidates: int | None = None,
        num_successors: int = 0,
    ) -> Chain:  # fmt: skip
        """The most likely token at every place, given the draft before it.

        With `num_candidates`, behind the first of as many that are the most likely ones whatever
        stands before, and of `num_successors` that the draft before raises most.
        """
        tokens, logits, confidences = [token], [], []
        for place, state in enumerate(self.block(context, token, num_drafts)):
            if "confidence_head.proj.weight" in self.weights:
                confidences.append(self.confidence(state, tokens[-1]))
            here = self.logits(state, tokens[-1])
            logits.append(here)
            column = int(here.argmax())
            if num_candidates is not None and place > 0:
                among = (self.lm_head @ state).topk(num_candidates).indices
                if num_successors:
                    raised = self.bias(tokens[-1]).topk(num_successors).indices
                    among = torch.cat((among, raised))
                column = int(among[here[among].argmax()])
            tokens.append(self.token_of[column])
        return Chain(tokens[1:], torch.stack(logits), confidences)

    def tree(self, context: Context, token: int, depth: int, top_k: int, num_nodes: int) -> Tree:
        """The `num_nodes` paths of the highest score, best first.

        A path's score is the sum of its tokens' log-probabilities, each at its own place, whatever
        stands before it. A node has the `top_k` best tokens of its place as children. With a Markov
        head these are, behind the first place, scored by what it says of them behind their parent,
        as though all other tokens were as likely as before; at the first place it counts for all
        tokens. Among equal scores the one found earlier comes first.
        """
        states = self.block(context, token, depth)
        found = Tree([], [], [], [])
        waiting: list[tuple[float, int, int, list[tuple[float, int]]]] = []

        def find(parent: int, siblings: list[tuple[float, int]]) -> None:
            """Offers the best of `siblings`; the others follow when it has been taken."""
            score = (found.scores[parent] if parent >= 0 else 0.0) + siblings[0][0]
            heapq.heappush(waiting, (-score, next(order), parent, siblings))

        def children(place: int, before: int) -> list[tuple[float, int]]:
            logits = self.logits(states[0], before) if place == 0 else self.lm_head @ states[place]
            logprobs = logits.log_softmax(-1)
            best, ids = (part[:top_k] for part in logprobs.sort(descending=True, stable=True))
            if self.has_markov and place > 0:
                bent = best + self.bias(before)[ids]
                best = bent - (bent.exp().sum() + 1 - best.exp().sum()).log()
                best, order = best.sort(descending=True, stable=True)
                ids = ids[order]
            tokens = [self.token_of[column] for column in ids.tolist()]
            return list(zip(best.tolist(), tokens, strict=True))

        order = iter(range(2 * num_nodes + 1))
        find(-1, children(0, token))
        while waiting and len(found.tokens) < num_nodes:
            negative, _, parent, siblings = heapq.heappop(waiting)
            node, level = len(found.tokens), found.depths[parent] + 1 if parent >= 0 else 1
            found.tokens.append(siblings[0][1])
            found.parents.append(parent)
            found.depths.append(level)
            found.scores.append(-negative)
            if len(siblings) > 1:
                find(parent, siblings[1:])
            if level < depth:
                find(node, children(level, found.tokens[node]))
        return found
