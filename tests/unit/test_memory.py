from __future__ import annotations

from dataclasses import dataclass

import pytest

from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.memory import available_cpus, available_memory, plan_memory

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    weight_bytes: int = 1 << 20
    scratch_bytes: int = 1 << 20
    table_bytes: int = 1 << 10
    draft_fixed_bytes: int = 1 << 10
    page_bytes: int = 1 << 16


def test_no_more_than_useful() -> None:
    plan = plan_memory(EngineConfig(max_num_seqs=4), Plan(), 100, 64 * GIB)
    assert plan.num_pages == 4 * 7 and plan.num_kv_tokens == 4 * 7 * 16
    assert plan.max_model_len == 100
    assert plan.total_bytes == sum(
        plan.as_dict()[name]
        for name in ("weight_bytes", "scratch_bytes", "drafter_bytes", "kv_bytes")
    )
    assert "28 pages, 448 tokens" in plan.describe()


def test_default_is_capped() -> None:
    assert plan_memory(EngineConfig(), Plan(), 1 << 20, 64 * GIB).kv_bytes == GIB
    assert plan_memory(EngineConfig(), Plan(), 1 << 20, GIB).kv_bytes < GIB // 4


def test_model_len_is_lowered_unless_it_was_set() -> None:
    config = EngineConfig(kv_cache_memory=10 << 16)
    assert plan_memory(config, Plan(), 1000, GIB).max_model_len == 160
    config = EngineConfig(kv_cache_memory=10 << 16, max_model_len=1000)
    with pytest.raises(
        ConfigError, match=r"holds 160 tokens, .* max_model_len 1000 needs 3\.94 MiB"
    ):
        plan_memory(config, Plan(), 1000, GIB)
    # Without a size given, one full sequence is found room for.
    config = EngineConfig(max_model_len=1 << 18)
    assert plan_memory(config, Plan(page_bytes=1 << 17), 1 << 18, 64 * GIB).kv_bytes == 2 * GIB


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not enough memory: weights 2\.00 GiB"):
        plan_memory(
            EngineConfig(kv_cache_memory=1 << 26), Plan(weight_bytes=2 * GIB), 1000, 2 * GIB
        )
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        plan_memory(EngineConfig(), Plan(weight_bytes=2 * GIB), 1000, GIB)


def test_this_machine() -> None:
    assert available_memory() > 1 << 26
    assert available_cpus() >= 1
