"""Blows a small Qwen3 checkpoint up to the shape of a large one without changing what it computes.

A stand-in for weights that are not at hand: its cost is the large model's, its text (hence what a
drafter gets accepted) the small trained one's, on any engine that reads Hugging Face checkpoints.

Every width is repeated a power-of-two number of times (hidden, heads, KV heads, MLP neurons), each
weight that sums over a repeated axis is divided by that number (exact in bf16), and missing layers
are identities (random q, k, v, gate and up, zero o_proj and down_proj). RMSNorm sees the same mean
square, every head the same keys; with a tied head the final norm is divided by the hidden repeat.
Vocabulary rows past the small ones score far below every token that a trained model might choose.

    python bench/widen_checkpoint.py python/openspec/models/tiny build/widened-4b --like qwen3-4b

An EAGLE-3 head follows its target, reads the same states of it and drafts the same; --draft-vocab
adds rows to its LM head up to a published head's cost:

    python bench/widen_checkpoint.py python/openspec/models/tiny/eagle3 build/widened-4b/eagle3 \\
        --for build/widened-4b --draft-vocab 32000

So does a head that drafts blocks; --layers adds identities up to a published head's depth, and
--markov-rank zeros up to its Markov head's rank:

    python bench/widen_checkpoint.py python/openspec/models/tiny/dspark build/widened-4b/dspark \\
        --for build/widened-4b --layers 5 --markov-rank 256
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Shape:
    """What config.json says of a model's size."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    head_dim: int = 128
    vocab_size: int = 151936


SHAPES = {
    "qwen3-0.6b": Shape(1024, 28, 16, 8, 3072, True),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 6144, True),
    "qwen3-4b": Shape(2560, 36, 32, 8, 9728, True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 12288, False),
    "qwen3-14b": Shape(5120, 40, 40, 8, 17408, False),
    "qwen3-32b": Shape(5120, 64, 64, 8, 25600, False),
}


def times(big: int, small: int, what: str) -> int:
    """How often a width is repeated."""
    count = big // small
    if big % small or count & (count - 1):
        raise SystemExit(f"{what}: {big} is not {small} times a power of two")
    return count


def repeats_of(small: dict[str, Any], shape: Shape) -> tuple[int, int, int, int]:
    """How often hidden size, query heads, KV heads and MLP neurons are repeated."""
    hidden = times(shape.hidden_size, small["hidden_size"], "hidden_size")
    q = times(shape.num_attention_heads, small["num_attention_heads"], "num_attention_heads")
    kv = times(shape.num_key_value_heads, small["num_key_value_heads"], "num_key_value_heads")
    mlp = times(shape.intermediate_size, small["intermediate_size"], "intermediate_size")
    if q != kv:
        raise SystemExit("query heads per KV head must already match")
    return hidden, q, kv, mlp


def repeat(weight: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """`rows` copies of the output axis, `cols` of the input axis, sums kept."""
    if weight.dim() == 1:
        return weight.repeat(rows)
    return (weight.repeat(rows, cols) / cols).to(weight.dtype)


def by_parts(weight: torch.Tensor, rows: int, cols: int, parts: int) -> torch.Tensor:
    """Repeats each of the vectors that stand side by side in the input."""
    return torch.cat([repeat(part, rows, cols) for part in weight.chunk(parts, 1)], 1)


def widen_layer(layer: Tensors, hidden: int, q: int, kv: int, mlp: int) -> Tensors:
    """One decoder layer; names relative to it."""
    repeats = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (1, 1),
        "self_attn.k_norm.weight": (1, 1),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden, 1),
        "post_attention_layernorm.weight": (hidden, 1),
        "hidden_norm.weight": (hidden, 1),  # of a drafter's layer, which has no q_norm and k_norm
    }
    return {name: repeat(weight, *repeats[name]) for name, weight in layer.items()}


def identity_layer(like: Tensors, random: torch.Generator) -> Tensors:
    """A layer of the same cost that changes nothing."""
    layer = {}
    for name, weight in like.items():
        if name.endswith("norm.weight"):
            layer[name] = torch.ones_like(weight)
        elif "o_proj" in name or "down_proj" in name:
            layer[name] = torch.zeros_like(weight)
        else:
            noise = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
            layer[name] = noise / math.sqrt(weight.shape[1])
    return layer


def load(source: Path) -> tuple[dict[str, Any], Tensors]:
    """Config and weights of a folder."""
    weights: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        weights.update(load_file(path))
    return json.loads((source / "config.json").read_text()), weights


def widen(source: Path, target: Path, like: str) -> None:
    """Writes the widened checkpoint."""
    small, weights = load(source)
    shape, random = SHAPES[like], torch.Generator().manual_seed(0)
    if small["head_dim"] != shape.head_dim:
        raise SystemExit(f"head_dim {small['head_dim']} must already be {shape.head_dim}")
    hidden, q, kv, mlp = repeats_of(small, shape)

    num_small, num_layers = small["num_hidden_layers"], shape.num_hidden_layers
    layers_at = [1 + round(i * (num_layers - 3) / max(1, num_small - 1)) for i in range(num_small)]
    real = {}
    for i, at in enumerate(layers_at):
        prefix = f"model.layers.{i}."
        layer = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        real[at] = widen_layer(layer, hidden, q, kv, mlp)
    out: Tensors = {}
    for i in range(num_layers):
        layer = real[i] if i in real else identity_layer(real[layers_at[0]], random)
        out.update({f"model.layers.{i}.{name}": weight for name, weight in layer.items()})

    def vocab_rows(table: torch.Tensor) -> torch.Tensor:
        # Eight times the mean row: so far below every likely token that even 150,000 of them are
        # nothing beside it.
        filler = (8 * table.float().mean(0)).to(table.dtype)
        num_more = shape.vocab_size - table.shape[0]
        return torch.cat([table, filler.expand(num_more, -1)]).repeat(1, hidden)

    embedding = weights["model.embed_tokens.weight"]
    out["model.embed_tokens.weight"] = vocab_rows(embedding)
    norm = weights["model.norm.weight"].repeat(hidden)
    if shape.tie_word_embeddings:
        out["model.norm.weight"] = (norm / hidden).to(norm.dtype)
    else:
        out["model.norm.weight"] = norm
        out["lm_head.weight"] = vocab_rows(weights.get("lm_head.weight", embedding)) / hidden

    config = {**small, **vars(shape), "widened": {"like": like, "layers_at": layers_at}}
    config.pop("layer_types", None)
    save(target, source, config, out)
    print(f"{target}: {sum(w.numel() for w in out.values()) / 1e9:.2f}B parameters at {layers_at}")


def state_names(outputs: list[int], layers_at: list[int], num_layers: int) -> list[int]:
    """The small model's states by the large one's layers; id i is the output of layer i.

    Identities do not change a state, so each has several names; the published defaults are taken
    where they name the same states.
    """
    first = [layers_at[layer] for layer in outputs]
    ends = [*layers_at, num_layers]
    default = [1, num_layers // 2 - 1, num_layers - 4]
    if len(outputs) == len(default) and all(
        low <= name < ends[layer + 1]
        for low, name, layer in zip(first, default, outputs, strict=True)
    ):
        return default
    return first


def widen_eagle3(source: Path, target: Path, widened_target: Path, draft_vocab: int | None) -> None:
    """Writes the head (classic format) for a target that `widen` made."""
    small, weights = load(source)
    big = json.loads((widened_target / "config.json").read_text())
    if "midlayer.self_attn.q_proj.weight" not in weights or "embed_tokens.weight" in weights:
        raise SystemExit(f"{source}: not an EAGLE-3 head in the classic format")
    if "widened" not in big:
        raise SystemExit(f"{widened_target}: not made by this tool")
    shape = SHAPES[big["widened"]["like"]]
    hidden, q, kv, mlp = repeats_of(small, shape)

    prefix = "midlayer."
    layer = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
    wide = widen_layer(layer, hidden, q, kv, mlp)
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        name = f"self_attn.{name}.weight"
        wide[name] = by_parts(layer[name], rows, hidden, 2)  # [embedding, state]
    out = {prefix + name: weight for name, weight in wide.items()}
    num_states = weights["fc.weight"].shape[1] // small["hidden_size"]
    out["fc.weight"] = by_parts(weights["fc.weight"], hidden, hidden, num_states)
    out["norm.weight"] = repeat(weights["norm.weight"], hidden, 1)
    # Twice the mean row scores far below every likely token: neither the best drafts nor the
    # log-probabilities that a tree compares change.
    head = weights["lm_head.weight"]
    num_more = max(0, (draft_vocab or 0) - len(head))
    filler = (2 * head.float().mean(0)).to(head.dtype).expand(num_more, -1)
    out["lm_head.weight"] = repeat(torch.cat([head, filler]), 1, hidden)
    d2t, t2d = weights["d2t"], weights["t2d"]
    # Draft ids that stand for tokens without text, the rows that `widen` added.
    no_text = small["vocab_size"] - len(d2t)
    if shape.vocab_size < small["vocab_size"] + num_more:
        raise SystemExit(f"--draft-vocab: at most {shape.vocab_size - no_text}")
    out["d2t"] = torch.cat([d2t, torch.full((num_more,), no_text, dtype=d2t.dtype)])
    out["t2d"] = torch.zeros(shape.vocab_size, dtype=t2d.dtype)
    out["t2d"][torch.arange(len(out["d2t"])) + out["d2t"]] = True

    sizes = {name: size for name, size in vars(shape).items() if name in small}
    sizes |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    eagle = dict(small["eagle_config"])
    eagle["eagle_aux_hidden_state_layer_ids"] = state_names(
        eagle["eagle_aux_hidden_state_layer_ids"],
        big["widened"]["layers_at"],
        shape.num_hidden_layers,
    )
    config = {**small, **sizes, "draft_vocab_size": len(out["d2t"]), "eagle_config": eagle}
    save(target, source, config, out)
    print(f"{target}: {sum(w.numel() for w in out.values()) / 1e9:.3f}B parameters")


def widen_block_head(
    source: Path,
    target: Path,
    widened_target: Path,
    num_layers: int | None,
    markov_rank: int | None,
) -> None:
    """Writes a head that drafts blocks, without tables of its own, for a target of `widen`."""
    small, weights = load(source)
    big = json.loads((widened_target / "config.json").read_text())
    if "layers.0.self_attn.q_norm.weight" not in weights or "embed_tokens.weight" in weights:
        raise SystemExit(f"{source}: not a block head that uses its target's tables")
    if "widened" not in big:
        raise SystemExit(f"{widened_target}: not made by this tool")
    shape, random = SHAPES[big["widened"]["like"]], torch.Generator().manual_seed(0)
    hidden, q, kv, mlp = repeats_of(small, shape)
    layers = []
    for i in range(small["num_hidden_layers"]):
        prefix = f"layers.{i}."
        layer = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        layers.append(widen_layer(layer, hidden, q, kv, mlp))
    while len(layers) < (num_layers or 0):
        layers.append(identity_layer(layers[0], random))
    out = {
        f"layers.{i}.{k}": weight for i, layer in enumerate(layers) for k, weight in layer.items()
    }
    num_states = weights["fc.weight"].shape[1] // small["hidden_size"]
    out["fc.weight"] = by_parts(weights["fc.weight"], hidden, hidden, num_states)
    out["hidden_norm.weight"] = weights["hidden_norm.weight"].repeat(hidden)
    # As the target's: either the final norm or the LM head is divided by the repeats.
    head_scale = hidden if shape.tie_word_embeddings else 1
    norm = weights["norm.weight"].repeat(hidden)
    out["norm.weight"] = (norm / head_scale).to(norm.dtype)
    config = dict(small)
    if "markov_head.markov_w1.weight" in weights:
        rank = small["markov_rank"]
        config["markov_rank"] = max(rank, markov_rank or 0)
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
            out[name] = torch.zeros(shape.vocab_size, config["markov_rank"], dtype=torch.bfloat16)
            out[name][: small["vocab_size"], :rank] = weights[name]
        state, before = weights["confidence_head.proj.weight"].split(
            (small["hidden_size"], rank), 1
        )
        wide_state = (repeat(state, 1, hidden) * head_scale).to(state.dtype)
        rest = torch.zeros(1, config["markov_rank"] - rank, dtype=state.dtype)
        out["confidence_head.proj.weight"] = torch.cat([wide_state, before, rest], 1)
        out["confidence_head.proj.bias"] = weights["confidence_head.proj.bias"]

    config |= {name: size for name, size in vars(shape).items() if name in small}
    config |= {
        "num_hidden_layers": len(layers),
        "num_target_layers": shape.num_hidden_layers,
        "layer_types": ["full_attention"] * len(layers),
        "tie_word_embeddings": False,
    }
    block = config.get("dflash_config", config)
    block["target_layer_ids"] = state_names(
        block["target_layer_ids"], big["widened"]["layers_at"], shape.num_hidden_layers
    )
    save(target, source, config, out)
    print(f"{target}: {sum(w.numel() for w in out.values()) / 1e9:.3f}B parameters")


def save(target: Path, source: Path, config: dict[str, object], weights: Tensors) -> None:
    """Config, weights in shards, and everything else that is not weights, as it was."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in {".json", ".jinja"} and not path.name.startswith("model.safetensors"):
            shutil.copy(path, target)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    shards: list[Tensors] = [{}]
    size = 0
    for name, weight in weights.items():
        num_bytes = weight.numel() * weight.element_size()
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = weight.contiguous()
        size += num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        path = target / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, path.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--like", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--for", dest="widened", type=Path, help="source is a head; its target")
    parser.add_argument("--draft-vocab", type=int, help="rows of an EAGLE-3 head's LM head")
    parser.add_argument("--layers", type=int, help="of a block head, at least its own")
    parser.add_argument("--markov-rank", type=int, help="of a block head, at least its own")
    args = parser.parse_args()
    if args.widened and "block_size" in json.loads((args.source / "config.json").read_text()):
        widen_block_head(args.source, args.target, args.widened, args.layers, args.markov_rank)
    elif args.widened:
        widen_eagle3(args.source, args.target, args.widened, args.draft_vocab)
    else:
        widen(args.source, args.target, args.like)


if __name__ == "__main__":
    main()
