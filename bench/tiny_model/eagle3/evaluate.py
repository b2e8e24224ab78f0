"""Stage 5: how many drafts of the exported head the target accepts, in fp32.

    python -m bench.tiny_model.eagle3.evaluate --json .tiny/eagle3/evaluation.json

The target first writes its answers to held-out prompts. Speculation does not change them, greedy or
with a given random draw per position, so a draft is accepted exactly where it equals the text; and
what is drafted at a position depends on the text alone. So all positions of a text draft at once,
and walking along the text from one position to the next not yet written gives the steps that a
speculative loop makes (tests/golden compares with such a loop).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import TinyQwen3
from .export import load_head
from .generate import Texts, generate, load_prompts, load_target
from .head import AFTER_LAYERS, Eagle3Head, Entries, chain_mask
from .prompts import GROUPS, LIMITS, MODEL

LONGEST_CHAIN = 15
# Depth, top k, nodes; the first for all kinds of text, the others for greedy answers to problems.
TREES = (
    (8, 4, 15), (5, 4, 7), (6, 4, 15), (10, 4, 15), (12, 4, 15), (15, 4, 15),
    (8, 4, 31), (8, 8, 59),
)  # fmt: skip

TEMPERATURES = {"problems": (0.0, 0.6, 1.0), "thinking": (0.0, 0.6)}  # of the others: 0


class Text(NamedTuple):
    """One text of the target, and what a head sees of it."""

    tokens: Tensor  # [t]
    prompt: int
    features: Tensor  # [t, 3 * hidden]: of the position before


class TreeDrafts(NamedTuple):
    """A tree per position; parents before children, parent -1 is the text up to the position."""

    tokens: Tensor  # [t, nodes]
    parents: Tensor


def read(target: TinyQwen3, texts: Texts) -> list[Text]:
    """Features of finished texts."""
    result = []
    for row, prompt, end in zip(texts.tokens, texts.prompts, texts.ends, strict=True):
        tokens = row[: int(end)]
        _, captured = target.model(tokens[None], AFTER_LAYERS)
        features = F.pad(torch.cat(captured, -1)[0, :-1], (0, 0, 1, 0))
        result.append(Text(tokens, int(prompt), features))
    return result


class Drafting:
    """A head and its target's embeddings."""

    def __init__(self, head: Eagle3Head, vocabulary: Tensor, embedding: Tensor) -> None:
        self.head, self.vocabulary, self.embedding = head, vocabulary, embedding

    def begin(self, text: Text, steps: int) -> tuple[Tensor, Tensor, Entries]:
        """Places from the end of the prompt on, the head's states there, what drafts see there."""
        places = torch.arange(len(text.tokens))[None]
        embedded = self.embedding[text.tokens][None]
        tables = self.head.tables(places, places.shape[1])
        mask = chain_mask(places)
        state, entries = self.head.first(embedded, text.features[None], mask, tables, steps)
        start = text.prompt
        entries = Entries(
            entries.keys, entries.values, mask[:, start:],
            entries.own_keys[:, start:], entries.own_values[:, start:],
        )  # fmt: skip
        return places[:, start:], state[:, start:], entries

    def chains(self, text: Text, length: int) -> Tensor:
        """`length` drafts after each position from text.prompt on, [rows, length] target ids."""
        head = self.head
        places, state, entries = self.begin(text, length)
        drafts = [self.vocabulary[head.logits(state).argmax(-1)]]
        for step in range(1, length):
            tables = head.tables(places + step, len(text.tokens) + length)
            embedded = self.embedding[drafts[-1]]
            state, entries = head.further(embedded, state, entries, tables, torch.tensor(step))
            drafts.append(self.vocabulary[head.logits(state).argmax(-1)])
        return torch.stack(drafts, -1)[0]

    def best(self, state: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of the `count` most likely drafts."""
        scores, drafts = self.head.logits(state).log_softmax(-1).topk(count, -1)
        return scores, self.vocabulary[drafts]

    def trees(self, text: Text, depth: int, top_k: int, nodes: int) -> TreeDrafts:
        """EAGLE-2's tree after the same positions: depth - 1 passes over top_k nodes each."""
        head, attention = self.head, self.head.midlayer.self_attn
        places, state, first = self.begin(text, 1)
        places, count = places[0], places.shape[1]
        scores, tokens = self.best(state[0], top_k)  # [t, k]
        parents = torch.full_like(tokens, -1)
        frontier = torch.arange(top_k).expand(count, top_k)
        states = state[0][:, None].expand(-1, top_k, -1)  # of each frontier node's parent
        keys = values = first.keys.new_zeros(count, 0, head.config.head_dim)
        # Which drafted entries each frontier node sees, [t, k, entries].
        seen = torch.zeros(count, top_k, 0, dtype=torch.bool)
        all_scores, all_tokens, all_parents = [scores], [tokens], [parents]
        for level in range(1, depth):
            read_tokens = torch.cat(all_tokens, 1).gather(1, frontier)
            tables = head.tables(
                (places + level)[:, None].expand(-1, top_k), len(text.tokens) + depth
            )
            x = head.midlayer.inputs(self.embedding[read_tokens], states)
            query, key, value = attention.project(x, tables)
            keys, values = torch.cat((keys, key), 1), torch.cat((values, value), 1)
            own = torch.eye(top_k, dtype=torch.bool).expand(count, -1, -1)
            seen = torch.cat((seen, own), 2)
            to_text = (query.flatten(1, 2) @ first.keys[0].T).unflatten(1, (top_k, -1))
            to_text = to_text.masked_fill(~first.mask[0][:, None, None], -torch.inf)
            to_drafts = torch.einsum("tkhd,ted->tkhe", query, keys)
            to_drafts = to_drafts.masked_fill(~seen[:, :, None], -torch.inf)
            weights = (torch.cat((to_text, to_drafts), -1) * attention.width**-0.5).softmax(-1)
            to_text, to_drafts = weights.split((len(text.tokens), keys.shape[1]), -1)
            mixed = to_text @ first.values[0] + torch.einsum("tkhe,ted->tkhd", to_drafts, values)
            states = head.midlayer.outputs(states, mixed.flatten(2))
            step_scores, tokens = self.best(states, top_k)  # [t, k, k]
            base = sum(part.shape[1] for part in all_tokens)
            scores = torch.cat(all_scores, 1).gather(1, frontier)[:, :, None] + step_scores
            all_scores.append(scores.flatten(1))
            all_tokens.append(tokens.flatten(1))
            all_parents.append(frontier.repeat_interleave(top_k, 1))
            chosen = scores.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            frontier, row = base + chosen, chosen // top_k
            states = states.gather(1, row[..., None].expand(-1, -1, states.shape[-1]))
            seen = seen.gather(1, row[..., None].expand(-1, -1, seen.shape[-1]))
        order = torch.cat(all_scores, 1).sort(dim=1, descending=True, stable=True).indices
        kept = order[:, :nodes].sort(1).values
        made = sum(part.shape[1] for part in all_tokens)
        place = torch.full((count, made + 1), -1)  # what is not kept, and last the root
        place.scatter_(1, kept, torch.arange(nodes).expand(count, -1))
        parents = torch.cat(all_parents, 1).gather(1, kept) % (made + 1)
        return TreeDrafts(torch.cat(all_tokens, 1).gather(1, kept), place.gather(1, parents))


def chain_hits(text: Text, drafts: Tensor) -> np.ndarray:
    """How many drafts after each position from text.prompt on the text confirms."""
    longest = drafts.shape[1]
    ahead = F.pad(text.tokens[text.prompt + 1 :], (0, longest), value=-1).unfold(0, longest, 1)
    return (drafts == ahead).long().cumprod(1).sum(1).cpu().numpy()


def tree_hits(text: Text, trees: TreeDrafts) -> np.ndarray:
    """The same for trees."""
    written = text.tokens[text.prompt :].tolist()
    hits = np.zeros(len(written), dtype=np.int64)
    for at, (tokens, parents) in enumerate(
        zip(trees.tokens.tolist(), trees.parents.tolist(), strict=True)
    ):
        # Depth of every node on the text's path, 0 if it is off it.
        depths: list[int] = []
        for token, parent in zip(tokens, parents, strict=True):
            depth = 1 if parent < 0 else depths[parent] + 1 if depths[parent] else 0
            is_text = at + depth < len(written) and written[at + depth] == token
            depths.append(depth if is_text else 0)
        hits[at] = max(depths)
    return hits


def walk(hits: np.ndarray, most: int) -> tuple[int, int]:
    """Steps, and tokens made by them, from the first token that a drafter can follow."""
    at, steps = 0, 0
    while at + 1 < len(hits):
        at += min(int(hits[at]), most) + 1
        steps += 1
    return steps, len(hits) - 1


def mean_length(hits: list[np.ndarray], most: int) -> float:
    """Tokens per step, the target's own one included."""
    walked = [walk(hit, most) for hit in hits]
    return sum(tokens for _, tokens in walked) / max(1, sum(steps for steps, _ in walked))


def conditional(hits: list[np.ndarray], longest: int) -> list[float]:
    """Of the drafts at place i whose predecessors were right, the share that is; all positions.

    Positions so near the end that there is no text to compare with are left out.
    """
    reached, right = np.zeros(longest), np.zeros(longest)
    for hit in hits:
        room = len(hit) - 1 - np.arange(len(hit))
        for place in range(longest):
            counted = (hit >= place) & (room > place)
            reached[place] += counted.sum()
            right[place] += (hit[counted] > place).sum()
    return [float(share) for share in right / np.maximum(reached, 1)]


def evaluate(drafting: Drafting, texts: list[Text], trees: bool) -> dict[str, Any]:
    """All figures of one kind of text."""
    chains = [chain_hits(text, drafting.chains(text, LONGEST_CHAIN)) for text in texts]
    written = torch.cat([text.tokens[text.prompt :] for text in texts])
    covered = torch.isin(written, drafting.vocabulary).float().mean()
    lengths = (*range(1, 9), LONGEST_CHAIN)
    figures: dict[str, Any] = {
        "texts": len(texts),
        "new_tokens": len(written),
        "in_draft_vocabulary": round(float(covered), 4),
        "conditional_acceptance": [round(x, 3) for x in conditional(chains, 8)],
        "chain": {k: round(mean_length(chains, k), 3) for k in lengths},
    }  # fmt: skip
    for depth, top_k, nodes in TREES if trees else TREES[:1]:
        hits = [tree_hits(text, drafting.trees(text, depth, top_k, nodes)) for text in texts]
        name = f"tree depth {depth}, top {top_k}, {nodes} nodes"
        figures[name] = round(mean_length(hits, nodes), 3)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--head", type=Path, default=MODEL / "eagle3")
    parser.add_argument("--data", type=Path, default=Path(".tiny/eagle3"))
    parser.add_argument("--json", type=Path, help="where to record the figures")
    parser.add_argument(
        "--texts", type=int, default=64, help="problems; half as many of the others"
    )
    parser.add_argument("--kinds", default=",".join(GROUPS), help="of prompts")
    args = parser.parse_args()
    target = load_target(args.model, torch.device("cpu"), torch.float32)
    head, vocabulary = load_head(args.head)
    drafting = Drafting(head, vocabulary, target.model.embed_tokens.weight)
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    prompts = load_prompts(args.data / "held_out.npz")
    for name in args.kinds.split(","):
        count = args.texts if name in TEMPERATURES else args.texts // 2
        for temperature in TEMPERATURES.get(name, (0.0,)):
            asked = prompts[name][:count]
            warmth = torch.full((len(asked),), temperature)
            with torch.no_grad():
                texts = read(target, generate(target, asked, LIMITS[name], warmth))
                kind = f"{name}, temperature {temperature:g}"
                result[kind] = evaluate(drafting, texts, trees=kind == "problems, temperature 0")
            print(kind, json.dumps(result[kind]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
