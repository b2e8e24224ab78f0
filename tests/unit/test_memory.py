from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from openspec.config import EngineConfig
from openspec.engine import load
from openspec.engine import plan as engine_plan
from openspec.engine.memory import (
    CPU,
    CUDA,
    DeviceMemory,
    MemoryPlan,
    available_cpus,
    available_memory,
    plan_memory,
)
from openspec.errors import ConfigError
from openspec.specs.runner import RunnerConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    weight_bytes: int = 1 << 20
    scratch_bytes: int = 1 << 20
    table_bytes: int = 1 << 10
    draft_fixed_bytes: int = 1 << 10
    state_bytes: int = 0
    num_base_pages: int = 0
    page_bytes: int = 1 << 16
    draft_page_bytes: int = 0
    exchange_bytes: int = 0


def plan_cpu(config: EngineConfig, plan: Plan, max_model_len: int, available: int) -> MemoryPlan:
    memory = DeviceMemory(budget_bytes=available, free_bytes=available)
    return plan_memory(config, plan, max_model_len, CPU, memory)


def plan_cuda(
    config: EngineConfig, plan: Plan, max_model_len: int, budget: int, free: int
) -> MemoryPlan:
    memory = DeviceMemory(budget_bytes=budget, free_bytes=free)
    return plan_memory(config, plan, max_model_len, CUDA, memory)


def test_no_more_than_useful() -> None:
    plan = plan_cpu(EngineConfig(max_num_seqs=4), Plan(), 100, 64 * GIB)
    assert plan.num_pages == 4 * 7 and plan.num_kv_tokens == 4 * 7 * 16
    assert plan.max_model_len == 100
    assert plan.total_bytes == sum(
        plan.as_dict()[name]
        for name in ("weight_bytes", "scratch_bytes", "drafter_bytes", "kv_bytes", "grammar_bytes")
    )
    assert "28 pages, 448 tokens" in plan.describe() and "states" not in plan.describe()


def test_running_states_leave_less_for_pages() -> None:
    plan = plan_cuda(EngineConfig(), Plan(), 1 << 20, 64 * GIB, 70 * GIB)
    stateful = plan_cuda(EngineConfig(), Plan(state_bytes=GIB), 1 << 20, 64 * GIB, 70 * GIB)
    assert stateful.state_bytes == GIB and "states 1.00 GiB" in stateful.describe()
    assert stateful.kv_bytes == plan.kv_bytes - GIB
    assert stateful.total_bytes == plan.total_bytes


def test_default_is_capped() -> None:
    assert plan_cpu(EngineConfig(), Plan(), 1 << 20, 64 * GIB).kv_bytes == GIB
    assert plan_cpu(EngineConfig(), Plan(), 1 << 20, GIB).kv_bytes < GIB // 4


def test_model_len_is_lowered_unless_it_was_set() -> None:
    config = EngineConfig(kv_cache_memory=10 << 16)
    assert plan_cpu(config, Plan(), 1000, GIB).max_model_len == 160
    config = EngineConfig(kv_cache_memory=10 << 16, max_model_len=1000)
    with pytest.raises(
        ConfigError, match=r"holds 160 tokens, .* max_model_len 1000 needs 3\.94 MiB"
    ):
        plan_cpu(config, Plan(), 1000, GIB)
    # Without a size given, one full sequence is found room for.
    config = EngineConfig(max_model_len=1 << 18)
    assert plan_cpu(config, Plan(page_bytes=1 << 17), 1 << 18, 64 * GIB).kv_bytes == 2 * GIB


def test_the_plan_is_one_rank_s() -> None:
    memory = DeviceMemory(budget_bytes=GIB, free_bytes=GIB, num_ranks=4)
    plan = plan_memory(EngineConfig(), Plan(exchange_bytes=1 << 19), 100, CPU, memory)
    assert plan.describe().startswith("each of 4 ranks has weights 1.00 MiB")
    assert "scratch 1.00 MiB (what other ranks send: 512.00 KiB), " in plan.describe()
    assert plan.as_dict()["exchange_bytes"] == 1 << 19
    with pytest.raises(ConfigError, match=r"of the 1\.00 GiB that each of 4 ranks may take"):
        plan_memory(EngineConfig(), Plan(weight_bytes=2 * GIB), 1000, CPU, memory)


@dataclass
class Core:
    """The compiled core on GPUs of 80 GiB, for a model of so many bytes."""

    weight_bytes: int
    num_gpus: int = 1
    num_plans: int = 0

    def why_no_cuda(self) -> str:
        return ""

    def drafter_names(self) -> list[str]:
        return ["none"]

    def cuda_memory(self, device: int) -> tuple[int, int]:
        return (80 - device) * GIB, 80 * GIB

    def cuda_device_names(self) -> list[str]:
        return ["NVIDIA H100"] * self.num_gpus

    def cuda_peer(self, device: int, other: int) -> tuple[bool, int]:
        return device != other, 0

    def memory_plan(self, runner: RunnerConfig) -> Plan:
        self.num_plans += 1
        if runner.tensor_parallel_size > 4:
            raise ValueError("8 ranks do not divide the heads")
        return Plan(weight_bytes=self.weight_bytes // runner.tensor_parallel_size)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (60, None),
        (140, "; each of 2 such devices would hold its part with --tensor-parallel-size 2$"),
        (280, "; each of 4 such devices would hold its part with --tensor-parallel-size 4$"),
        (560, "raise --gpu-memory-utilization or lower --max-model-len$"),
    ],
)
def test_how_many_gpus_would_hold_a_model(
    size: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_plan, "_C", Core(size * GIB))
    config = EngineConfig(method="none")
    if said is None:
        assert engine_plan.plan_engine(config).memory.weight_bytes == size * GIB
    else:
        with pytest.raises(ConfigError, match=said) as caught:
            engine_plan.plan_engine(config)
        assert "\n" not in str(caught.value)


def no_nvidia_smi(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    raise FileNotFoundError("nvidia-smi")


def test_ranks_on_cuda_have_the_memory_of_the_fullest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_plan, "_C", Core(100 * GIB, num_gpus=4))
    monkeypatch.setattr(subprocess, "run", no_nvidia_smi)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    plan = engine_plan.plan_engine(EngineConfig(method="none", tensor_parallel_size=4)).memory
    assert plan.available_bytes == 77 * GIB and plan.weight_bytes == 25 * GIB
    assert plan.describe().startswith("each of 4 ranks has weights 25.0")
    assert "GPU 3 has 77.00 GiB free, another rank's 80.00 GiB" in caplog.text
    # Read by CUDA when it is first used.
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    caplog.clear()
    engine_plan.plan_engine(EngineConfig(method="none", tensor_parallel_size=2))
    assert "another rank's" not in caplog.text


def test_ranks_without_gpus_are_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core(GIB)
    monkeypatch.setattr(engine_plan, "_C", core)
    monkeypatch.setattr(subprocess, "run", no_nvidia_smi)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")
    with pytest.raises(ConfigError, match="takes 2 GPUs, of which CUDA shows 1: NVIDIA H100; "):
        load.load_engine(EngineConfig(method="none", tensor_parallel_size=2))
    assert core.num_plans == 0


def test_ranks_that_do_not_divide_a_model_are_refused() -> None:
    """The embedded model has four query heads."""
    with pytest.raises(ConfigError, match="4 query heads") as caught:
        load.load_engine(EngineConfig(device="cpu", tensor_parallel_size=8))
    assert "\n" not in str(caught.value)


def test_ranks_on_cpu_say_that_they_are_a_reference(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(
        method="none", device="cpu", tensor_parallel_size=2, adaptive_speculation=False
    )
    with caplog.at_level("INFO"):
        core = load.load_engine(config)
    assert core.info.tensor_parallel_size == 2
    core.close()
    assert "2 ranks on cpu are a reference: the same text as one, and no sooner" in caplog.messages


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not enough memory: weights 2\.00 GiB"):
        plan_cpu(EngineConfig(kv_cache_memory=1 << 26), Plan(weight_bytes=2 * GIB), 1000, 2 * GIB)
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        plan_cpu(EngineConfig(), Plan(weight_bytes=2 * GIB), 1000, GIB)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the system says of itself, by path; all else cannot be read."""
    found: dict[str, str] = {}
    monkeypatch.setattr("openspec.engine.memory._read", lambda path: found.get(str(path), ""))
    return found


@pytest.mark.parametrize(
    ("quota", "num_cpus"),
    [
        ("max 100000", 6),
        ("", 6),
        ("nonsense", 6),
        ("350000 100000", 3),
        ("50000 100000", 1),
        ("900000 100000", 6),
        ("100000 0", 6),
    ],
)
def test_cpus_are_the_affinity_cut_by_the_quota(
    quota: str, num_cpus: int, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3, 9)) if pid == 0 else {0})
    files["/sys/fs/cgroup/cpu.max"] = quota
    assert available_cpus() == num_cpus


def test_cpus_of_this_process() -> None:
    """One that may use a single processor counts one."""
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from openspec.engine.memory import available_cpus; print(available_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


CGROUP = "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("given", "available"),
    [
        ({}, 8 * GIB),
        ({f"{CGROUP}.max": "max", f"{CGROUP}.current": "5"}, 8 * GIB),
        ({f"{CGROUP}.max": f"{4 * GIB}", f"{CGROUP}.current": f"{GIB}"}, 3 * GIB),
        # What the page cache takes gives way.
        ({f"{CGROUP}.max": f"{4 * GIB}", f"{CGROUP}.current": f"{4 * GIB}"}, 2 * GIB),
        (
            {
                f"{CGROUP}/memory.limit_in_bytes": f"{6 * GIB}",
                f"{CGROUP}/memory.usage_in_bytes": f"{GIB}",
            },
            5 * GIB,
        ),
    ],
)
def test_memory_is_the_system_s_cut_by_the_control_group_s(
    given: dict[str, str], available: int, files: dict[str, str]
) -> None:
    files["/proc/meminfo"] = f"MemTotal: 1 kB\nMemAvailable:    {8 << 20} kB\n"
    files.update(given)
    assert available_memory() == available


def test_memory_of_this_process() -> None:
    """RLIMIT_AS counts address space, of which the process has some."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30));"
        "from openspec.engine.memory import available_memory; print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < GIB


def test_a_gpu_is_filled_up_to_the_share_given() -> None:
    weights = Plan(weight_bytes=8 * GIB, scratch_bytes=GIB)
    plan = plan_cuda(EngineConfig(), weights, 1 << 20, 72 * GIB, 79 * GIB)
    assert 72 * GIB - plan.page_bytes < plan.total_bytes <= 72 * GIB
    assert plan.available_bytes == 79 * GIB
    # Pages for all sequences at full length are enough there too.
    assert plan_cuda(EngineConfig(max_num_seqs=4), weights, 100, 72 * GIB, 79 * GIB).num_pages == 28
    # A size that was asked for may go beyond the share, not beyond what is free.
    config = EngineConfig(kv_cache_memory=66 * GIB)
    assert plan_cuda(config, weights, 1 << 20, 72 * GIB, 79 * GIB).kv_bytes == 66 * GIB


def test_what_cannot_fit_on_a_gpu_is_refused() -> None:
    weights = Plan(weight_bytes=8 * GIB)
    with pytest.raises(
        ConfigError, match=r"72\.00 GiB of 60\.00 GiB free; lower --gpu-memory-utilization"
    ):
        plan_cuda(EngineConfig(), weights, 1 << 20, 72 * GIB, 60 * GIB)
    with pytest.raises(ConfigError, match=r"of 60\.00 GiB free; lower --kv-cache-memory"):
        config = EngineConfig(kv_cache_memory=60 * GIB)
        plan_cuda(config, weights, 1 << 20, 72 * GIB, 60 * GIB)
    with pytest.raises(
        ConfigError,
        match=r"8\.00 GiB of the 4\.00 GiB that the engine may take\); raise --gpu-memory-util",
    ):
        plan_cuda(EngineConfig(), weights, 1 << 20, 4 * GIB, 60 * GIB)
