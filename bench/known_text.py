"""A target whose text is known, and EAGLE-3 heads that offer its next token as often as asked.

    python -m bench.known_text qwen3-30b-a3b build/known --shares 0.5 0.65 0.8
    python -m openspec.bench --model build/known --method eagle3 --draft-model build/known/eagle3-80

Steps and drafts cost what the published shapes cost; what they compute is chosen. The target's
layers add nothing to a token's embedding (`o_proj` and `down_proj` are zero, all else is random),
and its LM head knows one successor of each: tokens go round in one cycle, in an order by chance.
A router sees the embeddings alone, so tokens that follow each other have nothing in common.

A head sees a token and the state that it made for the token before. Its attention keeps to a
token's own place, takes the old state away and puts the embedding there. Its LM head knows the
right successor of a share of the tokens, dealt by chance, and another one's of the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from bench.random_target import PUBLISHED, random_tensor, write_random_target
from safetensors.torch import save_file

from openspec.config import EMBEDDED_MODEL

CYCLE = range(300, 4000)
"""Tokens of the embedded model's tokenizer that the text consists of."""
CODE, CONSTANT = 256, 4.0
"""Signs of an embedding, which tell tokens apart, and the number after them, alike in all."""
SHARPNESS = 10.0
"""Of the head's queries and keys: a place other than its own gets less than 1e-8 of attention."""
DRAFT_VOCAB, HEAD_MLP = 32000, 12288


def order(seed: int = 0) -> torch.Tensor:
    """The tokens of the cycle, each before its successor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(len(CYCLE), generator=generator) + CYCLE.start


def embeddings(config: Mapping[str, Any]) -> torch.Tensor:
    """[vocab_size, hidden_size]"""
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16)
    table[:, :CODE] = 2.0 * torch.randint(0, 2, (len(table), CODE), generator=generator) - 1.0
    table[:, CODE] = CONSTANT
    return table


def successor_rows(config: Mapping[str, Any], num_rows: int, share: float = 1.0) -> torch.Tensor:
    """An LM head that knows a share of the successors: a row is the code of what comes before."""
    before, after = order(), order().roll(-1)
    generator = torch.Generator().manual_seed(2)
    wrong = torch.randperm(len(before), generator=generator)[round(share * len(before)) :]
    after[wrong] = after[wrong.roll(1)]
    rows = torch.zeros(num_rows, config["hidden_size"], dtype=torch.bfloat16)
    rows[after, :CODE] = embeddings(config)[before, :CODE]
    return rows


def write_target(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes a mixture or a dense model of Qwen3's kind with the embedded model's tokenizer."""
    alike: dict[tuple[bool, tuple[int, ...]], torch.Tensor] = {}

    def tensor(
        name: str, shape: list[int], dtype: torch.dtype, random: torch.Generator
    ) -> torch.Tensor:
        is_zero = name.endswith(("o_proj.weight", "down_proj.weight"))
        if "embed_tokens" in name:
            return embeddings(config)
        if "lm_head" in name:
            return successor_rows(config, shape[0])
        if not is_zero and ".experts." not in name:
            return random_tensor(name, shape, dtype, random)
        key = (is_zero, tuple(shape))
        if key not in alike:  # what experts make is multiplied by zero
            alike[key] = random_tensor(name, shape, dtype, random) * (not is_zero)
        return alike[key]

    folder.mkdir(parents=True, exist_ok=True)
    for path in EMBEDDED_MODEL.glob("*.j*"):
        shutil.copy(path, folder)
    ends = json.loads((EMBEDDED_MODEL / "config.json").read_text())["eos_token_id"]
    whole = {**config, "tie_word_embeddings": False, "eos_token_id": ends}
    return write_random_target(folder, whole, make=tensor)


def write_head(folder: Path, config: Mapping[str, Any], share: float) -> Path:
    """Writes a head that offers the next token of the text with this chance."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    num_drafts = min(DRAFT_VOCAB, config["vocab_size"])
    random = torch.Generator().manual_seed(3)
    out = {
        f"midlayer.mlp.{name}.weight": random_tensor(name, shape, torch.bfloat16, random)
        for name, shape in (("gate_proj", [HEAD_MLP, hidden]), ("up_proj", [HEAD_MLP, hidden]))
    }
    # Both inputs come normed: an embedding and a state have these mean squares.
    of_embedding = math.sqrt((CODE + CONSTANT**2) / hidden)
    of_state = math.sqrt(CODE / hidden)
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weight = torch.zeros(count * head_dim, 2 * hidden, dtype=torch.bfloat16)
        if name == "v":
            places = torch.arange(CODE)
            weight[places, places] = of_embedding
            weight[places, hidden + places] = -of_state
        else:
            weight[:, CODE] = SHARPNESS * of_embedding / CONSTANT
        out[f"midlayer.self_attn.{name}_proj.weight"] = weight
    places = torch.arange(CODE)
    first_reader = places // head_dim * (heads // kv_heads)  # query head of a place's key head
    o_proj = torch.zeros(hidden, heads * head_dim, dtype=torch.bfloat16)
    o_proj[places, first_reader * head_dim + places % head_dim] = 1.0
    zeros, ones = torch.zeros, torch.ones
    out |= {
        "midlayer.self_attn.o_proj.weight": o_proj,
        "midlayer.mlp.down_proj.weight": zeros(hidden, HEAD_MLP, dtype=torch.bfloat16),
        "fc.weight": zeros(hidden, 3 * hidden, dtype=torch.bfloat16),
        "lm_head.weight": successor_rows(config, num_drafts, share),
        "d2t": zeros(num_drafts, dtype=torch.int64),
        "t2d": torch.arange(config["vocab_size"]) < num_drafts,
        "norm.weight": ones(hidden, dtype=torch.bfloat16),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        out[f"midlayer.{name}.weight"] = ones(hidden, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    same = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size")
    last = config["num_hidden_layers"] - 1
    head = {
        **{name: config[name] for name in (*same, "rms_norm_eps", "max_position_embeddings")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": num_drafts,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, (last + 1) // 2, last]},
        "hidden_act": "silu",
        "intermediate_size": HEAD_MLP,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(head))
    return folder


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.known_text", description=__doc__)
    parser.add_argument("shape", choices=[name for name in PUBLISHED if name.startswith("qwen3-")])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the published model has")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.65, 0.8])
    arguments = parser.parse_args()
    config = dict(PUBLISHED[arguments.shape])
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    print(write_target(arguments.folder, config))
    for share in arguments.shares:
        print(write_head(arguments.folder / f"eagle3-{round(100 * share)}", config, share))


if __name__ == "__main__":
    main()
