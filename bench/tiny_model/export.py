"""Stage 3: write the Hugging Face folder.

    python -m bench.tiny_model.export --data .tiny --weights .tiny/run/best.pt \\
        --out python/openspec/models/tiny

Weights become bf16 (the precision they are served in); the LM head is tied and has no tensor.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from .model import TinyConfig, TinyQwen3
from .tokenizer import ADDED_TOKENS, END_OF_TEXT, TURN_END

GENERATION_CONFIG = {
    "bos_token_id": ADDED_TOKENS[END_OF_TEXT],
    "do_sample": True,
    "eos_token_id": [ADDED_TOKENS[TURN_END], ADDED_TOKENS[END_OF_TEXT]],
    "pad_token_id": ADDED_TOKENS[END_OF_TEXT],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}


def write_checkpoint(model: TinyQwen3, folder: Path) -> None:
    """Write config, weights and generation defaults into `folder`."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model.config.to_hugging_face())
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{folder}: {parameters:,} parameters, {len(tensors)} tensors, {size / 1e6:.1f} MB")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(".tiny"))
    parser.add_argument("--weights", type=Path, default=Path(".tiny/run/best.pt"))
    parser.add_argument("--out", type=Path, default=Path("python/openspec/models/tiny"))
    args = parser.parse_args()
    model = TinyQwen3(TinyConfig())
    model.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    write_checkpoint(model, args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(args.data / "tokenizer" / name, args.out / name)


if __name__ == "__main__":
    main()
