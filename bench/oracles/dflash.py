"""DFlash, DSpark and JetSpec heads: drafts of the authors' own modules beside openspec's, in fp32.

Layers, masks and Markov heads are the authors'; where their package drafts nothing itself, the walk
along the drafts is here. How a tree grows is openspec's own rule: best first over what positions
say of their best tokens, of which a Markov head's pairs make chances behind each parent.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.oracles import dflash2
from bench.oracles.case import Case, Sources
from bench.oracles.dflash2 import (
    BLOCK,
    CAPTURED,
    DRAFT_LAYERS,
    MASK,
    NUM_DRAFTS,
    SEED,
    TOP_K,
    geometry,
    likeliest,
    make_target,
)
from bench.oracles.engine import Path_
from bench.oracles.models import (
    DRAFT_VOCAB,
    VOCAB,
    randomise,
    speculators_config,
    token_map,
)
from bench.oracles.models import save as save_model

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Qwen3Config, Qwen3ForCausalLM

WINDOW, RANK = 12, 16
TYPES = ["sliding_attention"] * (DRAFT_LAYERS - 1) + ["full_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A head's format."""

    slides: bool = False
    is_causal: bool | None = None
    """In all layers (z-lab), or in those that slide (speculators); None: no key says so."""
    markov: str | None = None
    has_own_tokens: bool = False
    dflash_config: dict[str, object] = field(default_factory=dict)


class Head(Protocol):
    """The authors' code with a random head."""

    token_of: list[int]
    """Of the columns of its logits."""

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """Final states [NUM_DRAFTS, hidden] of the rows that draft after `token`."""

    def logits(self, rows: Tensor) -> Tensor:
        """Without a Markov head's bias."""

    def biases(self, rows: Tensor, path: list[int]) -> Tensor:
        """What the Markov head adds at the rows behind the tokens of `path`, the known one first:
        [len(path), columns]; zero without one."""


def layers_of(kind: Kind) -> Qwen3Config:
    """Geometry of a head's layers."""
    config = geometry(DRAFT_LAYERS)
    if kind.slides:
        config.layer_types = list(TYPES)
        config.use_sliding_window, config.sliding_window = True, WINDOW
    return config


def with_tables(model: nn.Module, target: Qwen3ForCausalLM) -> None:
    """The target's embedding and head in the place of the model's own."""
    model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    if model.lm_head.weight.shape == target.lm_head.weight.shape:
        model.lm_head.weight.copy_(target.lm_head.weight)


def save(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """As authors that publish by hand do, in bf16."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")


# ---- The authors' code ---------------------------------------------------------------------------


class SpeculatorsHead:
    """speculators' draft models, with the masks that it trains them with."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, kind: Kind) -> None:
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

        name = "dflash" if kind.markov is None else "dspark"
        keys: dict[str, object] = {
            "transformer_layer_config": layers_of(kind),
            "draft_vocab_size": DRAFT_VOCAB if kind.has_own_tokens else VOCAB,
            "block_size": BLOCK if kind.markov is None else NUM_DRAFTS,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in CAPTURED],
            "mask_token_id": MASK,
            "speculators_config": speculators_config(name, folder.parent / "target", NUM_DRAFTS),
        }
        if kind.is_causal is not None:
            keys["sliding_window_non_causal"] = not kind.is_causal
        if kind.markov is None:
            self.model = DFlashDraftModel(DFlashSpeculatorConfig(**keys))
        else:
            keys |= {"markov_rank": RANK, "markov_head_type": kind.markov}
            self.model = DSparkDraftModel(DSparkSpeculatorConfig(**keys))
        randomise(self.model, SEED + 1)
        self.token_of = list(range(VOCAB))
        if kind.has_own_tokens:
            d2t, t2d = token_map(SEED)
            self.model.load_vocab_mappings(t2d, d2t)
            self.token_of = t2d.nonzero()[:, 0].tolist()
        with_tables(self.model, target)
        save_model(self.model, folder)

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """As `_backbone_forward` runs the block of one anchor, behind all of the context."""
        import torch
        from speculators.models.attention import create_float_mask
        from speculators.models.dflash.attention import create_anchor_block_mask_mod

        model, count = self.model, self.model.block_size
        num_known = len(captured)
        # The anchor is a token of the sequence, whose own state is not seen.
        states = torch.cat((captured, torch.zeros(1, captured.shape[1])))
        x = model.embed_tokens(torch.tensor([[token] + [MASK] * (count - 1)]))
        context = model.hidden_norm(model.fc(states[None]))
        positions = torch.cat((torch.arange(num_known + 1), num_known + torch.arange(count)))[None]

        def mask(window: int | None) -> Tensor:
            sees, num_queries, num_keys = create_anchor_block_mask_mod(
                torch.zeros(num_known + 1, dtype=torch.long),
                num_known + 1,
                torch.tensor([num_known]),
                count,
                window,
                model.sliding_window_non_causal,
            )
            return create_float_mask(
                sees, B=None, H=None, Q_LEN=num_queries, KV_LEN=num_keys, device=x.device
            )

        for index, layer in enumerate(model.layers):
            slides = index in model.sliding_window_indices
            x = layer(
                hidden_states=x,
                target_hidden=context,
                attention_mask=mask(model.sliding_window if slides else None),
                position_ids=positions,
                use_cache=False,
                position_embeddings=model.rotary_emb(captured, positions),
            )
        return model.norm(x)[0, count - NUM_DRAFTS :]

    def logits(self, rows: Tensor) -> Tensor:
        return self.model.lm_head(rows)

    def biases(self, rows: Tensor, path: list[int]) -> Tensor:
        import torch

        head = getattr(self.model, "markov_head", None)
        if head is None:
            return torch.zeros(len(path), len(self.token_of))
        return head.block_bias(
            prev_token_ids=torch.tensor([path]), hidden_states=rows[None, : len(path)]
        )[0]


class ZlabHead:
    """z-lab's model, which also runs JetSpec's heads where all layers are causal."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, kind: Kind, source: Path) -> None:
        sys.path.insert(0, str(source))
        from dflash.model import DFlashDraftModel

        config = layers_of(kind)
        config.architectures = ["DFlashDraftModel"]
        config.block_size, config.num_target_layers = BLOCK, target.config.num_hidden_layers
        config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": CAPTURED}
        if kind.is_causal is not None:
            config.is_causal = kind.is_causal
        self.model = DFlashDraftModel(config)
        randomise(self.model, SEED + 2)
        self.target, self.kind = target, kind
        self.token_of = list(range(VOCAB))
        keys = config.to_dict()
        if "causal_head" in kind.dflash_config:
            del keys["is_causal"]
        keys["dflash_config"] = keys["dflash_config"] | kind.dflash_config
        save(folder, keys, self.model.state_dict())

    def rows(self, captured: Tensor, token: int) -> Tensor:
        """As `dflash_generate` runs a block, without a cache.

        On a GPU FlashAttention makes the masks, which end with the last row. On a CPU nothing of
        the kind does, so layers that are causal or slide get the same masks here. Where rows see
        each other, z-lab's window moves on by a token with each row. openspec leaves it where the
        first row has it, as speculators trains: so these layers get that mask.
        """
        import torch

        model, num_known = self.model, len(captured)
        x = self.target.model.embed_tokens(torch.tensor([[token] + [MASK] * NUM_DRAFTS]))
        positions = torch.arange(num_known + NUM_DRAFTS + 1)[None]
        context = model.hidden_norm(model.fc(captured[None]))
        for layer, layer_type in zip(model.layers, TYPES, strict=True):
            x = layer(
                hidden_states=x,
                target_hidden=context,
                attention_mask=self.mask(num_known, layer_type),
                position_ids=positions,
                position_embeddings=model.rotary_emb(x, positions),
            )
        return model.norm(x)[0, 1:]

    def mask(self, num_known: int, layer_type: str) -> Tensor | None:
        """What is added to the scores of a block's rows; None: they see everything."""
        import torch

        count = NUM_DRAFTS + 1
        slides = self.kind.slides and layer_type == "sliding_attention"
        is_causal = slides if self.kind.is_causal is None else self.kind.is_causal
        if not (slides or is_causal):
            return None
        mask = torch.zeros(1, 1, count, num_known + count)
        for row in range(count):
            if slides:
                end = num_known + row + 1 if is_causal else num_known
                mask[..., row, : max(0, end - WINDOW)] = -torch.inf
            if is_causal:
                mask[..., row, num_known + row + 1 :] = -torch.inf
        return mask

    def logits(self, rows: Tensor) -> Tensor:
        return self.target.lm_head(rows)

    def biases(self, rows: Tensor, path: list[int]) -> Tensor:
        import torch

        return torch.zeros(len(path), VOCAB)


class DeepSpecHead:
    """DeepSpec's model and its own sampling."""

    def __init__(self, folder: Path, target: Qwen3ForCausalLM, kind: Kind, source: Path) -> None:
        sys.path.insert(0, str(source))
        from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

        config = layers_of(kind)
        config.architectures = ["Qwen3DSparkModel"]
        config.block_size, config.num_anchors = NUM_DRAFTS, 512
        config.num_target_layers = target.config.num_hidden_layers
        config.mask_token_id, config.target_layer_ids = MASK, CAPTURED
        config.enable_confidence_head = config.confidence_head_with_markov = True
        config.markov_rank, config.markov_head_type = RANK, kind.markov
        self.model = Qwen3DSparkModel(config)
        randomise(self.model, SEED + 3)
        with_tables(self.model, target)
        self.token_of = list(range(VOCAB))
        save(folder, config.to_dict(), self.model.state_dict())

    def rows(self, captured: Tensor, token: int) -> Tensor:
        import torch

        block = torch.tensor([[token] + [MASK] * (NUM_DRAFTS - 1)])
        return self.model._forward_backbone(
            position_ids=torch.arange(len(captured) + NUM_DRAFTS)[None],
            noise_embedding=self.model.embed_tokens(block),
            target_hidden_states=captured[None],
        )[0]

    def logits(self, rows: Tensor) -> Tensor:
        return self.model.compute_logits(rows)

    def biases(self, rows: Tensor, path: list[int]) -> Tensor:
        import torch

        base = torch.zeros(1, len(path), VOCAB)
        return self.model.markov_head.apply_block_logits(
            base, token_ids=torch.tensor([path]), hidden_states=rows[None, : len(path)]
        )[0]

    def path(self, rows: Tensor, token: int) -> list[int]:
        """Its own greedy walk."""
        import torch

        drafts, _ = self.model.sample_draft_tokens(
            self.logits(rows)[None],
            first_prev_token_ids=torch.tensor([token]),
            hidden_states=rows[None],
        )
        return list(drafts[0].tolist())


# ---- Drafts --------------------------------------------------------------------------------------


def walk(head: Head, rows: Tensor, token: int) -> list[int]:
    """The likeliest token of every row, given the drafts before it."""
    logits, path = head.logits(rows), [token]
    for row in range(len(rows)):
        bias = head.biases(rows, path)[row]
        path.append(head.token_of[int((logits[row] + bias).argmax())])
    return path[1:]


def grow(head: Head, rows: Tensor, token: int, has_pairs: bool) -> set[Path_]:
    """The likeliest paths, TOP_K tokens behind each."""
    logits = head.logits(rows)

    def children(path: Path_) -> list[tuple[float, int]]:
        row, before = len(path), (token, *path)[-1]
        scores = logits[row]
        bias = head.biases(rows[row:], [before])[0]
        if row == 0:
            scores = scores + bias
        best = scores.log_softmax(-1).topk(TOP_K)
        chances = best.values
        if has_pairs and row > 0:
            bent = chances + bias[best.indices]
            chances = bent - (bent.exp().sum() + 1 - chances.exp().sum()).log()
        tokens = [head.token_of[column] for column in best.indices.tolist()]
        return list(zip(chances.tolist(), tokens, strict=True))

    return likeliest(len(rows), children)


def compare(folder: Path, target: Qwen3ForCausalLM, head: Head, kind: Kind) -> str:
    """Chains and trees."""
    trees = functools.partial(grow, has_pairs=kind.markov is not None)
    method = "dflash" if kind.markov is None else "dspark"
    return dflash2.compare(folder, target, head, walk, trees, method)


def speculators(name: str, kind: Kind) -> Case:
    """A head as speculators saves it."""

    def run(folder: Path, _: Sources) -> str:
        target = make_target(folder / "target")
        return compare(folder, target, SpeculatorsHead(folder / "head", target, kind), kind)

    return Case(kind="head", format=name, oracle="speculators", run=run)


def published(
    name: str,
    source: str,
    kind: Kind,
    make: Callable[[Path, Qwen3ForCausalLM, Kind, Path], Head],
) -> Case:
    """A head as its authors publish it, whose code has no package."""

    def run(folder: Path, sources: Sources) -> str:
        code = sources.folder(source)
        target = make_target(folder / "target")
        return compare(folder, target, make(folder / "head", target, kind, code), kind)

    return Case(kind="head", format=name, oracle=source, run=run)


CASES = (
    published("DFlash, z-lab", "z-lab", Kind(), ZlabHead),
    published(
        "JetSpec",
        "z-lab",
        Kind(is_causal=True, dflash_config={"causal_head": True}),
        ZlabHead,
    ),
    published("DFlash, sliding layers, z-lab (causal)", "z-lab", Kind(slides=True), ZlabHead),
    published(
        "DFlash, sliding layers, z-lab (not causal)",
        "z-lab",
        Kind(slides=True, is_causal=False),
        ZlabHead,
    ),
    speculators("DFlash, speculators", Kind()),
    speculators("DFlash, speculators, own vocabulary", Kind(has_own_tokens=True)),
    speculators("DFlash, sliding layers, speculators (causal)", Kind(slides=True)),
    speculators(
        "DFlash, sliding layers, speculators (not causal)", Kind(slides=True, is_causal=False)
    ),
    published("DSpark, DeepSpec", "DeepSpec", Kind(markov="vanilla"), DeepSpecHead),
    speculators("DSpark with its own vocabulary", Kind(markov="vanilla", has_own_tokens=True)),
    speculators("DSpark, sliding layers", Kind(markov="vanilla", slides=True)),
)
