"""Writes the P-EAGLE head as a checkpoint folder, which `--draft-model` takes.

python -m bench.tiny_model.peagle.export --weights .tiny/peagle/head.pt --out .tiny/peagle/head
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .head import PEagleHead, peagle_config


def write(folder: Path, head: PEagleHead, vocabulary: Tensor) -> Path:
    """config.json and bf16 weights; d2t holds differences, as in the EAGLE-3 head's file."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    tensors["t2d"][vocabulary] = True
    folder.mkdir(parents=True, exist_ok=True)
    packed = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(peagle_config(len(vocabulary)), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Writes the checkpoint folder.")
    parser.add_argument("--weights", type=Path, default=Path(".tiny/peagle/head.pt"))
    parser.add_argument("--out", type=Path, default=Path(".tiny/peagle/head"))
    args = parser.parse_args()
    trained = torch.load(args.weights, map_location="cpu", weights_only=True)
    head = PEagleHead(len(trained["vocabulary"]))
    head.load_state_dict(trained["head"])
    print(write(args.out, head, trained["vocabulary"]))


if __name__ == "__main__":
    main()
