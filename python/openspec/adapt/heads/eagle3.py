"""EAGLE-3 heads as torch trains them, in the classic layout.

An entry stands at a token's own position p: it joins that token with the target's states of
position p - 1 (so position 0 has none) and predicts the token at p + 1. Further steps put the
head's own output in the states' place: the entry of step s that began at p stands at p + s, sees
the first entries up to p and its own before it. Training runs STEPS of them over every position
("training-time test", as published), each held against the target's own distribution over the
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    TargetEnds,
    VocabularyHead,
    descended,
    in_parts,
    init_matrices,
    joint_softmax,
    rotary_tables,
    softmax,
)
from openspec.checkpoint.token_map import TOKEN_MAP, TOKEN_MASK, is_rising
from openspec.drafters.eagle3.eagle3_format import LAYER_IDS_KEY, SEQUENTIAL, default_layers

STEPS = 6  # passes of the head at each position
DECAY = 0.8  # weight of a step against the one before


class Entries(NamedTuple):
    """Keys and values that the steps of a chain see."""

    keys: Tensor  # [n, kv heads, t, width]: of step 0
    values: Tensor
    mask: Tensor  # [n, t, t] bool: which of them a chain sees
    own_keys: Tensor  # [n, kv heads, t, steps so far, width]
    own_values: Tensor


class Midlayer(nn.Module):
    """The one decoder layer, without norms on queries and keys."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        size, eps = geometry.hidden_size, geometry.rms_norm_eps
        self.self_attn = Projections(geometry, num_inputs=2)
        self.mlp = MLP(geometry)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def inputs(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What the attention reads: [embedding, state], each normed."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)

    def outputs(self, state: Tensor, attended: Tensor) -> Tensor:
        """The new state."""
        state = state + self.self_attn.o_proj(attended)
        return state + self.mlp(self.post_attention_layernorm(state))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, entries: Entries) -> Tensor:
        """Attention of queries [n, t, kv heads, heads, width]; heads flattened, [n, t, width]."""
        scaled = query * query.shape[-1] ** -0.5
        by_kv_head = scaled.transpose(1, 2)  # [n, kv heads, t, heads, width]
        shape = by_kv_head.shape
        scores = (by_kv_head.flatten(2, 3) @ entries.keys.mT).unflatten(2, shape[2:4])
        scores = scores.masked_fill_(~entries.mask[:, None, :, None], -torch.inf)
        weights, own = joint_softmax(scores, by_kv_head @ entries.own_keys.mT)
        total = (weights.flatten(2, 3) @ entries.values).view(shape) + own @ entries.own_values
        return total.transpose(1, 2).flatten(2)


class Eagle3Head(VocabularyHead):
    """fc, one layer, norm and an LM head over the draft vocabulary; embeddings are the target's."""

    most_drafts = STEPS
    is_chain = True

    def __init__(self, plan: HeadPlan) -> None:
        super().__init__()
        self.geometry, self.capture_layers = plan.geometry, plan.capture_layers
        size = plan.geometry.hidden_size
        self.midlayer = Midlayer(plan.geometry)
        self.fc = nn.Linear(len(plan.capture_layers) * size, size, bias=False)
        self.norm = RMSNorm(size, plan.geometry.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(plan.vocabulary), bias=False)
        self.to_draft: Tensor
        self.register_buffer("vocabulary", plan.vocabulary, persistent=False)
        to_draft = torch.full((plan.geometry.vocab_size,), -1)
        to_draft[plan.vocabulary] = torch.arange(len(plan.vocabulary))
        self.register_buffer("to_draft", to_draft, persistent=False)
        init_matrices(self)

    def begin_as(self, ends: TargetEnds) -> None:
        """Where a part has a counterpart in the target, it begins as that."""
        with torch.no_grad():
            self.lm_head.weight.copy_(ends.head[self.vocabulary])
            self.norm.weight.copy_(ends.norm)
            self.fc.weight[:, -self.geometry.hidden_size :].fill_diagonal_(1)

    def learn_for(self, num_drafts: int) -> None:
        """A pass for each draft, at most as many as there are."""
        self.most_drafts = min(self.most_drafts, num_drafts)

    def first(
        self, embedded: Tensor, features: Tensor, mask: Tensor, places: Tensor
    ) -> tuple[Tensor, Entries]:
        """Step 0 at every position: new states [n, t, hidden], and what further steps see."""
        state, layer = self.fc(features), self.midlayer
        tables = rotary_tables(self.geometry, places)
        x = layer.inputs(embedded, state)
        key, value = (part.transpose(1, 2) for part in layer.self_attn.keys_values(x, tables))
        room = key.unsqueeze(3)[:, :, :, :0]
        entries = Entries(key, value, mask, room, room)
        query = layer.self_attn.query(x, tables)
        return layer.outputs(state, layer.attend(query, entries)), entries

    def further(
        self, embedded: Tensor, state: Tensor, entries: Entries, places: Tensor
    ) -> tuple[Tensor, Entries]:
        """The next step of every chain, at `places` [n, t], and the entries with its own."""
        layer, tables = self.midlayer, rotary_tables(self.geometry, places)
        x = layer.inputs(embedded, state)
        key, value = (
            part.transpose(1, 2).unsqueeze(3) for part in layer.self_attn.keys_values(x, tables)
        )
        entries = entries._replace(
            own_keys=torch.cat((entries.own_keys, key), 3),
            own_values=torch.cat((entries.own_values, value), 3),
        )
        query = layer.self_attn.query(x, tables)
        return layer.outputs(state, layer.attend(query, entries)), entries

    def embedded(self, tokens: Tensor, ends: TargetEnds) -> Tensor:
        """What tokens become for the head."""
        return F.embedding(tokens, ends.embedding)

    def logits(self, state: Tensor) -> Tensor:
        """Scores over the draft vocabulary."""
        return self.lm_head(self.norm(state))  # type: ignore[no-any-return]

    def states(self, lesson: Lesson, ends: TargetEnds, steps: int) -> Iterator[Tensor]:
        """The states [n, t, hidden] of every position's chain, step by step."""
        features = F.pad(lesson.captured[:, :-1], (0, 0, 1, 0))
        tokens, places = lesson.tokens, lesson.places
        mask = chain_mask(places)
        state, entries = self.first(self.embedded(tokens, ends), features, mask, places)
        yield state
        for step in range(1, steps):
            embedded, state = self.read(_ahead(tokens, step), state, ends)
            state, entries = self.further(embedded, state, entries, places + step)
            yield state

    def read(self, tokens: Tensor, state: Tensor, ends: TargetEnds) -> tuple[Tensor, Tensor]:
        """Embeddings and features of a further step: its tokens, and the states before it."""
        return self.embedded(tokens, ends), state

    def loss(self, lesson: Lesson, ends: TargetEnds, random: torch.Generator) -> Tensor:
        """Cross-entropy with the target's distribution over the draft vocabulary, by step."""
        scores = lesson.tokens.shape[1] * len(self.vocabulary)  # of a row
        taught = (self._truth(last, ends) for (last,) in in_parts(scores, lesson.last))
        truth, is_drafted = map(torch.cat, zip(*taught, strict=True))
        has_best = is_drafted & lesson.learned
        total = truth.new_zeros((), dtype=torch.float32)
        whole = sum(DECAY**step for step in range(self.most_drafts))
        for step, state in enumerate(self.states(lesson, ends, self.most_drafts)):
            # The position predicted from must lie in the text in which the chain began.
            same = _ahead(lesson.places, step) == lesson.places + step
            counted = _ahead(has_best, step) & same & (lesson.places > 0)
            weights = counted * (DECAY**step / whole / counted.sum().clamp(min=1))
            for part in in_parts(scores, state, truth, weights):
                total = total + descended(self._entropy, *part, step)
        return total

    @torch.no_grad()
    def _truth(self, last: Tensor, ends: TargetEnds) -> tuple[Tensor, Tensor]:
        """The target's distribution over the draft vocabulary; is its best token in there?"""
        logits = ends.logits(last)
        return softmax(logits[..., self.vocabulary]), self.to_draft[logits.argmax(-1)] >= 0

    def _entropy(self, state: Tensor, truth: Tensor, weights: Tensor, step: int) -> Tensor:
        likely = _ahead(truth, step) * self.logits(state).float().log_softmax(-1)
        return -(likely.sum(-1) * weights).sum()

    def drafts(self, text: ReadText, ends: TargetEnds, count: int) -> Tensor:
        """Greedy chains; see `TrainableHead.drafts`."""
        tokens, start = text.tokens[None], text.prompt
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        features = F.pad(text.captured[None, :-1], (0, 0, 1, 0))
        mask = chain_mask(places)
        state, entries = self.first(self.embedded(tokens, ends), features, mask, places)
        state, places = state[:, start:], places[:, start:]
        entries = Entries(
            entries.keys,
            entries.values,
            mask[:, start:],
            entries.own_keys[:, :, start:],
            entries.own_values[:, :, start:],
        )
        drafts = [self.vocabulary[self.logits(state).argmax(-1)]]
        for step in range(1, count):
            embedded, state = self.read(drafts[-1], state, ends)
            state, entries = self.further(embedded, state, entries, places + step)
            drafts.append(self.vocabulary[self.logits(state).argmax(-1)])
        return torch.stack(drafts, -1)[0]

    def config(self) -> dict[str, Any]:
        """The classic format's; layer ids in `eagle_config` count outputs, as SGLang reads them.

        vLLM reads those beside it first, and counts the layers that states enter.
        """
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.geometry.keys(),
            "draft_vocab_size": len(self.vocabulary),
            "eagle_config": {
                LAYER_IDS_KEY: list(self.capture_layers),
                "use_aux_hidden_state": True,
            },
            LAYER_IDS_KEY: [layer + 1 for layer in self.capture_layers],
            "model_type": "llama",
            "rope_scaling": None,
            "rope_theta": self.geometry.rope_theta,
        }

    def tensors(self) -> dict[str, Tensor]:
        """With the draft ids' differences to the target's ids, and which of those have one."""
        mask = self.to_draft >= 0
        ids = torch.arange(len(self.vocabulary), device=self.vocabulary.device)
        return {**super().tensors(), TOKEN_MAP: self.vocabulary - ids, TOKEN_MASK: mask}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Without what the plan has given already."""
        maps = (TOKEN_MAP, TOKEN_MASK)
        super().load({name: one for name, one in tensors.items() if name not in maps})


def chain_mask(places: Tensor) -> Tensor:
    """Which entries of step 0 each position sees, [n, t, t]: its text's up to itself.

    A text's first position has no entry; it sees itself, so that no row is empty, and nobody reads
    what comes of it.
    """
    text = (places == 0).cumsum(-1)
    row = torch.arange(places.shape[-1], device=places.device)
    visible = (text[:, :, None] == text[:, None, :]) & (row[:, None] >= row)
    return visible & ((places > 0)[:, None, :] | (row[:, None] == row))


def _ahead(values: Tensor, step: int) -> Tensor:
    """What stands `step` positions on, [n, t, ...]; past the end the last, which nobody counts."""
    at = torch.arange(values.shape[1], device=values.device) + step
    return values[:, at.clamp(max=values.shape[1] - 1)]


def default_capture_layers(num_layers: int, num_head_layers: int) -> tuple[int, ...]:
    """What published heads read; of a target too shallow for that, its first layers' outputs."""
    layers = default_layers(num_layers).outputs()
    return layers if is_rising(layers) and layers[0] >= 0 else tuple(range(min(3, num_layers)))


KINDS = (
    HeadKind(
        name=SEQUENTIAL,
        method=SEQUENTIAL,
        make=Eagle3Head,
        default_capture_layers=default_capture_layers,
        num_layers=1,
        has_more_layers=False,
        has_vocabulary=True,
        rate=1.5e-3,
    ),
)
