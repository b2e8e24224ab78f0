"""Targets in FP8: the dequantised model's logits, and the same bits for all rows and ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from bench.random_target import PUBLISHED, write_random_target

from openspec import _C
from openspec.checkpoint.quantization.weight_format import (
    BLOCK,
    WeightFormat,
    made_format,
    weight_format,
)
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import target_tensors
from openspec.errors import ConfigError
from openspec.tools.quantize import quantized_tensor, write_quantized
from tests.gates import harness, other_targets
from tests.gates.test_logits import (
    MAX_ERROR,
    Reference,
    Rows,
    Subject,
    assert_same_bits,
    check_company,
    reference,
    rms_error,
    worst_error,
)
from tests.gates.test_tensor_parallel import new_folder
from tests.gates.workload import jobs

WANTED = ("fp8", "fp8_per_tensor", "fp8_per_block")
SHAPE = {
    # Blocks of 128 that heads of 64, key heads and ranks cut; biases; sums of four splits.
    "hidden_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1056,
    "vocab_size": 4112,
    "eos_token_id": 2,
}


@pytest.fixture
def on_the_host() -> None:
    if harness.DEVICE != "cpu":
        pytest.skip("of the host, whatever the device")


@cache
def plain_folder() -> Path:
    return write_random_target(new_folder(), PUBLISHED["qwen2.5-7b"] | SHAPE)


@cache
def coded_folder(wanted: str) -> Path:
    root = new_folder() / "model"
    write_quantized(plain_folder(), root, wanted)
    return root


def dequantised(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """As float32; independent of the loader: a scale for each of 128 rows and columns, or fewer."""
    whole = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            continue
        scale = tensors.get(f"{name}_scale")
        whole[name] = tensor.float()
        if scale is not None:
            height, width = tensor.shape
            rows = scale.reshape(scale.shape[0], -1)
            if rows.shape[0] not in (1, height) or rows.shape[1] > 1:
                rows = rows.repeat_interleave(BLOCK, 0)[:height].repeat_interleave(BLOCK, 1)
            whole[name] = whole[name] * rows[:, : width if rows.shape[1] > 1 else 1]
    return whole


def subject(
    folder: Path, wanted: str | None = None, dtype: str | None = None, **settings: Any
) -> Subject:
    """On the device of the gates, in its first type of activations."""
    config = ModelConfig.from_folder(folder)
    declared = config.quantization
    found = WeightFormat() if wanted is None else made_format(config.spec, wanted)
    if declared is not None:
        found = weight_format(target_tensors(folder), declared)
    dtype = dtype or ("float32" if harness.DEVICE == "cpu" else "bfloat16")
    return Subject(folder, dtype=dtype, device=harness.DEVICE, weight_format=found, **settings)


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return np.random.default_rng(3).integers(0, SHAPE["vocab_size"], 85).tolist()


def dequantised_truth(wanted: str, token_ids: list[int], folder: Path) -> Reference:
    """Of transformers in float32, of a checkpoint that `folder` then holds."""
    root = coded_folder(wanted)
    config = json.loads((root / "config.json").read_text())
    config.pop("quantization_config")
    config["dtype"] = config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(root / "model.safetensors")
    safetensors.torch.save_file(
        dequantised(tensors), folder / "model.safetensors", {"format": "pt"}
    )
    return reference(folder, token_ids, torch.float32)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.usefixtures("on_the_host")
def test_logits_are_the_dequantised_models(
    wanted: str, token_ids: list[int], tmp_path: Path
) -> None:
    truth = dequantised_truth(wanted, token_ids, tmp_path)
    found = subject(coded_folder(wanted)).score(token_ids, len(token_ids))
    assert worst_error(found.logits, truth.logits) < MAX_ERROR
    # And they are not those of the model that it was made from.
    plain = subject(plain_folder()).score(token_ids, len(token_ids))
    assert worst_error(found.logits, plain.logits) > 10 * MAX_ERROR


@pytest.mark.parametrize("wanted", WANTED)
def test_bfloat16_is_no_worse_than_a_model_in_bfloat16(
    wanted: str, token_ids: list[int], tmp_path: Path
) -> None:
    """transformers' of the weights before, each against its own model in float32."""
    truth = dequantised_truth(wanted, token_ids, tmp_path)
    found = subject(coded_folder(wanted), dtype="bfloat16").score(token_ids, len(token_ids))
    plain, theirs = (
        reference(plain_folder(), token_ids, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    error = rms_error(found.logits, truth.logits)
    assert error <= rms_error(theirs.logits, plain.logits)


def test_chains_with_scales_of_channels_are_those_of_bfloat16(
    token_ids: list[int], tmp_path: Path
) -> None:
    """Bit for bit where scales are powers of two: the weights are numbers of bfloat16 then too."""
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    shutil.copytree(coded_folder("fp8"), coded)
    shutil.copytree(plain_folder(), plain)
    tensors = safetensors.torch.load_file(coded / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name] = tensors[name].log2().round().exp2()
    safetensors.torch.save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    whole = {name: tensor.bfloat16() for name, tensor in dequantised(tensors).items()}
    safetensors.torch.save_file(whole, plain / "model.safetensors", {"format": "pt"})
    expected, found = (
        subject(root, dtype="bfloat16").score(token_ids, 50) for root in (plain, coded)
    )
    assert_same_bits(found, expected)


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_depends_on_chunks_company_or_ranks(
    wanted: str, dtype: str, token_ids: list[int]
) -> None:
    if harness.DEVICE == "cuda" and dtype == "float32":
        pytest.skip("CUDA computes in bfloat16")
    root = coded_folder(wanted)
    one = subject(root, dtype=dtype)
    whole = one.score(token_ids, len(token_ids))
    for chunk in (1, 7, 16):
        assert_same_bits(one.score(token_ids, chunk), whole)
    check_company(one, token_ids, whole)
    for num_ranks in (2, 4):
        if harness.DEVICE == "cuda" and num_ranks > len(_C.cuda_device_names()):
            continue
        shared = subject(root, dtype=dtype, tensor_parallel_size=num_ranks)
        assert_same_bits(shared.score(token_ids, 50), whole)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("wanted", [None, *WANTED])
def test_a_row_has_its_bits_in_steps_of_1_to_256_rows(wanted: str | None, num_ranks: int) -> None:
    if harness.DEVICE == "cuda" and num_ranks > len(_C.cuda_device_names()):
        pytest.skip(f"needs {num_ranks} CUDA devices")
    root = plain_folder() if wanted is None else coded_folder(wanted)
    ids = np.random.default_rng(5).integers(0, SHAPE["vocab_size"], 256).tolist()
    whole = subject(root).score(ids, 1)
    shared = subject(root, tensor_parallel_size=num_ranks)
    for num_rows in range(1, len(ids) + 1):
        found = shared.score(ids[:num_rows], num_rows)
        assert_same_bits(found, Rows(whole.logits[:num_rows], whole.layers[:, :num_rows]))


@pytest.mark.parametrize("wanted", WANTED)
def test_made_at_load_is_what_the_tool_writes(wanted: str, token_ids: list[int]) -> None:
    saved = subject(coded_folder(wanted)).score(token_ids, 40)
    made = subject(plain_folder(), wanted).score(token_ids, 40)
    assert_same_bits(made, saved)


def write_qwen(target: Path, dtype: torch.dtype) -> None:
    """The plain model as Qwen publishes blocks: weight_scale_inv of a narrower type."""
    shutil.copytree(plain_folder(), target)
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "lm_head.weight"))]:
        codes, scales = quantized_tensor(tensors[name], "block", name)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales.to(dtype)
    safetensors.torch.save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.usefixtures("on_the_host")
def test_scales_are_widened_exactly(
    dtype: torch.dtype, token_ids: list[int], tmp_path: Path
) -> None:
    """As transformers dequantises blocks, asked for float32; with its model's logits."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    write_qwen(tmp_path / "coded", dtype)
    tensors = safetensors.torch.load_file(tmp_path / "coded" / "model.safetensors")
    plain = {
        name: _dequantize_fp8_weight(
            tensor, tensors[f"{name}_scale_inv"], [BLOCK, BLOCK], torch.float32
        )
        if f"{name}_scale_inv" in tensors
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    shutil.copytree(plain_folder(), tmp_path / "plain")
    safetensors.torch.save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    truth = reference(tmp_path / "plain", token_ids, torch.float32)
    found = subject(tmp_path / "coded").score(token_ids, len(token_ids))
    assert worst_error(found.logits, truth.logits) < MAX_ERROR
    shared = subject(tmp_path / "coded", tensor_parallel_size=4)
    assert_same_bits(shared.score(token_ids, 50), found)


def test_a_tied_head_is_not_coded(tmp_path: Path) -> None:
    write_qwen(tmp_path / "model", torch.bfloat16)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is e4m3, but model\.embed"):
        harness.make_core(model=str(tmp_path / "model"), method="none")


@pytest.mark.usefixtures("on_the_host")
def test_the_cache_has_the_type_of_the_activations() -> None:
    harness.make_core(method="none", dtype="bfloat16", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="set --dtype bfloat16 too"):
        harness.make_core(method="none", dtype="float32", kv_cache_dtype="bfloat16")


def test_a_nan_among_the_codes_ends_the_start(tmp_path: Path) -> None:
    shutil.copytree(coded_folder("fp8"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for code in (0x7F, 0xFF):
        tensors[name].view(torch.uint8)[700, 31] = code
        safetensors.torch.save_file(tensors, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=rf"{name} holds NaN"):
            harness.make_core(model=str(file.parent), method="none")


def test_a_nan_to_quantise_is_placed_once(tmp_path: Path) -> None:
    shutil.copytree(plain_folder(), tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = safetensors.torch.load_file(file)
    tensors[name][700, 31] = torch.nan
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="get the checkpoint anew") as raised:
        harness.make_core(model=str(file.parent), method="none", quantization="fp8")
    assert str(raised.value).count(name) == 1


def test_tensors_of_one_matrix_have_one_format(tmp_path: Path) -> None:
    shutil.copytree(coded_folder("fp8"), tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = safetensors.torch.load_file(file)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()
    tensors.pop(f"{name}.weight_scale")
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(name)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="make one matrix, so all of them must be bf16"):
        harness.make_core(model=str(file.parent), method="none")


@pytest.mark.usefixtures("on_the_host")
def test_the_log_and_the_server_say_the_format(caplog: pytest.LogCaptureFixture) -> None:
    made = "FP8 with scales of each block (made of bfloat16 at load)"
    read = "FP8 with scales of each channel (compressed-tensors float-quantized)"
    for folder, wanted, name in (
        (plain_folder(), None, "bfloat16"),
        (plain_folder(), "fp8_per_block", made),
        (coded_folder("fp8"), None, read),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            core = harness.make_core(model=str(folder), method="none", quantization=wanted)
        assert core.info.weights == name
        assert f", weights {name}, " in caplog.text


def test_memory_counts_codes_and_scales() -> None:
    def weight_bytes(**settings: Any) -> int:
        return harness.make_core(method="none", **settings).info.memory_plan["weight_bytes"]

    plain = weight_bytes(model=str(plain_folder()))
    tensors = safetensors.torch.load_file(coded_folder("fp8") / "model.safetensors")
    num_codes = sum(one.numel() for one in tensors.values() if one.dtype == torch.float8_e4m3fn)
    for wanted, share in (("fp8", 0.02), ("fp8_per_block", 0.1)):
        saved = plain - weight_bytes(model=str(coded_folder(wanted)))
        assert saved == plain - weight_bytes(model=str(plain_folder()), quantization=wanted)
        assert num_codes * (1 - share) < saved < num_codes


def test_random_weights_are_quantised_too() -> None:
    settings = {"model": str(plain_folder()), "method": "none", "load_format": "dummy"}
    cores = [harness.make_core(**settings, quantization=wanted) for wanted in (None, "fp8")]
    batch = jobs("greedy", 2)
    plain, coded = (harness.texts(harness.run(core, batch)) for core in cores)
    assert plain != coded
    with pytest.raises(ConfigError, match="which needs the files"):
        harness.make_core(**settings | {"model": str(coded_folder("fp8"))})


def test_heads_draft_for_targets_in_fp8() -> None:
    """The embedded model's own heads, which are bfloat16."""
    folder = other_targets.folder("fp8 block")
    core = harness.make_core(model=str(folder), method="eagle3", adaptive_speculation=False)
    batch = jobs("greedy", 8)
    found = harness.run(core, batch)
    plain = harness.run_alone(harness.make_core(model=str(folder), **harness.PLAIN), batch)
    assert harness.texts(found) == harness.texts(plain)
    stats = core.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 10
    assert core.info.weights.startswith("FP8 with scales of each block")
