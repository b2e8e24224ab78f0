"""EAGLE-3 heads of SafeAILab, SpecForge and DeepSpec: their own modules beside openspec's drafts.

SafeAILab's code drafts trees too; the others draft chains.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from bench.oracles.case import Case, Sources
from bench.oracles.eagle3 import (
    CAPTURED,
    DEPTH,
    NUM_DRAFTS,
    NUM_NODES,
    SEED,
    TARGET_LAYERS,
    TOP_K,
    Context,
    Head,
    case,
    check_trees,
    compare,
    make_contexts,
    make_target,
)
from bench.oracles.engine import Path_
from bench.oracles.models import DRAFT_VOCAB, geometry, randomise, save, token_map

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIVE_CAPTURED = (0, 2, 3, 5, 6)


class SafeAILabHead:
    """cnets.py, whose heads are pickles in fp16 with a short config.json."""

    def __init__(
        self, folder: Path, source: Path, target: PreTrainedModel, config: dict[str, object]
    ) -> None:
        import torch

        sys.path.insert(0, str(source))
        cnets = importlib.import_module("eagle.model.cnets")
        shape = {
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "vocab_size": target.config.vocab_size,
            "draft_vocab_size": DRAFT_VOCAB,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            **config,
        }
        fields = {"pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None, **shape}
        self.model = cnets.Model(SimpleNamespace(**fields), load_emb=False)
        randomise(self.model, SEED + 1)
        self.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        self.model.d2t, self.model.t2d = token_map(SEED)
        folder.mkdir()
        config_json = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
        (folder / "config.json").write_text(json.dumps(config_json))
        half = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in self.model.state_dict().items()
            if name != "embed_tokens.weight"
        }
        torch.save(half, folder / "pytorch_model.bin")

    def _tree(self, context: Context, levels: int, top_k: int, num_nodes: int) -> list[list[int]]:
        """The nodes by their tokens from the root on."""
        import torch

        model = self.model
        model.depth, model.top_k, model.total_tokens = levels - 1, top_k, num_nodes
        model.init_tree()
        model.reset_kv()
        tokens = torch.tensor([context.tokens])
        drafts, _, mask, _ = model.topK_genrate(context.captured[None], tokens, None, None)
        ids, sees = drafts[0].tolist(), mask[0, 0].bool()
        return [[ids[i] for i in row.nonzero().flatten().tolist()[1:]] for row in sees[1:]]

    def chain(self, context: Context) -> list[int]:
        """A tree of one node in each level."""
        return self._tree(context, NUM_DRAFTS, 1, NUM_DRAFTS)[-1]

    def tree(self, context: Context) -> set[Path_]:
        """Its paths."""
        return set(map(tuple, self._tree(context, DEPTH, TOP_K, NUM_NODES)))


class SpecForgeHead:
    """Its training-time test, step by step."""

    def __init__(
        self, folder: Path, source: Path, target: PreTrainedModel, **fields: object
    ) -> None:
        import torch
        from safetensors.torch import save_file

        sys.path.insert(0, str(source))
        self.module = importlib.import_module("specforge.modeling.draft.llama3_eagle")
        config = geometry("llama", 1, draft_vocab_size=DRAFT_VOCAB, **fields)
        self.model = self.module.LlamaForCausalLMEagle3(config)
        randomise(self.model, SEED + 3)
        self.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        self.model.d2t, self.model.t2d = token_map(SEED)
        folder.mkdir()
        shown = {**config.to_dict(), "architectures": ["LlamaForCausalLMEagle3"]}
        (folder / "config.json").write_text(json.dumps(shown))
        tensors = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in self.model.state_dict().items()
            if name != "embed_tokens.weight" and "rotary_emb" not in name
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def chain(self, context: Context) -> list[int]:
        """Of the last row; the tokens of rows before it matter in the first step only."""
        import torch

        model, count = self.model, len(context.captured)
        state = model.project_hidden_states(context.captured[None])
        ones = torch.ones(1, count, dtype=torch.bool)
        mask = self.module.prepare_decoder_attention_mask(ones, (1, count), state, 0)
        cache: list[list[object]] = [[], []]
        tokens, drafts = torch.tensor([context.tokens[1:]]), list[int]()
        while len(drafts) < NUM_DRAFTS:
            state = model.backbone(
                input_embeds=model.embed_input_ids(tokens),
                hidden_states=state,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(count)[None],
            )
            column = int(model.compute_logits(state)[0, -1].argmax())
            drafts.append(column + int(model.d2t[column]))
            tokens[0, -1] = drafts[-1]
        return drafts


class DeepSpecHead:
    """Its drafting: an extension of the cache, then a row for each draft."""

    def __init__(self, folder: Path, source: Path, target: PreTrainedModel) -> None:

        sys.path.insert(0, str(source))
        modeling = importlib.import_module("deepspec.modeling.eagle3.qwen3.modeling")
        config = geometry(
            "qwen3",
            1,
            attn_implementation="sdpa",  # causal without a mask
            layer_types=["full_attention"],
            num_target_layers=TARGET_LAYERS,
            target_layer_ids=list(FIVE_CAPTURED),
            ttt_length=7,
            step_loss_decay=0.8,
            draft_num_hidden_layers=1,
        )
        self.model = modeling.Qwen3Eagle3Model(config)
        randomise(self.model, SEED + 3)
        self.model.initialize_embeddings_and_head(
            embed_tokens=target.get_input_embeddings(), lm_head=target.get_output_embeddings()
        )
        save(self.model, folder)

    def chain(self, context: Context) -> list[int]:
        """Greedy, in a cache."""
        import torch
        from transformers import DynamicCache

        model, count, cache = self.model, len(context.captured), DynamicCache()
        state = model.extend_draft_cache(
            hidden_states=context.captured[None],
            input_ids=torch.tensor([context.tokens[1:]]),
            position_ids=torch.arange(count)[None],
            past_key_values=cache,
        )
        drafts = [int(model.compute_logits(state).argmax())]
        while len(drafts) < NUM_DRAFTS:
            state = model(
                hidden_states=state,
                input_ids=torch.tensor([drafts[-1:]]),
                position_ids=torch.tensor([[count + len(drafts) - 1]]),
                past_key_values=cache,
                use_cache=True,
            )
            drafts.append(int(model.compute_logits(state).argmax()))
        return drafts


def safeailab(family: str, config: dict[str, object]) -> Callable[[Path, Sources], str]:
    """A pickle through the converter: chains and trees."""

    def run(folder: Path, sources: Sources) -> str:
        from openspec.tools.convert_drafter import convert

        target = make_target(folder / "target", family)
        head = SafeAILabHead(folder / "pickle", sources.folder("EAGLE"), target, config)
        convert(folder / "pickle", folder / "head")
        contexts = make_contexts(target, CAPTURED)
        said = compare(folder, "eagle3", head, contexts)
        return f"{said}; {check_trees(folder, 'eagle3', contexts, head.tree)}"

    return run


def trained(
    make: Callable[[Path, Path, PreTrainedModel], Head],
    source: str,
    family: str,
    layers: tuple[int, ...],
) -> Callable[[Path, Sources], str]:
    """Chains of a head for a target of the family."""

    def run(folder: Path, sources: Sources) -> str:
        place = sources.folder(source)
        target = make_target(folder / "target", family)
        head = make(folder / "head", place, target)
        return compare(folder, "eagle3", head, make_contexts(target, layers))

    return run


PICKLES = {
    "EAGLE-3 head of Llama, pickle": safeailab("llama", {"rms_norm_eps": 1e-5}),
    "EAGLE-3 head of Qwen3 (AngelSlim)": safeailab(
        "qwen3", {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 32}
    ),
}
CASES: list[Case] = [
    *(case(format, "EAGLE", run) for format, run in PICKLES.items()),
    case(
        "EAGLE-3 head of Llama (SpecForge)",
        "SpecForge",
        trained(SpecForgeHead, "SpecForge", "llama", CAPTURED),
    ),
    case(
        "EAGLE-3.1 head of Llama, fc_norm (SpecForge)",
        "SpecForge",
        trained(
            lambda folder, source, target: SpecForgeHead(folder, source, target, fc_norm=True),
            "SpecForge",
            "llama",
            CAPTURED,
        ),
    ),
    case(
        "EAGLE-3 head of Qwen3 (DeepSpec)",
        "DeepSpec",
        trained(DeepSpecHead, "DeepSpec", "qwen3", FIVE_CAPTURED),
    ),
]
