"""An MTP head of Qwen3.5's kind, row by row, in fp32: what the engine's drafter is compared with.

Written from the format alone, without any code of the engine. The entry of position p joins the
token there with the target's state of position p - 1 after its final norm: fc([norm(embedding),
norm(state)]), the embedding first, then one layer of gated attention over the entries up to p. Its
normed output predicts the token at p + 1, and is the state that the next draft's entry reads.
Position 0 has no entry. Norms hold their weights less 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class MtpReference:
    """One head beside its target's embedding and LM head, both [vocabulary, hidden]."""

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        self.weights = {
            name.removeprefix("mtp."): tensor.float()
            for name, tensor in weights.items()
            if name.startswith("mtp.")
        }
        self.embedding, self.head = embedding.float(), head.float()
        self.num_heads, self.num_kv_heads = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        rope = config["rope_parameters"]
        self.num_turning = int(self.head_dim * rope["partial_rotary_factor"])
        self.theta = rope["rope_theta"]
        self._tokens: list[int] = []  # of the text, and what its entries left
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def chain(self, tokens: list[int], states: Tensor, num_drafts: int) -> tuple[list[int], Tensor]:
        """Drafts after `tokens`, and their logits [drafts, vocabulary].

        `states` [tokens - 1, hidden] are the target's of all tokens but the last. Entries of a
        text that this one goes on from are kept.
        """
        count = len(self._tokens)
        if not 0 < count < len(tokens) or tokens[:count] != self._tokens:
            self._tokens, self._keys, self._values, count = tokens[:1], [], [], 1
        for position in range(count, len(tokens)):
            state = states[position - 1]
            out = self._row(tokens[position], state, position, self._keys, self._values)
        self._tokens = list(tokens)
        keys, values = list(self._keys), list(self._values)
        drafts, logits = [], []
        for index in range(num_drafts):
            logits.append(self.head @ out)
            drafts.append(int(logits[-1].argmax()))
            out = self._row(drafts[-1], out, len(tokens) + index, keys, values)
        return drafts, torch.stack(logits)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return scaled * (1 + self.weights[f"{name}.weight"])

    def _turn(self, x: Tensor, position: int) -> Tensor:
        """RoPE of the first part of heads [heads, head_dim]."""
        half = self.num_turning // 2
        angle = position * self.theta ** (-torch.arange(half, dtype=torch.float32) / half)
        left, right, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)

    def _row(
        self, token: int, state: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The output of an entry, whose key and value are added."""
        w, at = self.weights, "layers.0"
        embedded = self._norm("pre_fc_norm_embedding", self.embedding[token])
        h = w["fc.weight"] @ torch.cat((embedded, self._norm("pre_fc_norm_hidden", state)))
        x = self._norm(f"{at}.input_layernorm", h)
        of = f"{at}.self_attn"
        # Of each head the query, then its gate.
        both = (w[f"{of}.q_proj.weight"] @ x).view(self.num_heads, 2, self.head_dim)
        query = self._turn(self._norm(f"{of}.q_norm", both[:, 0]), position)
        key = (w[f"{of}.k_proj.weight"] @ x).view(self.num_kv_heads, self.head_dim)
        keys.append(self._turn(self._norm(f"{of}.k_norm", key), position))
        values.append((w[f"{of}.v_proj.weight"] @ x).view(self.num_kv_heads, self.head_dim))
        group = self.num_heads // self.num_kv_heads
        all_keys, all_values = (
            torch.stack(rows).repeat_interleave(group, 1) for rows in (keys, values)
        )  # [entries, heads, head_dim]
        scores = torch.einsum("hd,nhd->hn", query, all_keys) * self.head_dim**-0.5
        mixed = torch.einsum("hn,nhd->hd", scores.softmax(-1), all_values)
        h = h + w[f"{of}.o_proj.weight"] @ (mixed * both[:, 1].sigmoid()).flatten()
        x = self._norm(f"{at}.post_attention_layernorm", h)
        gate, up = (w[f"{at}.mlp.{part}_proj.weight"] @ x for part in ("gate", "up"))
        h = h + w[f"{at}.mlp.down_proj.weight"] @ (F.silu(gate) * up)
        return self._norm("norm", h)
