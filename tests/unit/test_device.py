from __future__ import annotations

from typing import get_args

import pytest

from openspec.config import EngineConfig
from openspec.engine.memory import CPU, CUDA, DeviceName, choose_device
from openspec.errors import ConfigError


def test_auto_takes_cuda_where_it_can() -> None:
    assert choose_device("auto", "").name == CUDA.name
    assert choose_device("auto", "no GPU is visible").name == CPU.name
    assert choose_device("cpu", "").name == CPU.name
    assert choose_device("cuda", "").name == CUDA.name
    assert {CPU.name, CUDA.name} == set(get_args(DeviceName))


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: no GPU is visible; .* --device cpu$"):
        choose_device("cuda", "no GPU is visible")


def test_types() -> None:
    assert CPU.choose_dtype("auto") == "float32"
    assert CUDA.choose_dtype("auto") == "bfloat16"
    assert CPU.choose_dtype("bfloat16") == CUDA.choose_dtype("bfloat16") == "bfloat16"
    with pytest.raises(ConfigError, match=r"dtype float32 is not supported on cuda, .* bfloat16;"):
        CUDA.choose_dtype("float32")


def test_rows_of_a_step() -> None:
    config = EngineConfig()
    assert CPU.choose_num_rows(None, config.min_num_batched_tokens) == 512
    assert CUDA.choose_num_rows(None, config.min_num_batched_tokens) == 2048
    config = EngineConfig(max_num_seqs=4096)
    assert CUDA.choose_num_rows(None, config.min_num_batched_tokens) == 4096 + config.page_size
    assert CUDA.choose_num_rows(100, 80) == 100
