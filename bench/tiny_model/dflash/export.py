"""Stage 4: write a head as a checkpoint folder.

    python -m bench.tiny_model.dflash.export dflash --weights .tiny/dflash/dflash.pt \\
        --out python/openspec/models/tiny/dflash

bf16, without embeddings of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..eagle3.prompts import MODEL
from .head import LAYOUTS, BlockHead, Layout, head_config


def export(layout: Layout, weights: Path, folder: Path) -> None:
    """Write config and weights into `folder`."""
    head = BlockHead(layout)
    head.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    text = json.dumps(head_config(layout), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in head.parameters())
    print(f"{folder}: {parameters:,} parameters, {path.stat().st_size / 1e6:.2f} MB")


def load_head(layout: Layout, folder: Path) -> BlockHead:
    """An exported head in fp32."""
    head = BlockHead(layout)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    return head.eval().requires_grad_(False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--weights", type=Path, help="default: .tiny/dflash/LAYOUT.pt")
    parser.add_argument("--out", type=Path, help="default: the embedded model's folder LAYOUT")
    args = parser.parse_args()
    weights = args.weights or Path(".tiny/dflash") / f"{args.layout}.pt"
    export(LAYOUTS[args.layout], weights, args.out or MODEL / args.layout)


if __name__ == "__main__":
    main()
