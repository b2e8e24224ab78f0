"""Stage 4: write the head as a checkpoint folder.

    python -m bench.tiny_model.eagle3.export --weights .tiny/eagle3/run/head.pt \\
        --out python/openspec/models/tiny/eagle3

Classic format: `midlayer.*`, no embeddings of its own, bf16; `d2t` holds, per draft id, the
difference to the target's id, `t2d` which of the target's ids have a draft id.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .head import Eagle3Head, head_config
from .prompts import MODEL


def export(weights: Path, folder: Path) -> None:
    """Write config and weights into `folder`."""
    trained = torch.load(weights, map_location="cpu", weights_only=True)
    vocabulary = trained["vocabulary"]
    head = Eagle3Head(len(vocabulary))
    head.load_state_dict(trained["head"])
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    tensors["t2d"][vocabulary] = True
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
    text = json.dumps(head_config(len(vocabulary)), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in head.parameters())
    print(f"{folder}: {parameters:,} parameters, {path.stat().st_size / 1e6:.1f} MB")


def load_head(folder: Path) -> tuple[Eagle3Head, torch.Tensor]:
    """An exported head in fp32, and the target's ids of its draft ids."""
    tensors = load_file(folder / "model.safetensors")
    draft_to_target = tensors.pop("d2t")
    del tensors["t2d"]
    head = Eagle3Head(len(draft_to_target))
    head.load_state_dict(tensors)
    vocabulary = draft_to_target + torch.arange(len(draft_to_target))
    return head.eval().requires_grad_(False), vocabulary


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--weights", type=Path, default=Path(".tiny/eagle3/run/head.pt"))
    parser.add_argument("--out", type=Path, default=MODEL / "eagle3")
    args = parser.parse_args()
    export(args.weights, args.out)


if __name__ == "__main__":
    main()
