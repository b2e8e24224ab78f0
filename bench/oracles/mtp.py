"""MTP heads of Qwen3.5's kind: speculators' layer over transformers' states, and openspec.

speculators trains the layer with each step's outputs in the place of all states, while engines keep
the first step's entries: so the first draft of each context is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracles import models
from bench.oracles.case import Case, Sources
from bench.oracles.eagle3 import NUM_CONTEXTS, SEED, Context, compare
from bench.oracles.models import VOCAB, geometry, randomise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SpeculatorsLayer:
    """Their layer with random weights, which it has written into a folder."""

    def __init__(self, folder: Path, target: PreTrainedModel) -> None:
        from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

        config = MTPSpeculatorConfig(
            transformer_layer_config=target.config,
            speculators_config=models.speculators_config("mtp", folder.parent / "target", 1),
        )
        self.model = MTPDraftModel(config)
        randomise(self.model, SEED + 1)
        self.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        self.model.lm_head.weight.copy_(target.get_output_embeddings().weight)
        models.save(self.model, folder)

    def chain(self, context: Context) -> list[int]:
        """Position p joins the state of token p with token p + 1, and says token p + 2."""
        import torch

        states = torch.cat((context.captured, torch.zeros(2, context.captured.shape[1])))
        logits, *_ = self.model(
            input_ids=torch.tensor([[*context.tokens, 0]]), hidden_states=states[None]
        )
        return [int(logits[0][0, len(context.captured) - 1].argmax())]


def make_contexts(target: PreTrainedModel) -> list[Context]:
    """Random prompts, the states after the final norm, and the token that the target adds."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    contexts = []
    for i in range(NUM_CONTEXTS):
        prompt = torch.randint(2, VOCAB, (1, 4 + 2 * i), generator=random)
        states = target.model(prompt).last_hidden_state[0]
        best = int(target.get_output_embeddings()(states[-1]).argmax())
        contexts.append(Context([*prompt[0].tolist(), best], states))
    return contexts


def run(folder: Path, _sources: Sources) -> str:
    """A hybrid of four layers, one of them of attention."""
    fields: dict[str, object] = {
        "head_dim": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    target = models.make_target(folder / "target", geometry("qwen3_5_text", 4, **fields), SEED)
    head = SpeculatorsLayer(folder / "head", target)
    return compare(folder, "mtp", head, make_contexts(target))


CASES = [Case(kind="head", format="MTP of Qwen3.5 (speculators)", oracle="speculators", run=run)]
