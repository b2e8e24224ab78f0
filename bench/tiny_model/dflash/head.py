"""Block drafters in plain PyTorch, with the parameter names of published checkpoints.

A block [anchor, mask, mask, ...] stands at the positions of a text from the anchor's on; its rows
see each other and, as keys and values alone, what the target computed before the anchor: the
residual streams after the layers of AFTER_LAYERS, joined to one state per position. One pass drafts
all that follows the anchor. Embedding and LM head are the target's.

DFLASH is laid out as z-lab's heads: row k drafts the k-th token after the anchor, row 0 nothing.
DSPARK is laid out as DeepSpec's: row k - 1 drafts it, a Markov head adds a bias chosen by the token
before, and a confidence head tells how likely a draft is right if those before it are.
DFLASH2 is DFLASH with convolutions and a selector (selector.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..eagle3.generate import project_normed
from ..model import Layer, RMSNorm, TinyConfig, rotary_tables, rotate
from .selector import BlockConv, CandidateSelector, ConvolvedLayer

AFTER_LAYERS = (0, 1, 2, 3)
NUM_ANCHORS = 64  # blocks in a row of training texts
MASK = 4081  # the first id of the target that belongs to no token

# Narrower MLPs than the target's pay for a third layer within the size of two like its own.
# Trained on rows of 1024 tokens.
GEOMETRY = TinyConfig(num_hidden_layers=3, intermediate_size=608, max_position_embeddings=1024)

Tables = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """What tells one kind of head from another."""

    name: str
    block_size: int  # rows
    is_anchor_first: bool
    markov_rank: int = 0  # above 0: with a confidence head, too
    conv_group: int = 0  # above 0: with convolutions
    selector_rank: int = 0  # above 0: drafts are chosen among the best num_candidates tokens
    num_candidates: int = 0

    @property
    def num_drafts(self) -> int:
        """Of a whole block."""
        return self.block_size - (not self.is_anchor_first)


DFLASH = Layout("dflash", 16, is_anchor_first=False)
DSPARK = Layout("dspark", 15, is_anchor_first=True, markov_rank=64)
DFLASH2 = Layout(
    "dflash2", 16, is_anchor_first=False, conv_group=16, selector_rank=64, num_candidates=16
)
LAYOUTS = {layout.name: layout for layout in (DFLASH, DSPARK, DFLASH2)}


class MarkovHead(nn.Module):
    """Scores of a token given the one before, as a product of low rank."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.3)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """One score from a state and the row of the token before."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


def context_entries(layer: Layer, context: Tensor, tables: Tables) -> KeysValues:
    """Keys and values [..., 128] of context states, which have their own norm."""
    attention = layer.self_attn
    key = attention.k_norm(attention.k_proj(context))
    return rotate(key, tables), attention.v_proj(context)


def block_layer(
    layer: Layer, x: Tensor, tables: Tables, context: KeysValues, seen: Tensor,
    num_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One layer: x [n, blocks, rows, hidden], context entries [n, t, 128], seen [n, blocks, t].

    `num_rows` [n, blocks] makes blocks shorter than x is; what comes of the other rows is nothing.
    """
    normed, attention_taps = layer.input_layernorm(x), None
    if isinstance(layer, ConvolvedLayer):
        attention_taps = layer.attention_conv.taps(normed)
        normed = BlockConv.mix(attention_taps, 0, normed)
    query, key, value = project_normed(layer, normed, tables)
    keys, values = context
    scale = key.shape[-1] ** -0.5
    # All heads share the keys, so each product is one matrix product per text, or per block.
    outer = (query.flatten(1, 3) @ keys.mT).unflatten(1, query.shape[1:4]).float() * scale
    outer = outer.masked_fill(~seen[:, :, None, None], -torch.inf)
    inner = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4]).float() * scale
    if num_rows is not None:
        missing = torch.arange(key.shape[2], device=key.device) >= num_rows[..., None]
        inner = inner.masked_fill(missing[:, :, None, None], -torch.inf)
    top = torch.maximum(outer.amax(-1), inner.amax(-1)).detach()[..., None]
    outer, inner = (outer - top).exp(), (inner - top).exp()
    total = outer.sum(-1, keepdim=True) + inner.sum(-1, keepdim=True)
    mixed = (outer.to(value.dtype).flatten(1, 3) @ values).view_as(query)
    mixed = mixed + (inner.to(value.dtype).flatten(2, 3) @ value).view_as(query)
    mixed = (mixed / total).to(query.dtype).flatten(3)
    attended = layer.self_attn.o_proj(mixed)
    if attention_taps is not None:
        attended = BlockConv.mix(attention_taps, 1, attended)
    x = x + attended
    normed = layer.post_attention_layernorm(x)
    if not isinstance(layer, ConvolvedLayer):
        return x + layer.mlp(normed)
    taps = layer.mlp_conv.taps(normed)
    return x + BlockConv.mix(taps, 1, layer.mlp(BlockConv.mix(taps, 0, normed)))


class BlockHead(nn.Module):
    """fc, layers and norms; a Markov and a confidence head if the layout has them."""

    def __init__(self, layout: Layout, geometry: TinyConfig = GEOMETRY) -> None:
        super().__init__()
        self.layout, self.geometry = layout, geometry
        size, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.fc = nn.Linear(len(AFTER_LAYERS) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            ConvolvedLayer(geometry, layout.conv_group) if layout.conv_group else Layer(geometry, 0)
            for _ in range(geometry.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and "_conv." not in name:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.01 if into_stream else 0.02)
        if layout.markov_rank:
            self.markov_head = MarkovHead(geometry.vocab_size, layout.markov_rank)
            self.confidence_head = ConfidenceHead(size + layout.markov_rank)
        if layout.selector_rank:
            self.candidate_selector = CandidateSelector(
                geometry.vocab_size, size, layout.selector_rank, layout.num_candidates
            )

    def tables(self, positions: Tensor, longest: int) -> Tables:
        """cos and sin at `positions`."""
        cos, sin = rotary_tables(self.geometry, longest, positions.device)
        return cos[positions], sin[positions]

    def context(self, captured: Tensor) -> Tensor:
        """What joins the context of every position, [..., hidden], from its captured states."""
        return self.hidden_norm(self.fc(captured))

    def drafting_rows(self, x: Tensor) -> Tensor:
        """The normed states [n, blocks, drafts, hidden] of the rows that draft."""
        return self.norm(x if self.layout.is_anchor_first else x[:, :, 1:])

    def logits(self, state: Tensor, before: Tensor, embedding: Tensor) -> Tensor:
        """Scores over the vocabulary; `before` holds the ids of the tokens before."""
        if self.layout.selector_rank:
            every = F.linear(state, embedding)
            return self.candidate_selector.among_all(state, before, every)
        if not self.layout.markov_rank:
            return F.linear(state, embedding)
        row = self.markov_head.markov_w1(before)
        table = torch.cat((embedding, self.markov_head.markov_w2.weight), -1)
        return F.linear(torch.cat((state, row.to(state.dtype)), -1), table)

    def confidence(self, state: Tensor, before: Tensor) -> Tensor:
        """Logit of a draft being right if those before it are; teaches nothing but its own head."""
        row = self.markov_head.markov_w1(before)
        x = torch.cat((state, row.to(state.dtype)), -1).detach()
        return self.confidence_head.proj(x)[..., 0]


def block_ids(anchors: Tensor, rows: int) -> Tensor:
    """[anchor, mask, ...] of every anchor's token."""
    masks = torch.full_like(anchors, MASK)[..., None].expand(*anchors.shape, rows - 1)
    return torch.cat((anchors[..., None], masks), -1)


def head_config(layout: Layout, geometry: TinyConfig = GEOMETRY) -> dict[str, Any]:
    """config.json. Layer ids count outputs: id i is the state after layer i."""
    common = {
        "attention_bias": False,
        "block_size": layout.block_size,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "layer_types": ["full_attention"] * geometry.num_hidden_layers,
        "max_position_embeddings": geometry.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": geometry.num_attention_heads,
        "num_hidden_layers": geometry.num_hidden_layers,
        "num_key_value_heads": geometry.num_key_value_heads,
        "num_target_layers": TinyConfig().num_hidden_layers,
        "rms_norm_eps": geometry.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": geometry.vocab_size,
    }
    if not layout.is_anchor_first:
        block: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(AFTER_LAYERS)}
        if layout.selector_rank:
            block |= {
                "conv_kernel_size": 2,
                "conv_group_size": layout.conv_group,
                "selector_rank": layout.selector_rank,
                "selector_top_k": layout.num_candidates,
            }
        return {
            "architectures": ["DFlash2DraftModel" if layout.selector_rank else "DFlashDraftModel"],
            **common,
            "dflash_config": block,
            "rope_scaling": None,
            "rope_theta": geometry.rope_theta,
        }
    return {
        "architectures": ["Qwen3DSparkModel"],
        **common,
        "confidence_head_with_markov": layout.markov_rank > 0,
        "enable_confidence_head": layout.markov_rank > 0,
        "markov_head_type": "vanilla",
        "markov_rank": layout.markov_rank,
        "mask_token_id": MASK,
        "num_anchors": NUM_ANCHORS,
        "rope_parameters": {"rope_theta": geometry.rope_theta, "rope_type": "default"},
        "target_layer_ids": list(AFTER_LAYERS),
    }
