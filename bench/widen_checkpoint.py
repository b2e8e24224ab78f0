"""Blows a small Qwen3 checkpoint up to the shape of a large one without changing what it computes.

A stand-in for weights that are not at hand: its cost is the large model's, its text (hence what a
drafter gets accepted) the small trained one's, on any engine that reads Hugging Face checkpoints.

Every width is repeated a power-of-two number of times (hidden, heads, KV heads, MLP neurons), each
weight that sums over a repeated axis is divided by that number (exact in bf16), and missing layers
are identities (random q, k, v, gate and up, zero o_proj and down_proj). RMSNorm sees the same mean
square, every head the same keys; with a tied head the final norm is divided by the hidden repeat.
Vocabulary rows past the small ones are small noise, never the argmax of a trained model.

    python bench/widen_checkpoint.py python/openspec/models/tiny build/widened-4b --like qwen3-4b
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

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


def repeat(weight: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """`rows` copies of the output axis, `cols` of the input axis, sums kept."""
    if weight.dim() == 1:
        return weight.repeat(rows)
    return (weight.repeat(rows, cols) / cols).to(weight.dtype)


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
    }
    return {name: repeat(layer[name], *repeats[name]) for name in repeats}


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


def widen(source: Path, target: Path, like: str) -> None:
    """Writes the widened checkpoint."""
    small = json.loads((source / "config.json").read_text())
    shape, random = SHAPES[like], torch.Generator().manual_seed(0)
    weights: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        weights.update(load_file(path))
    if small["head_dim"] != shape.head_dim:
        raise SystemExit(f"head_dim {small['head_dim']} must already be {shape.head_dim}")
    hidden = times(shape.hidden_size, small["hidden_size"], "hidden_size")
    q = times(shape.num_attention_heads, small["num_attention_heads"], "num_attention_heads")
    kv = times(shape.num_key_value_heads, small["num_key_value_heads"], "num_key_value_heads")
    mlp = times(shape.intermediate_size, small["intermediate_size"], "intermediate_size")
    if q != kv:
        raise SystemExit("query heads per KV head must already match")

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

    def vocab_rows(table: torch.Tensor, scale: float) -> torch.Tensor:
        num_more = shape.vocab_size - table.shape[0]
        noise = torch.randn(num_more, shape.hidden_size, generator=random, dtype=table.dtype)
        return torch.cat([table.repeat(1, hidden), noise * scale])

    embedding = weights["model.embed_tokens.weight"]
    out["model.embed_tokens.weight"] = vocab_rows(embedding, 1e-3)
    norm = weights["model.norm.weight"].repeat(hidden)
    if shape.tie_word_embeddings:
        out["model.norm.weight"] = (norm / hidden).to(norm.dtype)
    else:
        out["model.norm.weight"] = norm
        head = weights.get("lm_head.weight", embedding)
        out["lm_head.weight"] = vocab_rows(head, 1e-3 * hidden) / hidden

    config = {**small, **vars(shape), "widened": {"like": like, "layers_at": layers_at}}
    config.pop("layer_types", None)
    save(target, source, config, out)
    print(f"{target}: {sum(w.numel() for w in out.values()) / 1e9:.2f}B parameters at {layers_at}")


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
    args = parser.parse_args()
    widen(args.source, args.target, args.like)


if __name__ == "__main__":
    main()
