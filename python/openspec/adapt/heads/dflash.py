"""Block heads for torch, in the layouts of z-lab (DFlash, DFlash2) and DeepSpec (DSpark).

A block [anchor, mask, mask, ...] stands at the positions of a text from the anchor's on; its rows
see each other and, as keys and values alone, what the target computed before the anchor: the
residual streams after some of its layers, joined to one state for each position. One pass drafts
all that follows the anchor. Embedding and LM head are the target's.

Of a DFlash block row k drafts the k-th token after the anchor, row 0 nothing. Of a DSpark block
row k - 1 drafts it, a Markov head adds a bias chosen by the token before, and a confidence head
tells how likely a draft is right if those before it are. DFlash2 is DFlash with convolutions and a
selector.

Random positions of every row of texts become anchors; every block sees its own context and itself,
no other block. A share of the blocks is shorter: a head that never saw a short block drafts nothing
of use with one. What is learned at a place is half the target's distribution there, given the text,
and half its best token; places count exp(-(k - 1) / GAMMA).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openspec.adapt.heads.parts import (
    MLP,
    Geometry,
    HeadKind,
    HeadPlan,
    Lesson,
    Projections,
    ReadText,
    RMSNorm,
    Tables,
    TargetEnds,
    TrainableHead,
    descended,
    in_parts,
    init_matrices,
    joint_softmax,
    rotary_tables,
    softmax,
)
from openspec.adapt.heads.selector import SELECTOR_SHARE, BlockConv, CandidateSelector
from openspec.drafters.dflash.dflash_format import default_capture_layers

GAMMA = 7.0
HARD_SHARE = 0.5  # of the loss, the target's best token; the rest its distribution
SHORT_SHARE = 0.5  # of the blocks, those of any length
BLOCKS_AT_ONCE = 96  # in evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What tells one kind of block head from another."""

    is_anchor_first: bool = False
    """Whether the anchor's row drafts."""
    markov_rank: int = 0
    """Above 0: with a confidence head, too."""
    conv_group: int = 0
    """Above 0: with convolutions."""
    selector_rank: int = 0
    """Above 0: drafts are chosen among the best num_candidates tokens."""
    num_candidates: int = 0


DFLASH = Layout()
DSPARK = Layout(is_anchor_first=True, markov_rank=64)
DFLASH2 = Layout(conv_group=16, selector_rank=64, num_candidates=16)


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

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_inputs, 1)


class BlockLayer(nn.Module):
    """One layer over the rows of blocks and the context before them."""

    def __init__(self, geometry: Geometry, conv_group: int) -> None:
        super().__init__()
        size, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.self_attn = Projections(geometry, has_norms=True)
        self.mlp = MLP(geometry)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.is_convolved = conv_group > 0
        if self.is_convolved:
            self.attention_conv = BlockConv(size, conv_group)
            self.mlp_conv = BlockConv(size, conv_group)

    def forward(
        self,
        x: Tensor,
        tables: Tables,
        context: Tensor,
        context_tables: Tables,
        seen: Tensor,
        num_rows: Tensor | None,
    ) -> Tensor:
        """Blocks x [n, blocks, rows, hidden], states context [n, t, hidden], seen [n, blocks, t].

        `num_rows` [n, blocks] makes blocks shorter than x is; what comes of the other rows is
        nothing.
        """
        normed = self.input_layernorm(x)
        if self.is_convolved:
            taps = self.attention_conv.taps(normed)
            attended = self._attend(
                BlockConv.mix(taps, 0, normed), tables, context, context_tables, seen, num_rows
            )
            x = x + BlockConv.mix(taps, 1, attended)
            normed = self.post_attention_layernorm(x)
            taps = self.mlp_conv.taps(normed)
            return x + BlockConv.mix(taps, 1, self.mlp(BlockConv.mix(taps, 0, normed)))
        x = x + self._attend(normed, tables, context, context_tables, seen, num_rows)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def _attend(
        self,
        normed: Tensor,
        tables: Tables,
        context: Tensor,
        context_tables: Tables,
        seen: Tensor,
        num_rows: Tensor | None,
    ) -> Tensor:
        attention = self.self_attn
        query = attention.query(normed, tables).movedim(3, 1)  # [n, kv, blocks, rows, heads, width]
        scaled = query * query.shape[-1] ** -0.5
        key, value = (part.movedim(3, 1) for part in attention.keys_values(normed, tables))
        keys, values = (
            part.movedim(2, 1) for part in attention.keys_values(context, context_tables)
        )  # [n, kv, t, width]
        shape = query.shape
        outer = (scaled.flatten(2, 4) @ keys.mT).unflatten(2, shape[2:5])
        outer = outer.masked_fill_(~seen[:, None, :, None, None], -torch.inf)
        in_block = scaled.flatten(3, 4)  # [n, kv, blocks, rows * heads, width]
        inner = (in_block @ key.mT).unflatten(3, shape[3:5])
        if num_rows is not None:
            missing = torch.arange(key.shape[3], device=key.device) >= num_rows[..., None]
            inner = inner.masked_fill_(missing[:, None, :, None, None], -torch.inf)
        outer, inner = joint_softmax(outer, inner)
        total = (outer.flatten(2, 4) @ values).view(shape)
        total = total + (inner.flatten(3, 4) @ value).view(shape)
        return attention.o_proj(total.movedim(1, 3).flatten(3))  # type: ignore[no-any-return]


class BlockHead(TrainableHead):
    """fc, layers and norms; what the layout adds."""

    def __init__(self, plan: HeadPlan, layout: Layout) -> None:
        super().__init__()
        self.plan, self.layout, self.capture_layers = plan, layout, plan.capture_layers
        self.most_drafts = plan.block_size - (not layout.is_anchor_first)
        geometry = plan.geometry
        size, eps, vocab_size = geometry.hidden_size, geometry.rms_norm_eps, geometry.vocab_size
        self.fc = nn.Linear(len(plan.capture_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            BlockLayer(geometry, layout.conv_group) for _ in range(geometry.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        init_matrices(self, residual_std=0.01, left_out="_conv.")
        if layout.markov_rank:
            self.markov_head = MarkovHead(vocab_size, layout.markov_rank)
            self.confidence_head = ConfidenceHead(size + layout.markov_rank)
        if layout.selector_rank:
            self.candidate_selector = CandidateSelector(
                vocab_size, size, layout.selector_rank, layout.num_candidates
            )

    def begin_as(self, ends: TargetEnds) -> None:
        """The last norm begins as the target's."""
        with torch.no_grad():
            self.norm.weight.copy_(ends.norm)

    def block_states(
        self,
        tokens: Tensor,
        places: Tensor,
        captured: Tensor,
        anchors: Tensor,
        seen: Tensor,
        num_drafts: Tensor | int,
        ends: TargetEnds,
    ) -> Tensor:
        """Normed states [n, blocks, drafts, hidden] of the rows that draft.

        Blocks begin at `anchors` [n, blocks] of rows of `tokens` and `places` [n, t] and see
        `seen` [n, blocks, t] of them. `num_drafts` [n, blocks] makes whole blocks shorter; a number
        leaves the other rows out.
        """
        extra = not self.layout.is_anchor_first
        rows = (num_drafts if isinstance(num_drafts, int) else self.most_drafts) + extra
        masks = torch.full_like(anchors, self.plan.mask_token)[..., None]
        ids = torch.cat((tokens.gather(1, anchors)[..., None], masks.expand(-1, -1, rows - 1)), -1)
        x = F.embedding(ids, ends.embedding)
        offsets = torch.arange(rows, device=places.device)
        positions = places.gather(1, anchors)[..., None] + offsets
        tables = rotary_tables(self.plan.geometry, positions)
        context_tables = rotary_tables(self.plan.geometry, places)
        context = self.hidden_norm(self.fc(captured))
        num_rows = None if isinstance(num_drafts, int) else num_drafts + extra
        for layer in self.layers:
            x = layer(x, tables, context, context_tables, seen, num_rows)
        return self.norm(x[:, :, 1:] if extra else x)  # type: ignore[no-any-return]

    def logits(self, state: Tensor, before: Tensor, ends: TargetEnds) -> Tensor:
        """Scores over the vocabulary; `before` holds the ids of the tokens before."""
        every = F.linear(state, ends.head)
        if self.layout.selector_rank:
            return self.candidate_selector.among_all(state, before, every)
        if self.layout.markov_rank:
            every = every + self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        return every

    def confidence(self, state: Tensor, before: Tensor) -> Tensor:
        """Logit of a draft being right if those before it are; teaches nothing but its own head."""
        row = self.markov_head.markov_w1(before)
        x = torch.cat((state, row.to(state.dtype)), -1).detach()
        return self.confidence_head.proj(x)[..., 0]  # type: ignore[no-any-return]

    def loss(self, lesson: Lesson, ends: TargetEnds, random: torch.Generator) -> Tensor:
        """Over random anchors, block by block."""
        anchors = choose_anchors(lesson, self.plan.num_anchors, random)
        num_drafts = choose_lengths(anchors, self.most_drafts, random)
        loss, sums = self.measure(lesson, ends, anchors, num_drafts)
        reached = sums[0, :-1].sum() + sums[1, 0]
        return loss + sums[2].sum() / reached.clamp(min=1)

    def measure(
        self, lesson: Lesson, ends: TargetEnds, anchors: Tensor, num_drafts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of the drafts, and sums over the blocks by place, [3, drafts].

        Drafts that are right with all before them, places that count, loss of the confidence.
        """
        tokens, places = lesson.tokens, lesson.places
        seen = seen_context(places, anchors)
        state = self.block_states(tokens, places, lesson.captured, anchors, seen, num_drafts, ends)
        place = torch.arange(self.most_drafts, device=anchors.device)
        at = anchors[..., None] + place  # of the token before
        end = places.shape[1] - 1
        batch = torch.arange(len(places), device=places.device)[:, None, None]
        inside = (at < end) & (place < num_drafts[..., None])
        at = at.clamp(max=end)
        same = places[batch, at] == places.gather(1, anchors)[..., None] + place
        counted = (lesson.learned[batch, at] & same & inside).long().cumprod(-1)
        before, actual = tokens[batch, at], tokens[batch, (at + 1).clamp(max=end)]
        last = lesson.last[batch, at]
        weights = counted * torch.exp(-place / GAMMA)
        weights = weights / weights.sum().clamp(min=1)
        chosen, loss = torch.empty_like(before), state.new_zeros((), dtype=torch.float32)
        scores = before[0].numel() * len(ends.head)  # of a row
        for part in in_parts(scores, state, before, last, weights, chosen):
            loss = loss + descended(self._loss, *part, ends)
        right = (chosen == actual).long() * counted
        run = right.cumprod(-1)
        rows = [run, counted]
        if self.layout.markov_rank:
            guess = self.confidence(state, before).float()
            wrong = F.binary_cross_entropy_with_logits(guess, right.float(), reduction="none")
            rows.append(wrong * F.pad(run[..., :-1], (1, 0), value=1) * counted)
        else:
            rows.append(torch.zeros_like(run))
        return loss, torch.stack([row.float().sum((0, 1)) for row in rows])

    def _loss(
        self, state: Tensor, before: Tensor, last: Tensor, weights: Tensor, chosen: Tensor,
        ends: TargetEnds,
    ) -> Tensor:  # fmt: skip
        """The sum over all places; which token is drafted at each is written to `chosen`."""
        with torch.no_grad():
            truth = ends.logits(last)
            best = truth.argmax(-1, keepdim=True)
            truth = softmax(truth)
        has_selector = self.layout.selector_rank > 0
        scores = F.linear(state, ends.head) if has_selector else self.logits(state, before, ends)
        likely = scores.float().log_softmax(-1)
        hard, soft = likely.gather(-1, best)[..., 0], (truth * likely).sum(-1)
        loss = -HARD_SHARE * hard - (1 - HARD_SHARE) * soft
        if has_selector:
            more, ids = self.candidate_selector.lesson(state, before, likely, best[..., 0])
            chosen.copy_(ids)
            return ((loss + SELECTOR_SHARE * more) * weights).sum()
        chosen.copy_(scores.argmax(-1))
        return (loss * weights).sum()

    def drafts(self, text: ReadText, ends: TargetEnds, count: int) -> Tensor:
        """Each the likeliest behind the drafts before it; see `TrainableHead.drafts`."""
        length = len(text.tokens)
        places = torch.arange(length, device=text.tokens.device)
        parts = []
        for anchors in places[text.prompt :].split(BLOCKS_AT_ONCE):
            seen = (places < anchors[:, None])[None]
            states = self.block_states(
                text.tokens[None], places[None], text.captured[None], anchors[None], seen, count,
                ends,
            )[0]  # fmt: skip
            drafts = [text.tokens[anchors]]
            for state in states.unbind(1):
                drafts.append(self.logits(state, drafts[-1], ends).argmax(-1))
            parts.append(torch.stack(drafts[1:], -1))
        return torch.cat(parts)

    def config(self) -> dict[str, Any]:
        """z-lab's format, or DeepSpec's for DSpark; layer ids count outputs."""
        plan, layout = self.plan, self.layout
        common = {
            **plan.geometry.keys(),
            "block_size": plan.block_size,
            "layer_types": ["full_attention"] * plan.geometry.num_layers,
            "model_type": "qwen3",
            "num_target_layers": plan.num_target_layers,
        }
        which = {"mask_token_id": plan.mask_token, "target_layer_ids": list(plan.capture_layers)}
        theta = plan.geometry.rope_theta
        if layout.markov_rank:
            return {
                "architectures": ["Qwen3DSparkModel"],
                **common,
                **which,
                "confidence_head_with_markov": True,
                "enable_confidence_head": True,
                "markov_head_type": "vanilla",
                "markov_rank": layout.markov_rank,
                "num_anchors": plan.num_anchors,
                "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            }
        parts = {
            "conv_kernel_size": 2,
            "conv_group_size": layout.conv_group,
            "selector_rank": layout.selector_rank,
            "selector_top_k": layout.num_candidates,
        }
        has_parts = layout.selector_rank > 0
        return {
            "architectures": ["DFlash2DraftModel" if has_parts else "DFlashDraftModel"],
            **common,
            "dflash_config": {**which, **(parts if has_parts else {})},
            "rope_scaling": None,
            "rope_theta": theta,
        }


def choose_anchors(lesson: Lesson, count: int, random: torch.Generator) -> Tensor:
    """Rows [n, count] of generated tokens before generated ones, where there are so many."""
    draws = torch.rand(lesson.tokens.shape, device=lesson.tokens.device, generator=random)
    possible = lesson.learned & lesson.generated
    return (draws + possible).topk(count, -1).indices.sort(-1).values


def choose_lengths(anchors: Tensor, most: int, random: torch.Generator) -> Tensor:
    """Drafts of every block: any number in a share of them, else all."""
    draws = torch.rand(*anchors.shape, 2, device=anchors.device, generator=random)
    some = (draws[..., 0] * most).long() + 1
    return torch.where(draws[..., 1] < SHORT_SHARE, some, most)


def seen_context(places: Tensor, anchors: Tensor) -> Tensor:
    """What the blocks see, [n, blocks, t]: their texts before their anchors."""
    text = (places == 0).cumsum(-1)
    row = torch.arange(places.shape[1], device=places.device)
    return (text[:, None] == text.gather(1, anchors)[..., None]) & (row < anchors[..., None])


def _kind(name: str, method: str, layout: Layout) -> HeadKind:
    return HeadKind(
        name=name,
        method=method,
        make=functools.partial(BlockHead, layout=layout),
        default_capture_layers=default_capture_layers,
        num_layers=5,
        num_extra_rows=int(not layout.is_anchor_first),
        rate=2e-3,
    )


KINDS = (
    _kind("dflash", "dflash", DFLASH),
    _kind("dflash2", "dflash", DFLASH2),
    _kind("dspark", "dspark", DSPARK),
)
