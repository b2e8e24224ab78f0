"""The EAGLE-3 head in plain PyTorch, with the parameter names of published checkpoints.

An entry stands at a token's own position p: it joins that token with the target's state of position
p-1 (so position 0 has none) and predicts the token at p+1. The states are the residual streams
after the layers of AFTER_LAYERS. Further steps put the head's own output in the state's place: the
entry of step s that began at p stands at p+s, sees the first entries up to p and its own before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model import MLP, RMSNorm, TinyConfig, rotary_tables, rotate

AFTER_LAYERS = (0, 1, 2)
# Drafting K tokens reads the head K times, so that beside a small target it has to be slim: half of
# the target's MLP, half of its vocabulary. Trained on rows of 1024 tokens.
GEOMETRY = TinyConfig(intermediate_size=608, max_position_embeddings=1024)
DRAFT_VOCAB = 2048

Tables = tuple[Tensor, Tensor]


class Entries(NamedTuple):
    """Keys and values that the steps of a chain see; there is one KV head.

    `own` has room for every step from the start, so that one compiled function serves them all.
    """

    keys: Tensor  # [n, t, head_dim]: of step 0
    values: Tensor
    mask: Tensor  # [n, t, t] bool: which of them a chain sees
    own_keys: Tensor  # [n, t, steps, head_dim]
    own_values: Tensor


class HeadAttention(nn.Module):
    """Grouped-query attention on [embedding, state], without norms on queries and keys."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        assert config.num_key_value_heads == 1
        self.width = width
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, hidden, bias=False)

    def project(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [n, t, heads, width], rotated keys and values [n, t, width]."""
        cos, sin = tables
        query = self.q_proj(x).unflatten(-1, (-1, self.width))
        query = rotate(query, (cos.unsqueeze(-2), sin.unsqueeze(-2)))
        return query, rotate(self.k_proj(x), tables), self.v_proj(x)

    def mix(self, query: Tensor, entries: Entries, step: Tensor) -> Tensor:
        """Attention over the entries of step 0 and a chain's own up to `step`; heads flattened."""
        scale = self.width**-0.5
        # All heads share the keys.
        scores = (query.flatten(1, 2) @ entries.keys.mT).unflatten(1, query.shape[1:3])
        scores = (scores.float() * scale).masked_fill(~entries.mask[:, :, None], -torch.inf)
        own = (query.float().unsqueeze(3) * entries.own_keys.float().unsqueeze(2)).sum(-1) * scale
        unseen = torch.arange(own.shape[-1], device=own.device) >= step
        own = own.masked_fill(unseen, -torch.inf)
        top = torch.maximum(scores.amax(-1), own.amax(-1)).detach()[..., None]
        weights, own = (scores - top).exp(), (own - top).exp()
        total = weights.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
        mixed = (weights.to(query.dtype).flatten(1, 2) @ entries.values).view_as(query)
        mixed = mixed + (own.unsqueeze(-1) * entries.own_values.unsqueeze(2)).sum(3)
        return (mixed / total).to(query.dtype).flatten(2)


class Midlayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What the attention reads: [embedding, state], each normed."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)

    def outputs(self, state: Tensor, mixed: Tensor) -> Tensor:
        """The new state."""
        state = state + self.self_attn.o_proj(mixed)
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3Head(nn.Module):
    """fc, one layer, norm and an LM head over the draft vocabulary; embeddings are the target's."""

    def __init__(self, draft_vocab: int = DRAFT_VOCAB, config: TinyConfig = GEOMETRY) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.midlayer = Midlayer(self.config)
        self.fc = nn.Linear(len(AFTER_LAYERS) * size, size, bias=False)
        self.norm = RMSNorm(size, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, draft_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def tables(self, positions: Tensor, longest: int) -> Tables:
        """cos and sin at `positions`."""
        cos, sin = rotary_tables(self.config, longest, positions.device)
        return cos[positions], sin[positions]

    def first(
        self, embedded: Tensor, features: Tensor, mask: Tensor, tables: Tables, steps: int
    ) -> tuple[Tensor, Entries]:
        """Step 0 at every position: new states [n, t, hidden], and room for `steps` more."""
        state = self.fc(features)
        attention = self.midlayer.self_attn
        query, key, value = attention.project(self.midlayer.inputs(embedded, state), tables)
        # What fills the room is never seen. It is part of the graph, like what will replace it, so
        # that a compiled `further` meets the same kind of tensors in every step.
        room = [part.unsqueeze(2).expand(-1, -1, steps, -1).clone() for part in (key, value)]
        entries = Entries(key, value, mask, *room)
        none = torch.zeros((), dtype=torch.long, device=key.device)
        return self.midlayer.outputs(state, attention.mix(query, entries, none)), entries

    def further(
        self, embedded: Tensor, state: Tensor, entries: Entries, tables: Tables, step: Tensor
    ) -> tuple[Tensor, Entries]:
        """Step `step`, from 1 on, of every chain, and the entries with its own."""
        attention = self.midlayer.self_attn
        query, key, value = attention.project(self.midlayer.inputs(embedded, state), tables)
        places = torch.arange(entries.own_keys.shape[2], device=key.device)
        here = (places == step - 1)[:, None]
        entries = Entries(
            entries.keys,
            entries.values,
            entries.mask,
            torch.where(here, key.unsqueeze(2), entries.own_keys),
            torch.where(here, value.unsqueeze(2), entries.own_values),
        )
        return self.midlayer.outputs(state, attention.mix(query, entries, step)), entries

    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        return self.lm_head(self.norm(state))


def chain_mask(places: Tensor) -> Tensor:
    """Which entries of step 0 each position sees, [n, t, t]: its document's up to itself.

    `places` counts positions from 0 in every document. A document's first position has no entry;
    it sees itself, so that no row is empty, and nobody reads what comes of it.
    """
    document = (places == 0).cumsum(-1)
    row = torch.arange(places.shape[-1], device=places.device)
    visible = (document[:, :, None] == document[:, None, :]) & (row[:, None] >= row)
    return visible & ((places > 0)[:, None, :] | (row[:, None] == row))


def head_config(draft_vocab: int, config: TinyConfig = GEOMETRY) -> dict[str, Any]:
    """config.json, in the classic format.

    The layer ids in `eagle_config` count outputs: id i is the state after layer i.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AFTER_LAYERS),
            "use_aux_hidden_state": True,
        },
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
    }
