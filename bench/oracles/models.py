"""Random models of transformers, and what all heads of speculators have in common."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculators.config import SpeculatorsConfig
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB, DRAFT_VOCAB = 256, 160


def geometry(family: str, num_layers: int, **changes: object) -> PreTrainedConfig:
    """Of a target and of heads: "llama" or "qwen3"."""
    from transformers import AutoConfig

    fields: dict[str, object] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
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
    """Weights that matter, in place; all are numbers of bf16 and of fp16."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            values = torch.randn(weight.shape, generator=random)
            if weight.dim() == 1:
                values = 1 + 0.3 * values
            elif name.endswith("base_kernel"):
                values = 0.3 * values
                values[:, 0] += 1
            elif "mask_hidden" not in name and "codebook" not in name:
                gain = 4.0 if "lm_head" in name or "embed_tokens" in name else 1.0
                values *= gain * weight.shape[-1] ** -0.5
            values = values.bfloat16().float()
            weight.copy_(torch.where(values.abs() < 2**-13, 0.0, values))
    module.float().eval().requires_grad_(False)


def make_target(folder: Path, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A random target, and its folder."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    randomise(model, seed)
    save(model, folder)
    return model


def save(model: PreTrainedModel, folder: Path) -> None:
    """In bf16, a copy: RoPE's frequencies would lose their bits as well."""
    import torch

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def token_map(seed: int) -> tuple[Tensor, Tensor]:
    """d2t and t2d of a random draft vocabulary."""
    import torch

    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values
    marks = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    return chosen - torch.arange(DRAFT_VOCAB), marks


def speculators_config(algorithm: str, target: Path, num_drafts: int) -> SpeculatorsConfig:
    """What speculators notes of a head's use."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_drafts)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(target), architectures=["Any"]),
    )
