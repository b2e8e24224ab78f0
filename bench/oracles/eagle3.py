"""EAGLE-3 heads: chains of speculators' own module beside openspec's, in float32.

Targets are random models of transformers, which also say what a head reads of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.oracles import models
from bench.oracles.case import Case, DiffersError, Sources
from bench.oracles.engine import Path_, drafts_after, make_runner
from bench.oracles.models import DRAFT_VOCAB, VOCAB, geometry, randomise, token_map

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from openspec import _C

NUM_CONTEXTS, SEED = 48, 5
NUM_DRAFTS, DEPTH, TOP_K, NUM_NODES = 5, 4, 4, 15
TARGET_LAYERS, WINDOW = 8, 24
CAPTURED = (1, 3, 4)
"""The default ones of so many layers, by their outputs."""


@dataclass(frozen=True)
class Context:
    """What a head drafts behind."""

    tokens: list[int]
    """A prompt and the token that the target adds."""
    captured: Tensor
    """[prompt tokens, captured layers * hidden]"""


class Head(Protocol):
    """The authors' code with a random head, which it has written into a folder."""

    def chain(self, context: Context) -> list[int]:
        """NUM_DRAFTS tokens, or fewer where the code says no more of this context."""


def make_target(folder: Path, family: str) -> PreTrainedModel:
    """A random target, and its folder."""
    return models.make_target(folder, geometry(family, TARGET_LAYERS), SEED)


# ---- The authors' code ---------------------------------------------------------------------------


class SpeculatorsHead:
    """speculators' draft model: each step of its training-time test is one of a chain."""

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel,
        layer: PreTrainedConfig,
        window: int = 0,
        **fields: object,
    ) -> None:
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_aux_hidden_state_layer_ids=[i + 1 for i in CAPTURED],
            speculators_config=models.speculators_config(
                "eagle3", folder.parent / "target", NUM_DRAFTS
            ),
            **fields,
        )
        self.model = Eagle3DraftModel(config)
        randomise(self.model, SEED + 1)
        self.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        self.model.d2t, self.model.t2d = token_map(SEED)
        self.window = window
        models.save(self.model, folder)

    def chain(self, context: Context) -> list[int]:
        """Step s of the last row reads the draft before it.

        The mask of these steps keeps the window of their first row, while engines let it follow
        the row: where it matters, only the first draft is told.
        """
        import torch

        known = len(context.captured)
        count = NUM_DRAFTS if not self.window or known + NUM_DRAFTS < self.window else 1
        captured = torch.cat((context.captured, torch.zeros(count, context.captured.shape[1])))
        drafts: list[int] = []
        while len(drafts) < count:
            padded = (context.tokens[1:] + drafts + [0] * count)[: known + count]
            steps = self.model(
                hidden_states=captured[None],
                input_ids=torch.tensor([padded]),
                document_ids=torch.zeros(1, known + count, dtype=torch.long),
                ttt_steps=len(drafts) + 1,
            )
            column = int(steps[-1][0, known - 1])
            drafts.append(column + int(self.model.d2t[column]))
        return drafts


# ---- openspec ------------------------------------------------------------------------------------


def drafts_behind(runner: _C.Runner, context: Context, count: int) -> list[Path_]:
    """The paths of the drafts, from the root on."""
    token, paths = drafts_after(runner, context.tokens[:-1], count)
    if token != context.tokens[-1]:
        raise DiffersError(f"after {context.tokens[:-1]}: the target adds another token, {token}")
    return paths


def check_trees(
    folder: Path,
    method: str,
    contexts: list[Context],
    tree: Callable[[Context], set[Path_]],
    top_k: int = TOP_K,
) -> str:
    """Trees of NUM_NODES behind all contexts, of the head in `folder`/head."""
    shape = {"draft_top_k": top_k, "draft_tree_size": NUM_NODES}
    runner = make_runner(folder / "target", folder / "head", method, DEPTH, **shape)
    for context in contexts:
        if set(drafts_behind(runner, context, NUM_NODES)) != tree(context):
            raise DiffersError(f"behind {len(context.captured)} tokens: another tree")
    return f"so are all nodes of {len(contexts)} trees of {NUM_NODES}"


def make_contexts(target: PreTrainedModel, layers: tuple[int, ...]) -> list[Context]:
    """Random prompts of many lengths, and what the target makes of them."""
    import torch

    random = torch.Generator().manual_seed(SEED)
    contexts = []
    for i in range(NUM_CONTEXTS):
        prompt = torch.randint(2, VOCAB, (1, 4 + 2 * i), generator=random)
        said = target(prompt, output_hidden_states=True)
        captured = torch.cat([said.hidden_states[layer + 1] for layer in layers], -1)[0]
        best = int(said.logits[0, -1].argmax())
        contexts.append(Context([*prompt[0].tolist(), best], captured))
    return contexts


def compare(folder: Path, method: str, head: Head, contexts: list[Context]) -> str:
    """Chains behind all contexts, of the head in `folder`/head."""
    runner = make_runner(folder / "target", folder / "head", method, NUM_DRAFTS)
    num_drafts = 0
    for context in contexts:
        expected = head.chain(context)
        found = list(drafts_behind(runner, context, NUM_DRAFTS)[-1])[: len(expected)]
        if found != expected:
            raise DiffersError(f"behind {len(context.captured)} tokens: {found}, not {expected}")
        num_drafts += len(expected)
    return f"{num_drafts} drafts in chains after {len(contexts)} contexts are equal"


def speculators(
    family: str, num_layers: int = 1, window: int = 0, **fields: object
) -> Callable[[Path, Sources], str]:
    """A head of speculators: chains."""

    def run(folder: Path, sources: Sources) -> str:
        target = make_target(folder / "target", family)
        keys: dict[str, object] = {}
        if window:
            types = ["full_attention"] * (num_layers - 1) + ["sliding_attention"]
            keys = {"layer_types": types, "sliding_window": window}
            keys |= {"use_sliding_window": True}
        layer = geometry(family, num_layers, **keys)
        head = SpeculatorsHead(folder / "head", target, layer, window, **fields)
        return compare(folder, "eagle3", head, make_contexts(target, CAPTURED))

    return run


def case(format: str, oracle: str, run: Callable[[Path, Sources], str]) -> Case:
    """A row of the table."""
    return Case(kind="head", format=format, oracle=oracle, run=run)


OF_SPECULATORS = {
    "EAGLE-3 head of Llama, safetensors (speculators)": speculators(
        "llama", norm_before_residual=True
    ),
    "EAGLE-3 head of Qwen3 (speculators)": speculators("qwen3"),
    "EAGLE-3, sliding window": speculators("qwen3", 2, WINDOW),
    "EAGLE-3.1, fc_norm": speculators("llama", fc_norm=True, norm_output=True),
    "EAGLE-3, norm_before_fc": speculators("llama", norm_before_fc=True),
    "EAGLE-3, norm_output": speculators("qwen3", norm_output=True),
    "EAGLE-3, two layers": speculators("llama", 2, norm_before_residual=True),
}
CASES = [case(format, "speculators", run) for format, run in OF_SPECULATORS.items()]
