"""Devices, and the memory plan: what the engine takes, said before it is taken.

All that Python knows about kinds of devices is here.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from openspec.config import EngineConfig
from openspec.errors import ConfigError
from openspec.settings.setting import format_bytes

if TYPE_CHECKING:
    from openspec import _C

DeviceName = Literal["cpu", "cuda"]

GRAMMAR_SHARE = 16
"""The part of the host's free memory that an engine's compiled grammars may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """A kind of device."""

    name: DeviceName
    dtypes: tuple[str, ...]
    """Types of activations and KV that it computes in, the default first."""
    default_num_rows: int
    """Rows of a step: enough to keep the device busy, few enough for those who decode meanwhile."""
    min_logits_rows: int
    """Rows of logits that there is always room for: on CUDA, those of the largest recorded step."""
    max_logits_bytes: int
    """Logits beyond this are computed in several parts."""
    default_kv_share: float
    """Of the engine's memory beside weights and scratch, what KV pages take by default ..."""
    default_kv_bytes: int | None
    """... and a limit to it."""
    step_timing_s: float
    """What timing steps may take at the start: of processor time on the CPU, where the first few
    kinds are timed whatever they take. On CUDA each kind is timed once all the same."""
    memory_flag: str
    """The flag that gives KV pages more or less of the device's memory by default."""
    is_host: bool
    """Whether its memory is the host's, where compiled grammars are."""

    def choose_dtype(self, wanted: str) -> str:
        """The type to compute in; `wanted` may be "auto".

        Raises:
            ConfigError: if the device does not compute in it.
        """
        if wanted == "auto":
            return self.dtypes[0]
        if wanted not in self.dtypes:
            raise ConfigError(
                f"dtype {wanted} is not supported on {self.name}, which computes in "
                f"{' or '.join(self.dtypes)}; leave out --dtype or choose another --device"
            )
        return wanted

    def kv_flag(self, config: EngineConfig) -> str:
        """The flag that gives KV pages more or less memory."""
        return self.memory_flag if config.kv_cache_memory is None else "--kv-cache-memory"

    def choose_num_rows(self, wanted: int | None, num_needed: int) -> int:
        """Rows of a step: as wanted, else the default, or what is needed if that is more."""
        return max(self.default_num_rows, num_needed) if wanted is None else wanted

    def choose_num_logits_rows(self, num_decoding: int, vocab_size: int) -> int:
        """Rows of logits at a time, for steps in which at most so many rows decode."""
        most = self.max_logits_bytes // (4 * vocab_size)
        return max(self.min_logits_rows, min(num_decoding, most))


CPU = DeviceTraits(
    name="cpu",
    dtypes=("float32", "bfloat16"),
    default_num_rows=512,
    min_logits_rows=32,
    max_logits_bytes=128 << 20,
    default_kv_share=0.25,  # the machine has other uses for its memory
    default_kv_bytes=1 << 30,
    step_timing_s=0.5,
    memory_flag="--kv-cache-memory",
    is_host=True,
)
CUDA = DeviceTraits(
    name="cuda",
    dtypes=("bfloat16",),
    default_num_rows=2048,
    min_logits_rows=256,
    max_logits_bytes=256 << 20,
    default_kv_share=1.0,
    default_kv_bytes=None,
    step_timing_s=0.25,
    memory_flag="--gpu-memory-utilization",
    is_host=False,
)


def choose_device(wanted: Literal["auto", "cpu", "cuda"], why_no_cuda: str) -> DeviceTraits:
    """The device to run on. `why_no_cuda`: what keeps the engine from running there, or nothing.

    Raises:
        ConfigError: if CUDA is wanted and cannot be used, with what is missing.
    """
    if wanted == "cpu" or (wanted == "auto" and why_no_cuda):
        return CPU
    if why_no_cuda:
        raise ConfigError(
            f"--device cuda: {why_no_cuda}; it takes a build with CMAKE_ARGS=-DOPENSPEC_CUDA=ON "
            "and a GPU of compute capability 8.0 or newer that nvidia-smi lists and "
            "CUDA_VISIBLE_DEVICES does not hide; or use --device cpu"
        )
    return CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of the device as it is before the engine takes any; of several, the least."""

    budget_bytes: int
    """What the engine may take."""
    free_bytes: int
    """What it can take."""
    host_bytes: int = 0
    """What the engine can take of the host's memory, where that is another."""
    num_engines: int = 1
    """Engines of this server that divide the device; the figures are one's share."""
    num_ranks: int = 1
    """Ranks that share the engine's model; the figures are one's share."""

    @property
    def described(self) -> str:
        """What the engine may take, on a few words."""
        who = "the engine" if self.num_ranks == 1 else f"each of {self.num_ranks} ranks"
        whole = f"{format_bytes(self.budget_bytes)} that {who} may take"
        if self.num_engines == 1:
            return whole
        return f"{whole}, one of {self.num_engines} on this device"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Who takes how much."""

    weight_bytes: int
    scratch_bytes: int
    """Activations, logits, the sequence table, and room for what other ranks send."""
    drafter_bytes: int
    """Weights and scratch of the drafter; its state per token is in the pages."""
    state_bytes: int
    """Running states of all slots and of cached prefixes; 0: the model has none."""
    grammar_bytes: int
    """Compiled grammars, those in use and those that are kept: of the host's memory."""
    counts_grammars: bool
    """Whether that is the device's memory as well."""
    page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    available_bytes: int
    draft_page_bytes: int = 0
    """Of `page_bytes` the drafter's."""
    num_ranks: int = 1
    """Ranks of the engine, each of which takes as much as this."""
    exchange_bytes: int = 0
    """Of `scratch_bytes` the room for what other ranks send."""
    num_base_pages: int = 0
    """Pages of a sequence's running state, besides those of its tokens."""
    max_num_seqs: int = 1

    @property
    def kv_bytes(self) -> int:
        """All pages."""
        return self.num_pages * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.page_bytes // self.page_size

    @property
    def sequence_bytes(self) -> int:
        """What a sequence with a running state takes besides its KV; 0: the model has none."""
        return self.num_base_pages * self.page_bytes + self.state_bytes // self.max_num_seqs

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pages hold."""
        return self.num_pages * self.page_size

    @property
    def total_bytes(self) -> int:
        """Everything on the device."""
        fixed_bytes = self.weight_bytes + self.scratch_bytes + self.drafter_bytes
        grammar_bytes = self.grammar_bytes if self.counts_grammars else 0
        return fixed_bytes + self.state_bytes + self.kv_bytes + grammar_bytes

    def as_dict(self) -> dict[str, int]:
        """The parts by name, in bytes, for messages and metrics."""
        return {
            "weight_bytes": self.weight_bytes,
            "scratch_bytes": self.scratch_bytes,
            "exchange_bytes": self.exchange_bytes,
            "drafter_bytes": self.drafter_bytes,
            "state_bytes": self.state_bytes,
            "kv_bytes": self.kv_bytes,
            "grammar_bytes": self.grammar_bytes,
            "page_bytes": self.page_bytes,
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "token_bytes": self.token_bytes,
            "draft_token_bytes": self.draft_page_bytes // self.page_size,
            "sequence_bytes": self.sequence_bytes,
            "num_kv_tokens": self.num_kv_tokens,
            "total_bytes": self.total_bytes,
            "available_bytes": self.available_bytes,
        }

    def describe(self) -> str:
        """The plan on one line."""
        grammars = f", grammars {format_bytes(self.grammar_bytes)}" if self.counts_grammars else ""
        states = ""
        if self.state_bytes > 0:
            states = (
                f"states {format_bytes(self.state_bytes)} (a sequence takes "
                f"{format_bytes(self.sequence_bytes)}, {self.num_base_pages} pages with it, and a "
                f"token {format_bytes(self.token_bytes)}), "
            )
        of_tokens = ""
        if self.draft_page_bytes > 0:
            target = (self.page_bytes - self.draft_page_bytes) // self.page_size
            draft = self.draft_page_bytes // self.page_size
            of_tokens = (
                f"; {format_bytes(target)} of a token and {format_bytes(draft)} of the drafter"
            )
        whose, inboxes = "", ""
        if self.num_ranks > 1:
            whose = f"each of {self.num_ranks} ranks has "
            inboxes = f" (what other ranks send: {format_bytes(self.exchange_bytes)})"
        return (
            f"{whose}weights {format_bytes(self.weight_bytes)}, "
            f"KV {format_bytes(self.kv_bytes)} ({self.num_pages} pages, {self.num_kv_tokens} "
            f"tokens{of_tokens}), {states}scratch {format_bytes(self.scratch_bytes)}"
            f"{inboxes}, drafter {format_bytes(self.drafter_bytes)}{grammars}: "
            f"{format_bytes(self.total_bytes)} of {format_bytes(self.available_bytes)} free"
        )


def plan_memory(
    config: EngineConfig,
    runner_plan: _C.MemoryPlan,
    max_model_len: int,
    device: DeviceTraits,
    memory: DeviceMemory,
) -> MemoryPlan:
    """Sizes the page pool. Lowers `max_model_len` to what fits, unless the user set it.

    Raises:
        ConfigError: if weights, scratch and a useful number of pages do not fit, with the numbers.
    """
    page_bytes, page_size = runner_plan.page_bytes, config.page_size
    fixed = {
        "weight_bytes": runner_plan.weight_bytes,
        "scratch_bytes": runner_plan.scratch_bytes + runner_plan.table_bytes,
        "drafter_bytes": runner_plan.draft_fixed_bytes,
        "state_bytes": runner_plan.state_bytes,
    }
    host_bytes = memory.free_bytes if device.is_host else memory.host_bytes
    grammar_bytes = host_bytes // GRAMMAR_SHARE
    fixed_bytes = sum(fixed.values()) + (grammar_bytes if device.is_host else 0)
    left_bytes = memory.budget_bytes - fixed_bytes
    # A step that folds a running state writes other pages than it reads, as does one ahead of it.
    num_state_pages = (2 if device.is_host else 3) * runner_plan.num_base_pages
    pages_per_seq = -(-max_model_len // page_size) + num_state_pages
    kv_bytes, flag = config.kv_cache_memory, device.kv_flag(config)
    fewer = ", or run fewer --replicas" if memory.num_engines > 1 else ""
    if kv_bytes is None:
        kv_bytes = int(left_bytes * device.default_kv_share)
        if device.default_kv_bytes is not None:
            kv_bytes = min(kv_bytes, device.default_kv_bytes)
        if config.max_model_len is not None:
            kv_bytes = max(kv_bytes, min(pages_per_seq * page_bytes, left_bytes))
    num_pages = min(max(kv_bytes, 0) // page_bytes, config.max_num_seqs * pages_per_seq)
    if num_pages < pages_per_seq:
        num_token_pages = max(num_pages - num_state_pages, 0)
        if config.max_model_len is not None or num_token_pages < 2:
            raise ConfigError(
                f"KV memory of {format_bytes(max(kv_bytes, 0))} holds "
                f"{num_token_pages * page_size} tokens, one sequence of max_model_len "
                f"{max_model_len} needs {format_bytes(pages_per_seq * page_bytes)} (weights, "
                f"scratch and grammars take {format_bytes(fixed_bytes)} of the "
                f"{memory.described}); raise {flag} or lower --max-model-len{fewer}"
            )
        max_model_len = num_token_pages * page_size
    plan = MemoryPlan(
        **fixed,
        grammar_bytes=grammar_bytes,
        counts_grammars=device.is_host,
        page_bytes=page_bytes,
        draft_page_bytes=runner_plan.draft_page_bytes,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        available_bytes=memory.free_bytes,
        num_ranks=memory.num_ranks,
        exchange_bytes=runner_plan.exchange_bytes,
        num_base_pages=runner_plan.num_base_pages,
        max_num_seqs=config.max_num_seqs,
    )
    if plan.total_bytes > memory.free_bytes:
        raise ConfigError(
            f"not enough memory: {plan.describe()}; lower {flag}, --max-num-seqs or "
            f"--max-num-batched-tokens, or take a smaller model{fewer}"
        )
    return plan


def available_memory() -> int:
    """Bytes that this process can still take: of the system, its control group or RLIMIT_AS."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    available = page_bytes * os.sysconf("SC_PHYS_PAGES")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, usage = _read(Path(limit_file)).strip(), _read(Path(usage_file)).strip()
        if limit.isdecimal() and usage.isdecimal():
            # The page cache counts as used there but gives way; it is not known how much of it.
            available = min(available, max(int(limit) - int(usage), int(limit) // 2))
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        num_pages = int(_read(Path("/proc/self/statm")).split()[0])
        available = min(available, max(most - num_pages * page_bytes, 0))
    return available


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, cut by the control group's quota."""
    num_cpus = len(os.sched_getaffinity(0))
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]) > 0:
        num_cpus = min(num_cpus, max(1, int(quota[0]) // int(quota[1])))
    return num_cpus


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
