"""EAGLE-3 heads: chains of speculators' own module beside openspec's, in float32.

Targets are random models of transformers, which also say what a head reads of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.oracles.case import Case, DiffersError, Sources

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from openspec import _C

NUM_CONTEXTS, SEED = 48, 5
NUM_DRAFTS, DEPTH, TOP_K, NUM_NODES = 5, 4, 4, 15
HIDDEN, HEADS, KV_HEADS, VOCAB, DRAFT_VOCAB, TARGET_LAYERS = 128, 4, 2, 256, 160, 8
HEAD_DIM = HIDDEN // HEADS
WINDOW = 24
CAPTURED = (1, 3, 4)
"""The default ones of so many layers, by their outputs."""


@dataclass(frozen=True)
class Context:
    """What a head drafts behind."""

    tokens: list[int]
    """A prompt and the token that the target adds."""
    captured: Tensor
    """[prompt tokens, captured layers * HIDDEN]"""


class Head(Protocol):
    """The authors' code with a random head, which it has written into a folder."""

    def chain(self, context: Context) -> list[int]:
        """NUM_DRAFTS tokens, or fewer where the code says no more of this context."""


def geometry(family: str, num_layers: int, **changes: object) -> PreTrainedConfig:
    """Of the target and of heads."""
    from transformers import AutoConfig

    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5 if family == "llama" else 1e-6,
        "rope_theta": 500000.0 if family == "llama" else 1e6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "attn_implementation": "eager",
        **changes,
    }
    config: PreTrainedConfig = AutoConfig.for_model(family, **fields)
    return config


def randomise(module: nn.Module, seed: int) -> None:
    """Weights that matter; all are numbers of bf16 and of fp16."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = torch.randn(weight.shape, generator=random)
            if weight.dim() == 1:
                values = 1 + 0.3 * values
            elif "mask_hidden" not in name:
                gain = 4.0 if "lm_head" in name or "embed_tokens" in name else 1.0
                values *= gain * weight.shape[-1] ** -0.5
            values = values.bfloat16().float()
            weight.copy_(torch.where(values.abs() < 2**-13, 0.0, values))


def make_target(folder: Path, family: str) -> PreTrainedModel:
    """A random target, and its folder."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(geometry(family, TARGET_LAYERS))
    model = model.float().eval().requires_grad_(False)
    randomise(model, SEED)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    return model


def token_map(seed: int) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a random draft vocabulary."""
    import torch

    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values
    marks = torch.zeros(VOCAB, dtype=torch.bool)
    marks[chosen] = True
    return chosen - torch.arange(DRAFT_VOCAB), marks


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
        import copy

        import torch
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB,
            eagle_aux_hidden_state_layer_ids=[i + 1 for i in CAPTURED],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(
                    name_or_path=str(folder.parent / "target"), architectures=["Any"]
                ),
            ),
            **fields,
        )
        self.model = Eagle3DraftModel(config).float().eval()
        randomise(self.model, SEED + 1)
        self.model.requires_grad_(False)
        self.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        self.model.d2t, self.model.t2d = token_map(SEED)
        self.window = window
        # Of a copy: RoPE's frequencies would lose their bits as well.
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(folder)

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


def make_runner(folder: Path, head: Path, method: str, depth: int, top_k: int) -> _C.Runner:
    """The core of an engine that always drafts."""
    from openspec import _C
    from openspec.config import config_from_settings
    from openspec.engine.load import load_engine

    trees = {"draft_top_k": top_k, "draft_tree_size": NUM_NODES} if top_k > 1 else {}
    settings = {
        "model": str(folder),
        "draft_model": str(head),
        "method": method,
        "num_speculative_tokens": depth,
        "adaptive_speculation": False,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 160,
        "max_num_seqs": 1,
        "num_threads": 1,
        "stats_interval_s": 0.0,
        **trees,
    }
    runner = load_engine(config_from_settings(settings))._runner  # type: ignore[attr-defined]
    assert isinstance(runner, _C.Runner)
    return runner


def step(runner: _C.Runner, slot: int, num_new: int, num_drafts: int) -> list[int]:
    """One step of one sequence; the tokens it adds."""
    lease = runner.reserve([(slot, num_new, num_drafts)])
    lease.launch()
    (result,) = lease.collect()
    lease.commit()
    return list(result.token_ids)


def drafts_behind(runner: _C.Runner, context: Context, count: int) -> list[list[int]]:
    """The paths of the drafts, from the root on."""
    from openspec import _C
    from openspec.messages import SamplingParams

    prompt = context.tokens[:-1]
    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=32)
    slot = runner.add_sequence(prompt, len(prompt), params)
    known: list[int] = []
    while not known:
        known = step(runner, slot, min(17, len(prompt) - runner.kv_len(slot)), 0)
    if known != context.tokens[-1:]:
        raise DiffersError(f"behind {prompt}: the target adds {context.tokens[-1:]}, not {known}")
    step(runner, slot, 1, count)
    (tokens,), (parents,) = runner.last_drafts(), runner.last_draft_parents()
    paths: list[list[int]] = []
    for i, token in enumerate(tokens):
        parent = parents[i] if parents else i - 1
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    runner.remove_sequence(slot)
    return paths


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


def compare(
    folder: Path, method: str, head: Head, contexts: list[Context], head_folder: Path
) -> str:
    """Chains behind all contexts."""
    runner = make_runner(folder / "target", head_folder, method, NUM_DRAFTS, 1)
    num_drafts = 0
    for context in contexts:
        expected = head.chain(context)
        found = drafts_behind(runner, context, NUM_DRAFTS)[-1][: len(expected)]
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
        return compare(folder, "eagle3", head, make_contexts(target, CAPTURED), folder / "head")

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
