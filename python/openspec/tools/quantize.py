"""`python -m openspec.quantize SRC DST`: a bfloat16 checkpoint as one in FP8, as others read it.

Writes the matrices of the decoder layers as e4m3 codes with float32 scales, in the form of
compressed-tensors that vLLM reads, and all else as it is. The numbers are those that a server with
--quantization makes at load. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openspec.checkpoint.folder import (
    check_source,
    downloaded,
    is_hub_id,
    open_folder,
    split_revision,
)
from openspec.checkpoint.quantization.declared import BLOCK, BLOCKS, CONFIG
from openspec.checkpoint.quantization.made import quantized
from openspec.checkpoint.quantization.weight_format import (
    MADE,
    WeightFormat,
    made_format,
    scale_shape,
)
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import INDEX_FILE, checkpoint_files, engine_name
from openspec.drafters import parts_of_targets
from openspec.errors import ConfigError

if TYPE_CHECKING:
    import torch

OF_HYBRIDS = (
    *(r"re:.*\.in_proj_[ab]$", r"re:.*visual\..*"),
    *(f"re:{re.escape(part)}.*" for part in parts_of_targets()),
)
"""Modules of hybrid models that stay as they are."""
_CODES_OF = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m openspec.quantize", description=__doc__)
    parser.add_argument(
        "source", metavar="SRC", help="folder, or id of the hub: ORG/NAME[@REVISION]"
    )
    parser.add_argument("target", metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--quantization", choices=tuple(MADE), default="fp8", help="default: fp8")
    args = parser.parse_args(argv)
    try:
        check_source(args.source)
        source = (
            downloaded(*split_revision(args.source))
            if is_hub_id(args.source)
            else Path(args.source)
        )
        print(write_quantized(source, Path(args.target), args.quantization))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write_quantized(source: Path, target: Path, wanted: str) -> str:
    """Writes the folder, of `wanted` as in --quantization; returns a line that says what it has.

    Raises:
        ConfigError: no bfloat16 checkpoint of a target, or nowhere to write.
    """
    root = open_folder(source)
    model = ModelConfig.from_folder(root)
    if model.quantization is not None:
        raise ConfigError(
            f"{root} is {model.quantization.dialect} already; give the bfloat16 checkpoint"
        )
    made = made_format(model.spec, wanted)
    try:
        target.mkdir(parents=True)
        weight_map = _write_weights(root, target, made)
        for file in root.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copyfile(file, target / file.name)
        if (target / INDEX_FILE).exists():
            index = {"metadata": {}, "weight_map": weight_map}
            (target / INDEX_FILE).write_text(json.dumps(index, indent=1))
        config = json.loads((root / "config.json").read_text())
        config[CONFIG] = _config(MADE[wanted], is_hybrid=model.spec.kind == "hybrid")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error}; name another folder") from None
    return f"{target}: {len(made.quantized)} of {len(weight_map)} tensors are FP8 codes, {wanted}"


def _write_weights(root: Path, target: Path, made: WeightFormat) -> dict[str, str]:
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for file in checkpoint_files(root):
        tensors: dict[str, torch.Tensor] = {}
        for name in file.tensors:
            tensor, scale = file.tensor(name), made.quantized.get(engine_name(name))
            if scale is not None:
                where = f"{file.path}: {name}"
                tensor, tensors[f"{name}_scale"] = quantized_tensor(tensor, scale.form, where)
            tensors[name] = tensor
        save_file(tensors, target / file.path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.path.name)
        file.close()
    return weight_map


def quantized_tensor(
    weight: torch.Tensor, form: str, where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [N, K] and the float32 scales of `weight` [N, K] of bfloat16, float16 or float32.

    Raises:
        ConfigError: it holds NaN or infinity.
    """
    import torch

    numbers = weight.contiguous().view(torch.uint8).numpy().data.cast("B")
    codes, scales = quantized(numbers, _CODES_OF[str(weight.dtype)], weight.shape, form, where)
    return (
        torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).reshape(weight.shape),
        torch.frombuffer(bytearray(scales), dtype=torch.float32).reshape(
            scale_shape(form, weight.shape)
        ),
    )


def _config(form: str, *, is_hybrid: bool) -> dict[str, Any]:
    """As llm-compressor writes it for weights like these, with activations that are scaled live."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    weights: dict[str, Any] = {**numbers, "strategy": form, "dynamic": False}
    activations: dict[str, Any] = {**numbers, "strategy": "token", "dynamic": True}
    if form == BLOCKS:
        weights["block_structure"] = [BLOCK, BLOCK]
        activations |= {"strategy": "group", "group_size": BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *(OF_HYBRIDS if is_hybrid else ())],
    }
