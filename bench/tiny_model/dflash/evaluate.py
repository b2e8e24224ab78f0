"""Stage 5: how many drafts of the exported heads the target accepts, in fp32.

    python -m bench.tiny_model.dflash.evaluate --json .tiny/dflash/evaluation.json

As for the EAGLE-3 head, the target's own texts are walked along, all positions of a text drafting
at once. Drafts are the head's most likely ones, also for sampled texts. On a GPU it takes a minute.
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

from ..eagle3.evaluate import TEMPERATURES, TreeDrafts, chain_hits, conditional, mean_length
from ..eagle3.generate import Texts, generate, load_prompts, load_target
from ..eagle3.prompts import GROUPS, LIMITS, MODEL
from ..model import TinyQwen3
from .export import load_head
from .head import AFTER_LAYERS, LAYOUTS, BlockHead, block_ids, block_layer, context_entries

CHAINS = (3, 7, 15)
TREES = (15, 31, 63, 127)  # nodes
TOP_K = 8  # children of a node at most
BLOCKS_AT_ONCE = 96


class Text(NamedTuple):
    """One text of the target, and what a head sees of it."""

    tokens: Tensor  # [t]
    prompt: int
    captured: Tensor  # [t, states * hidden]


def read(target: TinyQwen3, texts: Texts) -> list[Text]:
    """Captured states of finished texts."""
    result = []
    for row, prompt, end in zip(texts.tokens, texts.prompts, texts.ends, strict=True):
        tokens = row[: int(end)]
        _, captured = target.model(tokens[None], AFTER_LAYERS)
        result.append(Text(tokens, int(prompt), torch.cat(captured, -1)[0]))
    return result


class Drafting:
    """A head and its target's embeddings."""

    def __init__(self, head: BlockHead, embedding: Tensor) -> None:
        self.head, self.embedding = head, embedding

    def states(self, text: Text, num_drafts: int) -> Tensor:
        """Normed states [rows, num_drafts, hidden] of the blocks from text.prompt on."""
        head, length = self.head, len(text.tokens)
        rows = num_drafts + (not head.layout.is_anchor_first)
        places = torch.arange(length, device=text.tokens.device)
        context, context_tables = head.context(text.captured)[None], head.tables(places, length)
        entries = [context_entries(layer, context, context_tables) for layer in head.layers]
        parts = []
        for anchors in places[text.prompt :].split(BLOCKS_AT_ONCE):
            tables = head.tables(
                anchors[None, :, None] + places.new_tensor(range(rows)), length + rows
            )
            seen = (places < anchors[:, None])[None]
            x = self.embedding[block_ids(text.tokens[anchors], rows)][None]
            for layer, of_layer in zip(head.layers, entries, strict=True):
                x = block_layer(layer, x, tables, of_layer, seen)
            parts.append(head.drafting_rows(x)[0])
        return torch.cat(parts)

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Scores [..., vocabulary] of places with these states after these tokens."""
        return self.head.logits(states, before, self.embedding)

    def chains(self, text: Text, num_drafts: int) -> Tensor:
        """Drafts after each position from text.prompt on, [rows, num_drafts]."""
        drafts = [text.tokens[text.prompt :]]
        for states in self.states(text, num_drafts).unbind(1):
            drafts.append(self.logits(states, drafts[-1]).argmax(-1))
        return torch.stack(drafts[1:], -1)

    def trees(self, text: Text, depth: int, top_k: int, nodes: int) -> TreeDrafts:
        """The best-scored paths after the same positions, best first.

        A path's score is the sum of its tokens' log-probabilities, each at its own place. A Markov
        head scores the best tokens of a place behind their parent, as though all other tokens were
        as likely as before; at the first place, where that parent is known, it scores all tokens.
        """
        states = self.states(text, depth)
        count, device = len(states), states.device
        row = torch.arange(count, device=device)
        logits = states @ self.embedding.T
        logits[:, 0] = self.logits(states[:, 0], text.tokens[text.prompt :])
        fixed = logits.log_softmax(-1).topk(top_k, -1)

        def children(place: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            best, ids = fixed.values[row, place], fixed.indices[row, place]
            if self.head.layout.selector_rank:
                scores = self.logits(states[row, place], before)
                return scores.log_softmax(-1).topk(top_k, -1)
            if not self.head.layout.markov_rank:
                return best, ids
            state = states[row, place]
            bias = self.logits(state, before) - state @ self.embedding.T
            bent = best + bias.gather(-1, ids)
            total = 1 - best.exp().sum(-1) + bent.exp().sum(-1)
            best, order = (bent - total.log()[:, None]).sort(dim=-1, descending=True, stable=True)
            return best, ids.gather(-1, order)

        # Candidates: the children of the text and of every node taken so far.
        scores = states.new_full((count, (nodes + 1) * top_k), -torch.inf)
        tokens = row.new_zeros(scores.shape)
        tree = TreeDrafts(row.new_zeros(count, nodes), row.new_zeros(count, nodes))
        depths = row.new_zeros(count, nodes + 1)  # last the text's own, 0
        scores[:, :top_k], tokens[:, :top_k] = fixed.values[:, 0], fixed.indices[:, 0]
        for node in range(nodes):
            score, chosen = scores.max(-1)
            parent = chosen // top_k - 1
            token = tokens[row, chosen]
            tree.tokens[:, node], tree.parents[:, node] = token, parent
            level = depths[row, parent] + 1
            depths[:, node] = level
            scores[row, chosen] = -torch.inf
            room = slice((node + 1) * top_k, (node + 2) * top_k)
            more, tokens[:, room] = children(level.clamp(max=depth - 1), token)
            more = score[:, None] + more
            scores[:, room] = more.masked_fill((level == depth)[:, None], -torch.inf)
        return tree


def tree_hits(text: Text, tree: TreeDrafts, sizes: tuple[int, ...]) -> dict[int, np.ndarray]:
    """How many drafts after each position the text confirms, of the first nodes of every size."""
    written = text.tokens[text.prompt :]
    count, nodes = tree.tokens.shape
    row = torch.arange(count, device=written.device)
    ahead = F.pad(written, (0, nodes + 1), value=-1)
    # Depth of every node on the text's path, -1 off it; last the text's own.
    depths = row.new_full((count, nodes + 1), -1)
    depths[:, -1] = 0
    for node in range(nodes):
        above = depths[row, tree.parents[:, node]]
        is_text = (above >= 0) & (tree.tokens[:, node] == ahead[row + above + 1])
        depths[:, node] = torch.where(is_text, above + 1, -1)
    return {size: depths[:, :size].amax(1).clamp(min=0).cpu().numpy() for size in sizes}


def evaluate(drafting: Drafting, texts: list[Text], sizes: tuple[int, ...]) -> dict[str, Any]:
    """All figures of one kind of text; trees of `sizes` nodes."""
    chains = {
        count: [chain_hits(text, drafting.chains(text, count)) for text in texts]
        for count in CHAINS
    }
    longest = max(CHAINS)
    trees = [
        tree_hits(text, drafting.trees(text, longest, TOP_K, max(sizes)), sizes) for text in texts
    ]
    return {
        "texts": len(texts),
        "new_tokens": sum(len(text.tokens) - text.prompt for text in texts),
        "conditional_acceptance": [round(x, 3) for x in conditional(chains[longest], longest)],
        "chain": {k: round(mean_length(hits, k), 3) for k, hits in chains.items()},
        "tree": {
            size: round(mean_length([hits[size] for hits in trees], longest), 3) for size in sizes
        },
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--heads", type=Path, default=MODEL, help="where their folders are")
    parser.add_argument("--data", type=Path, default=Path(".tiny/eagle3"))
    parser.add_argument("--json", type=Path, help="where to record the figures")
    parser.add_argument(
        "--texts", type=int, default=48, help="problems; half as many of the others"
    )
    parser.add_argument("--kinds", default=",".join(GROUPS), help="of prompts")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(args.model, device, torch.float32)
    embedding = target.model.embed_tokens.weight
    heads = {
        name: Drafting(load_head(layout, args.heads / name).to(device), embedding)
        for name, layout in LAYOUTS.items()
        if (args.heads / name).is_dir()
    }
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    prompts = load_prompts(args.data / "held_out.npz")
    for name in args.kinds.split(","):
        count = args.texts if name in TEMPERATURES else args.texts // 2
        for temperature in TEMPERATURES.get(name, (0.0,)):
            asked = prompts[name][:count]
            warmth = torch.full((len(asked),), temperature, device=device)
            kind = f"{name}, temperature {temperature:g}"
            sizes = TREES if name == "problems" else TREES[:1]
            with torch.no_grad():
                texts = read(target, generate(target, asked, LIMITS[name], warmth))
                result[kind] = {
                    head: evaluate(drafting, texts, sizes) for head, drafting in heads.items()
                }
            print(kind, json.dumps(result[kind]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
