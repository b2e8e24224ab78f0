"""DFlash2 heads: drafts of speculators' and z-lab's own modules beside openspec's, in float32.

The target is a random Qwen3 of transformers, which also says what the head reads of it. A tree
grows best first over the log-probabilities that the authors' selector gives its candidates behind
each token; how it grows is openspec's own rule.
"""

from __future__ import annotations

import copy
import heapq
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.oracles.case import Case, DiffersError, Sources

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from openspec import _C

NUM_CONTEXTS, SEED = 48, 11
NUM_DRAFTS, TOP_K, NUM_NODES = 7, 4, 15
WINDOW = 24
HIDDEN, VOCAB, TARGET_LAYERS, DRAFT_LAYERS, BLOCK = 64, 256, 6, 3, 8
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
    from transformers import Qwen3Config

    types = ["sliding_attention"] * (num_layers - 1) if window else []
    sliding = {"use_sliding_window": True, "sliding_window": window} if window else {}
    return Qwen3Config(
        layer_types=types + ["full_attention"] * (num_layers - len(types)),
        **sliding,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        rope_theta=1e6,
        tie_word_embeddings=False,
        attn_implementation="eager",
        torch_dtype="bfloat16",
    )


def randomise(module: nn.Module, seed: int) -> None:
    """Weights that matter, all of them numbers of bf16."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = torch.randn(weight.shape, generator=random)
            if weight.dim() == 1:
                values = 1 + 0.2 * values
            elif name.endswith("base_kernel"):
                values = 0.3 * values
                values[:, 0] += 1
            elif "codebook" not in name:
                gain = 4.0 if name.startswith(("lm_head", "model.embed")) else 1.0
                values *= gain * weight.shape[-1] ** -0.5
            weight.copy_(values.bfloat16().float())


def make_target(folder: Path) -> Qwen3ForCausalLM:
    """A random target, and its folder."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(geometry(TARGET_LAYERS)).float().eval()
    randomise(model, SEED)
    stored = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    stored.load_state_dict(model.state_dict())
    stored.save_pretrained(folder)
    return model.requires_grad_(False)


# ---- The authors' code ---------------------------------------------------------------------------


class SpeculatorsHead:
    """speculators' draft model; it drafts nothing itself, so the walk over its selector is here."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, window: int = 0) -> None:
        import torch
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        config = DFlash2SpeculatorConfig(
            transformer_layer_config=geometry(DRAFT_LAYERS, window),
            draft_vocab_size=VOCAB,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[layer + 1 for layer in CAPTURED],
            mask_token_id=MASK,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash2",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTS)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(
                    name_or_path=str(folder.parent / "target"),
                    architectures=["Qwen3ForCausalLM"],
                ),
            ),
            **PARTS,
        )
        self.model = DFlash2DraftModel(config).float().eval()
        randomise(self.model, SEED + 1)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
            self.model.lm_head.weight.copy_(target.lm_head.weight)
        self.model.requires_grad_(False)
        # Of a copy: RoPE's frequencies would lose their bits as well.
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(folder)

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
        self.model = DFlash2DraftModel(config).float().eval()
        randomise(self.model, SEED + 2)
        self.model.requires_grad_(False)
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


def grow(head: Head, rows: Tensor, token: int) -> set[tuple[int, ...]]:
    """The likeliest NUM_NODES paths, TOP_K candidates behind each."""
    found: set[tuple[int, ...]] = set()
    waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while waiting and len(found) <= NUM_NODES:
        cost, path = heapq.heappop(waiting)
        found.add(path)
        if len(path) == len(rows):
            continue
        ids, scores = head.behind(rows[len(path)], path[-1] if path else token)
        best = scores.topk(TOP_K)
        for score, at in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            heapq.heappush(waiting, (cost - score, (*path, int(ids[at]))))
    return found - {()}


# ---- openspec ------------------------------------------------------------------------------------


def make_runner(target: Path, head: Path, **options: int) -> _C.Runner:
    """An engine core that always drafts."""
    from openspec import _C
    from openspec.config import config_from_settings
    from openspec.engine.load import load_engine

    core = load_engine(
        config_from_settings(
            {
                "model": str(target),
                "draft_model": str(head),
                "method": "dflash",
                "num_speculative_tokens": NUM_DRAFTS,
                "adaptive_speculation": False,
                "device": "cpu",
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_seqs": 1,
                "num_threads": 1,
                "stats_interval_s": 0.0,
                "method_options": options,
            }
        )
    )
    runner = core._runner  # type: ignore[attr-defined]
    assert isinstance(runner, _C.Runner)
    return runner


def step(runner: _C.Runner, slot: int, num_new: int, num_drafts: int) -> list[int]:
    """One step of one sequence; the tokens it adds."""
    lease = runner.reserve([(slot, num_new, num_drafts)])
    lease.launch()
    (result,) = lease.collect()
    lease.commit()
    return list(result.token_ids)


def drafts_after(
    runner: _C.Runner, prompt: list[int], num_drafts: int
) -> tuple[int, list[int], list[int]]:
    """The token that follows a prompt, and what is drafted behind it: tokens and parents."""
    from openspec import _C
    from openspec.messages import SamplingParams

    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=64)
    slot = runner.add_sequence(prompt, len(prompt), params)
    (token,) = step(runner, slot, len(prompt), 0)
    step(runner, slot, 1, num_drafts)
    (drafts,), (parents,) = runner.last_drafts(), runner.last_draft_parents()
    runner.remove_sequence(slot)
    return token, list(drafts), list(parents)


def compare(folder: Path, target: Qwen3ForCausalLM, head: Head) -> str:
    """Chains and trees after NUM_CONTEXTS prompts."""
    import torch

    chains = make_runner(folder / "target", folder / "head")
    trees = make_runner(
        folder / "target", folder / "head", draft_top_k=TOP_K, draft_tree_size=NUM_NODES
    )
    random = torch.Generator().manual_seed(SEED)
    for index in range(NUM_CONTEXTS):
        length = 3 + 4 * index
        prompt = torch.randint(2, VOCAB - 2, (length,), generator=random)
        states = target(prompt[None], output_hidden_states=True).hidden_states
        captured = torch.cat([states[layer + 1][0] for layer in CAPTURED], -1)
        token, found, _ = drafts_after(chains, prompt.tolist(), NUM_DRAFTS)
        rows = head.rows(captured, token)
        expected = walk(head, rows, token)
        if isinstance(head, ZlabHead) and head.path(rows, token) != expected:
            raise DiffersError(f"prompt {index}: the authors' walk is not that of their chances")
        if found != expected:
            raise DiffersError(f"prompt {index}: chain {found}, theirs {expected}")
        again, nodes, parents = drafts_after(trees, prompt.tolist(), NUM_NODES)
        paths: list[tuple[int, ...]] = []
        for node, parent in zip(nodes, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
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
