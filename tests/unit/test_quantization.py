"""Dialects of FP8: what lists and tensors say, which of them is refused, and FP8 made of bf16."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openspec import _C
from openspec.checkpoint.quantization.declared import read_declared
from openspec.checkpoint.quantization.made import quantized
from openspec.checkpoint.quantization.weight_format import (
    WeightFormat,
    check_wanted,
    scale_shape,
    weight_format,
)
from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.tensor_info import TensorInfo
from openspec.checkpoint.weights import target_tensors
from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.tools import quantize
from openspec.tools.quantize import quantized_tensor

N, K = 320, 256
LAYER = "model.layers.0."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MODULES = (
    *(f"{LAYER}self_attn.{name}" for name in ATTENTION),
    *(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
)
SHAPES = {"tensor": [1], "channel": [N, 1], "block": [math.ceil(N / 128), math.ceil(K / 128)]}
Tensors = dict[str, tuple[str, list[int]]]


def group(strategy: str, **weights: Any) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }


def compressed(strategy: str, format: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group(strategy, **weights)},
        "ignore": ["lm_head"],
    }


BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
DIALECTS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen": (BLOCK_FP8, "block"),
    "autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
    "channel": (compressed("channel"), "channel"),
    "tensor": (compressed("tensor", "naive-quantized"), "tensor"),
    "block": (compressed("block", block_structure=[128, 128]), "block"),
    "modelopt": (MODELOPT, "tensor"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, "channel"),
}


def coded(form: str, suffix: str = "weight_scale", dtype: str = "F32") -> Tensors:
    tensors: Tensors = {"lm_head.weight": ("BF16", [N, K]), "model.norm.weight": ("BF16", [K])}
    for module in MODULES:
        tensors[f"{module}.weight"] = ("F8_E4M3", [N, K])
        tensors[f"{module}.{suffix}"] = (dtype, SHAPES[form])
    return tensors


def of_dialect(name: str) -> tuple[dict[str, Any], Tensors]:
    config, form = DIALECTS[name]
    return config, coded(form, "weight_scale_inv" if name == "qwen" else "weight_scale")


def read(
    folder: Path,
    config: dict[str, Any] | None,
    tensors: Tensors,
    wanted: str | None = None,
    beside: dict[str, Any] | None = None,
) -> WeightFormat:
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    keys = JsonKeys({} if config is None else {"quantization_config": config}, "config.json")
    infos = {
        name: TensorInfo(name, dtype, tuple(shape), folder / "model.safetensors")
        for name, (dtype, shape) in tensors.items()
    }
    declared = read_declared(folder, keys)
    check_wanted(declared, wanted)
    return WeightFormat() if declared is None else weight_format(infos, declared)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_read(name: str, tmp_path: Path) -> None:
    config, tensors = of_dialect(name)
    found = read(tmp_path, config, tensors)
    assert set(found.quantized) == {f"{module}.weight" for module in MODULES}
    assert {scale.form for scale in found.quantized.values()} == {DIALECTS[name][1]}
    assert all(tensors[scale.name][1] == list(scale.shape) for scale in found.quantized.values())
    assert not found.is_made
    assert found.name.startswith("FP8 with scales of each")


def test_shapes_of_scales_vary_by_ones(tmp_path: Path) -> None:
    for form, shapes in (("tensor", ([], [1], [1, 1])), ("channel", ([N], [N, 1]))):
        for shape in shapes:
            tensors = coded(form)
            for module in MODULES:
                tensors[f"{module}.weight_scale"] = ("BF16", shape)
            found = read(tmp_path, compressed(form), tensors)
            assert {scale.form for scale in found.quantized.values()} == {form}


def test_a_file_of_bfloat16_is_one(tmp_path: Path) -> None:
    assert read(tmp_path, None, {"lm_head.weight": ("BF16", [N, K])}) == WeightFormat()


def test_modelopt_says_it_beside(tmp_path: Path) -> None:
    beside = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert read(tmp_path, None, coded("tensor"), beside=beside).quantized
    assert read(tmp_path, MODELOPT, coded("tensor"), beside=beside).quantized
    for other in ({**MODELOPT, "ignore": ["lm_head", "model.layers.0*"]}, compressed("tensor")):
        with pytest.raises(ConfigError, match="disagree"):
            read(tmp_path, other, coded("tensor"), beside=beside)


@pytest.mark.parametrize(
    "ignored",
    [
        f"{LAYER}self_attn.q_proj",
        f"{LAYER}self_attn",
        f"{LAYER}self_attn.qkv_proj",
        "model.layers.0*",
        r"re:.*q_proj$",
        "q_proj",
    ],
)
def test_lists_have_to_agree_with_the_tensors(ignored: str, tmp_path: Path) -> None:
    config = compressed("channel")
    with pytest.raises(ConfigError, match=r"q_proj\.weight is F8_E4M3, but .* lists it"):
        read(tmp_path, config | {"ignore": ["lm_head", ignored]}, coded("channel"))


def test_what_is_not_listed_has_to_be_fp8(tmp_path: Path) -> None:
    tensors = coded("channel")
    name = f"{LAYER}mlp.down_proj"
    tensors[f"{name}.weight"] = ("BF16", [N, K])
    tensors.pop(f"{name}.weight_scale")
    with pytest.raises(ConfigError, match=r"down_proj\.weight is BF16, but .* does not list it"):
        read(tmp_path, compressed("channel"), tensors)
    listed = compressed("channel") | {"ignore": ["lm_head", "re:.*down_proj"]}
    assert len(read(tmp_path, listed, tensors).quantized) == len(MODULES) - 1


def test_targets_may_be_some_modules(tmp_path: Path) -> None:
    tensors = coded("channel")
    for module in MODULES[:4]:
        tensors[f"{module}.weight"] = ("BF16", [N, K])
        tensors.pop(f"{module}.weight_scale")
    config = compressed("channel")
    with pytest.raises(ConfigError, match="does not list it"):
        read(tmp_path, config, tensors)
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    assert len(read(tmp_path, config, tensors).quantized) == 3


def test_a_cache_alone_may_be_quantised(tmp_path: Path) -> None:
    beside = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    tensors: Tensors = {f"{module}.weight": ("BF16", [N, K]) for module in MODULES}
    assert read(tmp_path, None, tensors, beside=beside) == WeightFormat()


def without_scale(tensors: Tensors) -> None:
    tensors.pop(f"{MODULES[0]}.weight_scale")


def without_tensor(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight"] = ("BF16", [N, K])


def of_e5m2(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight"] = ("F8_E5M2", [N, K])


def of_e8m0(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight_scale"] = ("F8_E8M0", [N, 1])


def of_int8(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight"] = ("I8", [N, K])


def of_double_scales(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight_scale"] = ("F64", [N, 1])


def of_another_shape(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight_scale"] = ("F32", [N - 1, 1])


def of_another_form(tensors: Tensors) -> None:
    tensors[f"{MODULES[0]}.weight_scale"] = ("F32", [1])


def of_no_matrix(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = ("F8_E4M3", [K])


def of_bfloat16(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.endswith("_scale"):
            tensors.pop(name)
        else:
            tensors[name] = ("BF16", [N, K])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scale, r"q_proj\.weight is F8_E4M3 and has no .*weight_scale"),
        (without_tensor, r"scales without a tensor of F8_E4M3: .*q_proj\.weight_scale"),
        (of_e5m2, r"q_proj\.weight: e5m2 weights"),
        (of_e8m0, r"q_proj\.weight_scale: E8M0 scales"),
        (of_int8, r"q_proj\.weight: INT8 weights"),
        (of_double_scales, "expected dtype BF16 or F16 or F32, found F64"),
        (of_another_shape, r"expected shape \[320, 1\] \(channel\)"),
        (of_another_form, r"expected shape \[320, 1\] \(channel\)"),
        (of_no_matrix, "only matrices of decoder layers"),
        (of_bfloat16, "no tensor is F8_E4M3"),
    ],
)
def test_tensors_that_mean_nothing_are_refused(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    tensors = coded("channel")
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, compressed("channel"), tensors)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quant_method: expected the name"),
        ({"quant_method": "awq"}, "4-bit weights are not read yet"),
        ({"quant_method": "gptq", "bits": 4}, "4-bit weights are not read yet"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes is not read"),
        ({"quant_method": "quark"}, "Quark"),
        ({"quant_method": "gguf"}, "GGUF"),
        ({"quant_method": "mxfp4"}, "MXFP"),
        ({"quant_method": "marlin"}, "Marlin"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "modelopt_fp4"}, "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "4-bit weights are not read yet"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "MXFP"),
        ({"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, "INT8"),
        ({"quant_method": "something"}, 'expected "fp8" or "compressed-tensors"'),
        (compressed("channel", "pack-quantized"), "W4A16"),
        (compressed("channel", "int-quantized"), "INT8"),
        (compressed("channel", "nvfp4-pack-quantized"), "NVFP4"),
        (compressed("channel", "marlin-24"), "Marlin"),
        (compressed("channel", num_bits=4), "8 bits of type float"),
        (compressed("channel", type="int"), "8 bits of type float"),
        (compressed("channel", symmetric=False), "zero points"),
        (compressed("group"), "strategy"),
        (compressed("block", block_structure=[64, 128]), "other blocks"),
        (compressed("channel") | {"config_groups": {}}, "config_groups"),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
        (compressed("channel") | {"ignore": ["re:("]}, "regular expressions"),
        (compressed("channel") | {"ignore": ["re:([a-z._0-9]+)+!"]}, "none of a group"),
        (compressed("channel") | {"ignore": ["re:" + 8 * ".*" + "!"]}, "fewer repeats"),
        (compressed("channel") | {"ignore": "lm_head"}, "a list of modules"),
        (BLOCK_FP8 | {"weight_block_size": [64, 64]}, "other blocks"),
        (BLOCK_FP8 | {"fmt": "e5m2"}, "e5m2 weights are not read"),
    ],
)
def test_other_formats_are_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config, {"lm_head.weight": ("BF16", [N, K])})


def test_scales_of_activations_and_of_the_cache_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = coded("tensor")
    for module in MODULES:
        tensors[f"{module}.input_scale"] = ("F32", [1])
    for name in ("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "k_scale", "kv_scale"):
        tensors[f"{LAYER}self_attn.{name}"] = ("F32", [1])
    declared = MODELOPT | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    # The tensors alone say it too.
    for config in (declared, compressed("tensor")):
        caplog.clear()
        with caplog.at_level("INFO"):
            found = read(tmp_path, config, tensors)
        assert len(found.unused) == len(MODULES) + 5
        lines = [record.getMessage() for record in caplog.records]
        assert [("activation scales" in line, "K and V" in line) for line in lines] == [
            (True, False),
            (False, True),
        ]
    caplog.clear()
    with caplog.at_level("INFO"):
        read(tmp_path, compressed("tensor"), coded("tensor"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("channel", "compressed-tensors", None),
        ("qwen", "fp8", None),
        ("channel", "fp8", "says compressed-tensors; drop it"),
        ("qwen", "fp8_per_block", "says fp8; drop it"),
        (None, "compressed-tensors", "the checkpoint is not quantised"),
        (None, "fp8_per_tensor", None),
    ],
)
def test_quantization_is_checked_against_the_file(
    name: str | None, wanted: str, message: str | None, tmp_path: Path
) -> None:
    config, tensors = of_dialect(name) if name is not None else (None, coded("tensor"))
    if name is None:
        of_bfloat16(tensors)
    if message is None:
        found = read(tmp_path, config, tensors, wanted)
        assert len(found.quantized) == (0 if name is None else len(MODULES))
    else:
        with pytest.raises(ConfigError, match=message):
            read(tmp_path, config, tensors, wanted)


def test_settings_that_are_not_taken() -> None:
    with pytest.raises(ConfigError, match="quantization must be fp8 or"):
        EngineConfig(quantization="int8").check()
    for value in ("fp8", "fp8_e4m3"):
        with pytest.raises(ConfigError, match="not taken yet"):
            EngineConfig(kv_cache_dtype=value).check()
    with pytest.raises(ConfigError, match=r"auto or bfloat16, got 'int8'; drop it"):
        EngineConfig(kv_cache_dtype="int8").check()


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("shape", [(N, K), (300, 200), (5000, 130)])
def test_codes_are_the_nearest_of_a_scale_that_reaches_the_largest(
    form: str, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[:128] = 0.0
    codes, scales = quantized_tensor(weight, form, "w")
    rows = scales.reshape(scales.shape[0], -1)
    if form == "block":
        rows = rows.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    found = codes.double() * rows.double()
    # Half of a step of 3 bits, or of the smallest subnormal.
    error = (found - weight.double()).abs()
    assert (
        error <= torch.maximum(weight.double().abs() / 16, rows.double() * 2**-10) * 1.001
    ).all()
    assert float(codes.float().abs().max()) == 448.0
    assert not codes[:128].float().any() and scales.dtype == torch.float32


def torch_codes(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch, whole."""
    wide = weight.float()
    if form == "block":
        height, width = weight.shape
        padded = torch.nn.functional.pad(wide, (0, -width % 128, 0, -height % 128))
        largest = padded.abs().reshape(-(-height // 128), 128, -1, 128).amax((1, 3))
    else:
        largest = wide.abs().amax(1, keepdim=True) if form == "channel" else wide.abs().max()
    scales = largest / 448.0
    scales[scales == 0.0] = 1.0
    factor = scales
    if form == "block":
        factor = scales.repeat_interleave(128, 0)[: weight.shape[0]]
        factor = factor.repeat_interleave(128, 1)[:, : weight.shape[1]]
    codes = (wide / factor).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes, scales.reshape(scale_shape(form, weight.shape))


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_those_of_torch(form: str, dtype: torch.dtype) -> None:
    """Of numbers of every size, of all codes and what lies midway between two, and of zeros."""
    random = torch.Generator().manual_seed(4)
    for shape in ((1, 1), (130, 257), (300, 128)):
        powers = torch.randint(-30, 10, shape, generator=random).float().exp2()
        weight = (torch.randn(shape, generator=random) * powers).to(dtype)
        weight[: shape[0] // 4] *= 0
        for found, expected in zip(
            quantized_tensor(weight, form, "w"), torch_codes(weight, form), strict=True
        ):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([448.0])])
    weight = torch.stack([ties, -ties]).to(dtype)  # of a channel or a tensor, whose scale is 1
    for found, expected in zip(
        quantized_tensor(weight, form, "w"), torch_codes(weight, form), strict=True
    ):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_numbers_need_not_be_aligned_nor_alone() -> None:
    """A file may have them anywhere; and a machine any number of threads."""
    data = torch.randn(300 * 130, generator=torch.Generator().manual_seed(5)).numpy().tobytes()
    expected = quantized(memoryview(data), "F32", (300, 130), "block", "w")
    assert quantized(memoryview(b"." + data)[1:], "F32", (300, 130), "block", "w") == expected
    for num_threads in (1, 3):
        assert _C.quantized(data, "F32", 300, 130, "block", num_threads) == expected
    with pytest.raises(ValueError, match="numbers of 300 x 131, got 156000 bytes of F32"):
        _C.quantized(data, "F32", 300, 131, "block", 1)


def test_weights_that_are_no_numbers_are_not_quantised() -> None:
    for value in (math.nan, math.inf):
        weight = torch.ones(8, 8)
        weight[3, 4] = value
        for form in SHAPES:
            with pytest.raises(ConfigError, match="w holds NaN or infinity"):
                quantized_tensor(weight, form, "w")


@pytest.mark.parametrize("form", SHAPES)
def test_compressed_tensors_makes_the_same_codes(form: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(2))
    codes, scales = quantized_tensor(weight, form, "w")
    block = {"block_structure": [128, 128]} if form == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=form, symmetric=True, **block)
    low, high = {
        "tensor": lambda: (weight.min().reshape(1), weight.max().reshape(1)),
        "channel": lambda: (weight.amin(1, True), weight.amax(1, True)),
        "block": lambda: (
            weight.reshape(3, 128, 2, 128).amin((1, 3)),
            weight.reshape(3, 128, 2, 128).amax((1, 3)),
        ),
    }[form]()
    their_scales, zero = calculate_qparams(low, high, args)
    assert torch.equal(their_scales.reshape(scales.shape), scales)
    theirs = quantize(weight, their_scales, zero, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(theirs.float(), codes.float())


def write_shards(folder: Path) -> None:
    """A target of one layer in two files."""
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 40}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
    config |= {"max_position_embeddings": 64, "rope_theta": 10000.0, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{module}.weight": torch.randn(64, 64).bfloat16() for module in MODULES}
    weights["lm_head.weight"] = torch.randn(40, 64).bfloat16()
    files = {name: f"model-{1 + ('mlp' in name)}.safetensors" for name in weights}
    for file in set(files.values()):
        part = {name: weights[name] for name in weights if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_a_folder_of_several_files_is_written_in_the_form_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "plain", tmp_path / "coded"
    write_shards(source)
    assert quantize.main([str(source), str(target), "--quantization", "fp8_per_block"]) == 0
    assert "7 of 15 tensors are FP8 codes" in capsys.readouterr().out
    declared = ModelConfig.from_folder(target).quantization
    assert declared is not None and declared.forms == {"block"}
    found = weight_format(target_tensors(target), declared)
    assert set(found.quantized) == {f"{module}.weight" for module in MODULES}
    for again, message in (
        (target, "compressed-tensors float-quantized already"),
        (source, "cannot be written"),
    ):
        assert quantize.main([str(again), str(target if again is source else tmp_path / "x")]) == 2
        assert re.search(message, capsys.readouterr().err)
