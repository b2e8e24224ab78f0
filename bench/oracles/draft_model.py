"""Small language models that draft: transformers' greedy choices beside openspec's drafts.

One after another, or by the rule of rows that PARD and PARD-2 publish: masks stand behind the last
token, and states of the target, of the position before, are added to the embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracles.case import Case, Sources
from bench.oracles.eagle3 import CAPTURED, NUM_DRAFTS, SEED, Context, compare, make_contexts
from bench.oracles.eagle3 import make_target as make_big
from bench.oracles.models import VOCAB, geometry, make_target

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

MASK, SCALE = VOCAB - 1, 0.125
INDICES = (-1, 1)
"""Of transformers' hidden states; the last are normed."""


class SmallModel:
    """A random model of two layers, with a mask token and a projection of states if asked."""

    def __init__(
        self, folder: Path, family: str, target: PreTrainedModel, *, masks: bool, states: bool
    ) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        self.model = make_target(folder, geometry(family, 2, hidden_size=64), SEED + 1)
        self.target, self.has_masks = target, masks
        self.projection: Tensor | None = None
        keys: dict[str, object] = {"pard_token": MASK} if masks else {}
        if states:
            width = len(INDICES) * target.config.hidden_size
            keys |= {"spd_type": "pard2", "pard2_scale": SCALE, "pard2_target_dim": width}
            keys["pard2_target_layers"] = list(INDICES)
            weight = torch.randn(64, width, generator=torch.Generator().manual_seed(SEED)) / 8
            self.projection = weight.bfloat16().float()
            tensors = load_file(folder / "model.safetensors")
            tensors["target_proj.weight"] = weight.bfloat16()
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(config))

    def chain(self, context: Context) -> list[int]:
        """The most likely token at each row that drafts."""
        import torch

        tokens = list(context.tokens)
        if not self.has_masks:
            for _ in range(NUM_DRAFTS):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            return tokens[-NUM_DRAFTS:]
        embed = self.model.get_input_embeddings()
        rows = embed(torch.tensor([tokens + [MASK] * (NUM_DRAFTS - 1)]))
        if self.projection is not None:
            said = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            states = torch.cat([said[index] for index in INDICES], -1)[0, :-1]
            before = torch.cat((torch.zeros_like(states[:1]), states))
            before = torch.cat((before, states[-1:].expand(NUM_DRAFTS - 1, -1)))
            rows = rows + SCALE * before @ self.projection.T
        logits = self.model(inputs_embeds=rows).logits[0, -NUM_DRAFTS:]
        return [int(token) for token in logits.argmax(-1)]


def small_model(
    family: str, *, masks: bool = False, states: bool = False
) -> Callable[[Path, Sources], str]:
    """Chains for a Qwen3 target."""

    def run(folder: Path, _sources: Sources) -> str:
        target = make_big(folder / "target", "qwen3")
        drafter = SmallModel(folder / "head", family, target, masks=masks, states=states)
        return compare(folder, "draft_model", drafter, make_contexts(target, CAPTURED))

    return run


RUNS = {
    "Draft model, Qwen3": small_model("qwen3"),
    "Draft model, Llama": small_model("llama"),
    "PARD": small_model("qwen3", masks=True),
    "PARD-2": small_model("qwen3", masks=True, states=True),
}
CASES = [
    Case(kind="head", format=format, oracle="transformers", run=run) for format, run in RUNS.items()
]
