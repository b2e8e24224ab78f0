"""Checkpoints of random weights in the form and shape of published target models.

    python -m bench.random_target llama-3.1-8b build/random-llama-8b

For what depends on shapes and not on text: logits beside another implementation, times of a step.
`bench/widen_checkpoint.py` makes weights that write text, but of Qwen3's kind only: the embedded
model's text needs norms of queries and keys, which no other family has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

SHARD_BYTES = 4 << 30
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}  # as safetensors calls them
GAIN = 1.2
"""Of a matrix: what a layer adds is of the size of what it reads."""

_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, **_LLAMA3_ROPE},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 131072,
}
_QWEN3: dict[str, Any] = {
    **_QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 151936,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def _sized(
    base: Mapping[str, Any], layers: int, hidden: int, mlp: int, heads: int, kv: int, **other: Any
) -> dict[str, Any]:
    return {
        **base,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        **other,
    }


_TIED = {"tie_word_embeddings": True}
_SMALL_QWEN2 = {**_TIED, "vocab_size": 151936}
_LLAMA32 = {**_TIED, "rope_scaling": {"factor": 32.0, **_LLAMA3_ROPE}}
_LLAMA30 = {"rope_scaling": None, "max_position_embeddings": 8192, "eos_token_id": 128001}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3-8b": _sized(_LLAMA, 32, 4096, 14336, 32, 8, **_LLAMA30),
    "llama-3.1-8b": _sized(_LLAMA, 32, 4096, 14336, 32, 8),
    "llama-3.2-1b": _sized(_LLAMA, 16, 2048, 8192, 32, 8, head_dim=64, **_LLAMA32),
    "llama-3.2-3b": _sized(_LLAMA, 28, 3072, 8192, 24, 8, head_dim=128, **_LLAMA32),
    "llama-3.3-70b": _sized(_LLAMA, 80, 8192, 28672, 64, 8),
    "qwen2.5-0.5b": _sized(_QWEN2, 24, 896, 4864, 14, 2, **_SMALL_QWEN2),
    "qwen2.5-1.5b": _sized(_QWEN2, 28, 1536, 8960, 12, 2, **_SMALL_QWEN2),
    "qwen2.5-3b": _sized(_QWEN2, 36, 2048, 11008, 16, 2, **_SMALL_QWEN2),
    "qwen2.5-7b": _sized(_QWEN2, 28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _sized(_QWEN2, 48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _sized(_QWEN2, 64, 5120, 27648, 40, 8),
    "mistral-7b-v0.3": _sized(_MISTRAL, 32, 4096, 14336, 32, 8, vocab_size=32768),
    "mistral-nemo-12b": _sized(
        _MISTRAL, 40, 5120, 14336, 32, 8, head_dim=128, max_position_embeddings=131072
    ),
    "mistral-small-24b": _sized(_MISTRAL, 40, 5120, 32768, 32, 8, head_dim=128, rope_theta=1e8),
    "qwen3-0.6b": _sized(_QWEN3, 28, 1024, 3072, 16, 8, **_TIED),
    "qwen3-1.7b": _sized(_QWEN3, 28, 2048, 6144, 16, 8, **_TIED),
    "qwen3-4b": _sized(_QWEN3, 36, 2560, 9728, 32, 8, **_TIED),
    "qwen3-8b": _sized(_QWEN3, 36, 4096, 12288, 32, 8),
    "qwen3-14b": _sized(_QWEN3, 40, 5120, 17408, 40, 8),
    "qwen3-32b": _sized(_QWEN3, 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _sized(_QWEN3_MOE, 48, 2048, 6144, 32, 4, moe_intermediate_size=768),
    "qwen3-235b-a22b": _sized(_QWEN3_MOE, 94, 4096, 12288, 64, 4, moe_intermediate_size=1536),
}
"""Name -> config.json as published, as far as it matters."""


def _mlps(config: Mapping[str, Any], layer: int) -> list[tuple[str, int]]:
    """Names of a layer's MLPs, and their width."""
    is_dense = "num_experts" not in config or layer in config.get("mlp_only_layers", [])
    if is_dense or (layer + 1) % config.get("decoder_sparse_step", 1):
        return [("mlp.", config["intermediate_size"])]
    width = config["moe_intermediate_size"]
    return [(f"mlp.experts.{i}.", width) for i in range(config["num_experts"])]


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a checkpoint's tensors, embedding first. Source: published files."""
    hidden = config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_rows, kv_rows = heads * head_dim, kv_heads * head_dim
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"{at}self_attn.{part}_proj.weight", [rows, hidden]
            if config["model_type"] == "qwen2":
                yield f"{at}self_attn.{part}_proj.bias", [rows]
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            yield f"{at}self_attn.q_norm.weight", [head_dim]
            yield f"{at}self_attn.k_norm.weight", [head_dim]
        yield f"{at}self_attn.o_proj.weight", [hidden, q_rows]
        mlps = _mlps(config, layer)
        if len(mlps) > 1:
            yield f"{at}mlp.gate.weight", [len(mlps), hidden]
        for mlp, width in mlps:
            yield f"{at}{mlp}gate_proj.weight", [width, hidden]
            yield f"{at}{mlp}up_proj.weight", [width, hidden]
            yield f"{at}{mlp}down_proj.weight", [hidden, width]
        yield f"{at}input_layernorm.weight", [hidden]
        yield f"{at}post_attention_layernorm.weight", [hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]


def random_tensor(
    name: str, shape: list[int], dtype: torch.dtype, random: torch.Generator
) -> torch.Tensor:
    """Weights that let every part of a model show in its logits."""
    if name.endswith("norm.weight"):  # all ones would hide a norm that is left out
        return torch.empty(shape, dtype=dtype).uniform_(0.5, 1.5, generator=random)
    if name.endswith(".bias"):  # as in Qwen2.5: small for v, up to 60 and more in a few places of k
        values = torch.empty(shape).normal_(0.0, 0.1 if "v_proj" in name else 1.0, generator=random)
        if "k_proj" in name:
            values[:: max(len(values) // 4, 1)] *= 60.0
        return values.to(dtype)
    return torch.empty(shape, dtype=dtype).normal_(0.0, GAIN / shape[-1] ** 0.5, generator=random)


def write_shard(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file from where the tensors lie; several may be one in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = accumulate((tensor.nbytes for tensor in tensors.values()), initial=0)
    for (name, tensor), place in zip(tensors.items(), pairwise(ends), strict=True):
        dtype = DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.view(torch.uint8).numpy())


def write_random_target(
    folder: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    make: Callable[..., torch.Tensor] = random_tensor,
) -> Path:
    """Writes config.json and weights to `folder`, in shards of about 4 GB; returns it.

    `make` makes a tensor of the arguments that `random_tensor` takes. Threads write shards while
    it makes the next ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    random = torch.Generator().manual_seed(seed)
    shapes = list(tensor_shapes(config))
    files: dict[str, str] = {}
    kept: dict[str, torch.Tensor] = {}
    written: list[Future[None]] = []
    total = 0
    with ThreadPoolExecutor() as writers:
        for name, shape in shapes:
            kept[name] = make(name, shape, dtype, random)
            files[name] = f"model-{len(written) + 1:05d}.safetensors"
            total += kept[name].nbytes
            if total > SHARD_BYTES * (len(written) + 1) or name == shapes[-1][0]:
                written.append(writers.submit(write_shard, folder / files[name], kept))
                kept = {}
        for shard in written:
            shard.result()
    if len(written) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return folder
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def main() -> None:
    """Writes one of the published shapes, or its first layers."""
    parser = argparse.ArgumentParser(prog="python -m bench.random_target", description=__doc__)
    parser.add_argument("shape", choices=PUBLISHED)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the published model has")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = dict(PUBLISHED[arguments.shape])
    if arguments.layers is not None:
        config["num_hidden_layers"] = arguments.layers
    print(write_random_target(arguments.folder, config, arguments.seed))


if __name__ == "__main__":
    main()
