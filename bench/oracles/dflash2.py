"""DFlash2 heads: drafts of speculators' and z-lab's own modules beside openspec's, in float32.

The target is a random Qwen3 of transformers, which also says what the head reads of it. A tree
grows best first over the log-probabilities that the authors' selector gives its candidates behind
each token; how it grows is openspec's own rule.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.oracles import models
from bench.oracles.case import Case, DiffersError, Sources
from bench.oracles.engine import Path_, drafts_after, make_runner
from bench.oracles.models import VOCAB, randomise

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3Config, Qwen3ForCausalLM

NUM_CONTEXTS, SEED = 48, 11
NUM_DRAFTS, TOP_K, NUM_NODES = 7, 4, 15
WINDOW = 24
TARGET_LAYERS, DRAFT_LAYERS, BLOCK = 6, 3, 8
MASK = VOCAB - 1
CAPTURED = [0, 2, 4]
"""Layers of the target, from 0, whose outputs the head reads."""
SELECTOR = {"selector_rank": 24, "selector_top_k": 16}
PARTS = {"conv_kernel_size": 2, "conv_group_size": 16, **SELECTOR}


class Head(Protocol):
    """The authors' code with a random head."""

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """Final states [NUM_DRAFTS, hidden] of the rows that draft after `token`; captured
        [tokens, len(CAPTURED) * hidden] is of all tokens before it."""

    def behind(self, state: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """Candidates of a row, and the logarithms of their chances behind a token."""


def geometry(num_layers: int, window: int = 0) -> Qwen3Config:
    """Of the target and of heads; with a window all layers but the last one slide."""
    types = ["sliding_attention"] * (num_layers - 1) if window else []
    sliding = {"use_sliding_window": True, "sliding_window": window} if window else {}
    return models.geometry(
        "qwen3",
        num_layers,
        layer_types=types + ["full_attention"] * (num_layers - len(types)),
        hidden_size=64,
        intermediate_size=96,
        **sliding,
    )


def make_target(folder: Path) -> Qwen3ForCausalLM:
    """A random target, and its folder."""
    return models.make_target(folder, geometry(TARGET_LAYERS), SEED)


# ---- The authors' code ---------------------------------------------------------------------------


class SpeculatorsHead:
    """speculators' draft model; it drafts nothing itself, so the walk over its selector is here."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, window: int = 0) -> None:
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

        config = DFlash2SpeculatorConfig(
            transformer_layer_config=geometry(DRAFT_LAYERS, window),
            draft_vocab_size=VOCAB,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[layer + 1 for layer in CAPTURED],
            mask_token_id=MASK,
            speculators_config=models.speculators_config(
                "dflash2", folder.parent / "target", NUM_DRAFTS
            ),
            **PARTS,
        )
        self.model = DFlash2DraftModel(config)
        randomise(self.model, SEED + 1)
        self.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        self.model.lm_head.weight.copy_(target.lm_head.weight)
        models.save(self.model, folder)

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """As `_backbone_forward` runs one block, of which only what follows the anchor counts."""
        import torch

        model, count = self.model, NUM_DRAFTS + 1
        anchor = len(captured)
        x = model.embed_tokens(torch.tensor([[token] + [MASK] * (count - 1)]))
        # Its masks take the anchor for a token of the text, which no block sees.
        captured = torch.cat((captured, torch.zeros_like(captured[:1])))
        context = model.hidden_norm(model.fc(captured[None]))
        positions = torch.cat((torch.arange(anchor + 1), anchor + torch.arange(count)))[None]
        for index, layer in enumerate(model.layers):
            slides = index in model.sliding_window_indices
            x = layer(
                hidden_states=x,
                target_hidden=context,
                attention_mask=model._create_attention_mask(
                    torch.zeros(1, anchor + 1, dtype=torch.long),
                    anchor + 1,
                    torch.tensor([anchor]),
                    torch.device("cpu"),
                    model.sliding_window if slides else None,
                    model.sliding_window_non_causal,
                ).float(),
                position_ids=positions,
                use_cache=False,
                position_embeddings=model.rotary_emb(captured, positions),
            )
        return model.norm(x)[0, 1:]

    def behind(self, state: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """By its selector."""
        import torch

        logits = self.model.lm_head(state)
        ids, scores = self.model.candidate_selector.select(
            logits[None], state[None], torch.tensor([before])
        )
        return ids[0], scores[0].log_softmax(-1)


class ZlabHead:
    """z-lab's model, whose selector gives its chances where it samples."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, source: Path) -> None:
        import torch
        from safetensors.torch import save_file

        sys.path.insert(0, str(source))
        from dflash.model import DFlash2DraftModel

        config = geometry(DRAFT_LAYERS)
        config.architectures = ["DFlash2DraftModel"]
        config.block_size = BLOCK
        config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": CAPTURED, **PARTS}
        self.model = DFlash2DraftModel(config)
        randomise(self.model, SEED + 2)
        self.target = target
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config.to_dict()))
        # Published files name the codebooks without ".weight"; from_pretrained maps them.
        tensors = {
            name.replace("codebook.weight", "codebook"): weight.to(torch.bfloat16)
            for name, weight in self.model.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors")

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """As `dflash_generate` runs a block, without a cache."""
        import torch

        block = torch.tensor([[token] + [MASK] * NUM_DRAFTS])
        return self.model(
            target_hidden=captured[None],
            noise_embedding=self.target.model.embed_tokens(block),
            position_ids=torch.arange(len(captured) + NUM_DRAFTS + 1)[None],
        )[0, 1:]

    def behind(self, state: Tensor, before: int) -> tuple[Tensor, Tensor]:
        """By its selector, which sorts its candidates by nothing."""
        import torch

        _, ids, chances = self.model.propose(
            state[None, None], torch.tensor([before]), self.target.lm_head, temperature=1.0
        )
        return ids[0, 0], chances[0, 0].log()

    def path(self, rows: Tensor, token: int) -> list[int]:
        """Its own greedy walk."""
        import torch

        drafts, *_ = self.model.propose(
            rows[None], torch.tensor([token]), self.target.lm_head, temperature=0.0
        )
        return list(drafts[0].tolist())


def walk(head: Head, rows: Tensor, token: int) -> list[int]:
    """The likeliest candidate of every row, given the one before."""
    path = [token]
    for state in rows:
        ids, scores = head.behind(state, path[-1])
        path.append(int(ids[scores.argmax()]))
    return path[1:]


def likeliest(length: int, children: Callable[[Path_], list[tuple[float, int]]]) -> set[Path_]:
    """The likeliest NUM_NODES paths of at most `length`, by the scores and tokens behind each."""
    found: set[Path_] = set()
    waiting: list[tuple[float, Path_]] = [(0.0, ())]
    while waiting and len(found) <= NUM_NODES:
        cost, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) < length:
            for score, child in children(path):
                heapq.heappush(waiting, (cost - score, (*path, child)))
    return found - {()}


def grow(head: Head, rows: Tensor, token: int) -> set[Path_]:
    """With TOP_K candidates behind each."""

    def children(path: Path_) -> list[tuple[float, int]]:
        ids, scores = head.behind(rows[len(path)], path[-1] if path else token)
        best = scores.topk(TOP_K)
        return list(zip(best.values.tolist(), ids[best.indices].tolist(), strict=True))

    return likeliest(len(rows), children)


def compare(
    folder: Path,
    target: Qwen3ForCausalLM,
    head: Any,
    walk: Callable[[Any, Tensor, int], list[int]] = walk,
    grow: Callable[[Any, Tensor, int], set[Path_]] = grow,
    method: str = "dflash",
) -> str:
    """Chains and trees after NUM_CONTEXTS prompts, most of them longer than a window."""
    import torch

    places = (folder / "target", folder / "head", method, NUM_DRAFTS)
    chains = make_runner(*places)
    trees = make_runner(*places, draft_top_k=TOP_K, draft_tree_size=NUM_NODES)
    random = torch.Generator().manual_seed(SEED)
    for index in range(NUM_CONTEXTS):
        prompt = torch.randint(2, VOCAB - 2, (3 + 4 * index,), generator=random)
        states = target(prompt[None], output_hidden_states=True).hidden_states
        captured = torch.cat([states[layer + 1][0] for layer in CAPTURED], -1)
        token, paths = drafts_after(chains, prompt.tolist(), NUM_DRAFTS)
        rows = head.rows(captured, token)
        expected = walk(head, rows, token)
        if hasattr(head, "path") and head.path(rows, token) != expected:
            raise DiffersError(f"prompt {index}: the authors' walk is not that of their chances")
        if list(paths[-1]) != expected:
            raise DiffersError(f"prompt {index}: chain {paths[-1]}, theirs {expected}")
        again, paths = drafts_after(trees, prompt.tolist(), NUM_NODES)
        if again != token or set(paths) != grow(head, rows, token):
            raise DiffersError(f"prompt {index}: another tree")
    return f"{NUM_CONTEXTS} of {NUM_CONTEXTS} chains and trees equal"


def run_speculators(folder: Path, _: Sources) -> str:
    """The head as speculators saves it."""
    target = make_target(folder / "target")
    return compare(folder, target, SpeculatorsHead(folder / "head", target))


def run_sliding(folder: Path, _: Sources) -> str:
    """The same with layers that see the last WINDOW tokens before a block."""
    target = make_target(folder / "target")
    return compare(folder, target, SpeculatorsHead(folder / "head", target, WINDOW))


def run_zlab(folder: Path, sources: Sources) -> str:
    """The head as z-lab publishes them; its code has no package."""
    source = sources.folder("z-lab")
    target = make_target(folder / "target")
    return compare(folder, target, ZlabHead(folder / "head", target, source))


CASES = (
    Case(kind="head", format="DFlash2, speculators", oracle="speculators", run=run_speculators),
    Case(
        kind="head",
        format="DFlash2, speculators, sliding layers",
        oracle="speculators",
        run=run_sliding,
    ),
    Case(kind="head", format="DFlash2, z-lab", oracle="z-lab", run=run_zlab),
)
