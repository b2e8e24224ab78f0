"""What CUDA is asked for in this process, by CUPTI: which calls, of which device, in which order.

Run as a program, an engine's start and some requests are logged, and what was counted is printed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SOURCE = Path(__file__).with_suffix(".cpp")
DRIVER_API, RUNTIME_API, RESOURCES = 1, 2, 3  # CUPTI_CB_DOMAIN_...
MODULE_LOADED = 6  # CUPTI_CBID_RESOURCE_MODULE_LOADED
LOADED = "module loaded"
ENTRY = np.dtype(
    [("name", np.int32), ("kernel", np.int32), ("context", np.uint64), ("event", np.uint64)]
)

# Beginnings of names, in the runtime's interface and in the driver's.
KINDS = {
    "loads": (LOADED,),
    "takes memory": (
        *("cudaMalloc", "cudaHostAlloc", "cudaHostRegister"),
        *("cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuMemCreate", "cuMemMap"),
    ),
    "frees memory": (
        *("cudaFree", "cudaHostUnregister"),
        *("cuMemFree", "cuMemHostUnregister", "cuMemRelease", "cuMemUnmap"),
    ),
    "instantiates": (
        *("cudaGraphInstantiate", "cudaGraphExecUpdate", "cudaGraphExecDestroy"),
        *("cuGraphInstantiate", "cuGraphExecUpdate", "cuGraphExecDestroy"),
    ),
}


class Call(NamedTuple):
    """One entry, as the call begins."""

    name: str
    context: int = 0
    event: int = 0
    kernel: str | None = None

    @property
    def kind(self) -> str | None:
        """Of KINDS; None: none of them."""
        return next((kind for kind, names in KINDS.items() if self.name.startswith(names)), None)


def cupti() -> Path | None:
    """The library: that of torch's wheels, or of the toolkit."""
    torch = importlib.util.find_spec("torch")
    places = [] if torch is None or torch.origin is None else [Path(torch.origin).parents[1]]
    roots = [place / "nvidia" for place in places]
    roots += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    for root in roots:
        # Headers and libraries of a toolkit lie under links, which a walk does not follow.
        for pattern in (
            "*/lib/libcupti.so.1*",
            "lib*/libcupti.so.1*",
            "extras/*/lib*/libcupti.so.1*",
        ):
            if found := sorted(root.glob(pattern)):
                return found[0]
    return None


class CallLog:
    """From its construction on. Only one may be in a process, and before the first call of CUDA."""

    def __init__(self, folder: Path) -> None:
        library = folder / "call_log.so"
        compiler = os.environ.get("CXX", "c++")
        flags = ("-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
        self.log = ctypes.CDLL(str(library))
        self.log.num_entries.restype = ctypes.c_size_t
        self.log.entries.restype = ctypes.c_void_p
        self.log.name.argtypes, self.log.name.restype = [ctypes.c_size_t], ctypes.c_char_p
        self.cupti = ctypes.CDLL(str(cupti()))
        self.subscriber = ctypes.c_void_p()
        self.ask("cuptiSubscribe", ctypes.byref(self.subscriber), self.log.note, None)
        for domain in (DRIVER_API, RUNTIME_API):
            self.ask("cuptiEnableDomain", 1, self.subscriber, domain)
        self.ask("cuptiEnableCallback", 1, self.subscriber, RESOURCES, MODULE_LOADED)

    def ask(self, function: str, *arguments: Any) -> None:
        result = getattr(self.cupti, function)(*arguments)
        assert result == 0, f"{function} returns {result} (CUptiResult)"

    def __len__(self) -> int:
        """Calls so far."""
        return int(self.log.num_entries())

    def end(self) -> list[Call]:
        """All calls; none is logged after."""
        self.ask("cuptiUnsubscribe", self.subscriber)
        size = len(self) * ENTRY.itemsize
        data = np.frombuffer(ctypes.string_at(self.log.entries(), size), ENTRY)
        names: list[str | None] = []
        while (name := self.log.name(len(names))) is not None:
            names.append(name.decode())
        names.append(None)  # of no kernel: place -1
        return [
            Call(str(names[name]), context, event, names[kernel])
            for name, kernel, context, event in data.tolist()
        ]


class Steps(NamedTuple):
    """What was called while a rank had begun to enqueue a part of a step that one had not ended."""

    within: list[Call]
    num_begun: Counter[int]
    """Parts of steps, by the context of the rank."""
    are_whole: bool
    """All ranks began as many, and ended them."""


def follow_steps(calls: Sequence[Call], num_ranks: int) -> Steps:
    """Every part begins and ends with the record of an event; the host waits for ends alone."""
    awaited = {call.event for call in calls if call.name.startswith("cudaEventSynchronize")}
    within: list[Call] = []
    begun: Counter[int] = Counter()
    is_open: set[int] = set()
    are_alike = True
    for call in calls:
        if call.name.startswith("cudaEventRecord"):
            if call.event in awaited:
                is_open.discard(call.context)
            else:
                begun[call.context] += 1
                is_open.add(call.context)
            are_alike = not begun or (len(begun) == num_ranks and len(set(begun.values())) == 1)
        if is_open or not are_alike:
            within.append(call)
    return Steps(within, begun, bool(begun) and are_alike and not is_open)


def by_kind(calls: Sequence[Call]) -> dict[str, dict[str, int]]:
    """How often each name of KINDS was called."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for call in calls:
        if (kind := call.kind) is not None:
            found[kind][call.name] += 1
    return {kind: dict(names) for kind, names in found.items()}


def count(calls: Sequence[Call], num_ready: int, num_served: int, num_ranks: int) -> dict[str, Any]:
    """Of the start, which is the first `num_ready` calls, of serving up to `num_served`, and after.

    And the kernels that are launched for the first time while requests are served.
    """
    starting, serving = calls[:num_ready], calls[num_ready:num_served]
    steps = follow_steps(serving, num_ranks)
    kernels = [{call.kernel for call in some if call.kernel} for some in (starting, serving)]
    return {
        "starting": by_kind(starting),
        "serving": by_kind(serving),
        "within steps": by_kind(steps.within),
        "after": by_kind(calls[num_served:]),
        "steps": {
            "calls": len(steps.within),
            "begun": list(steps.num_begun.values()),
            "are whole": steps.are_whole,
        },
        "kernels": [len(names) for names in kernels],
        "launched first": sorted(kernels[1] - kernels[0]),
    }


def load_and_allocate() -> list[int]:
    """One module and one piece of memory, so that a log that counts nothing shows: CUresults."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    code = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"
    return [
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuModuleLoadData(ctypes.byref(module), code),
        cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)),
        cuda.cuMemFree_v2(memory),
    ]


def serve(log: CallLog, drafter: str, num_ranks: int) -> dict[str, Any]:
    """An engine on CUDA, ready, and requests of many sizes."""
    from openspec.messages import SamplingParams
    from tests.gates import harness
    from tests.gates.conftest import drafter_settings
    from tests.gates.grammars import grammar_core, grammar_jobs
    from tests.gates.workload import jobs

    harness.DEVICE = "cuda"
    core = grammar_core(
        **drafter_settings(drafter),
        tensor_parallel_size=num_ranks,
        max_num_batched_tokens=600,
        max_model_len=1024,
    )
    mixed = jobs("mixed", 16)
    sampling = SamplingParams(
        temperature=0.8, seed=3, max_tokens=12, logprobs=5, prompt_logprobs=3, logit_bias={300: 1.0}
    )
    batch = [
        *mixed,
        *grammar_jobs("json_schema", "mixed", 4),
        *grammar_jobs("regex", "greedy", 2),
        *(dataclasses.replace(job, sampling=sampling) for job in mixed[:3]),
        # In chunks of several sizes, beside others.
        *(dataclasses.replace(job, prompt=job.prompt * 9) for job in mixed[4:7]),
        dataclasses.replace(mixed[0], prompt=tuple(300 + 7 * i % 3000 for i in range(900))),
    ]
    num_ready = len(log)
    harness.run(core, batch)
    assert core.stats().num_draft_tokens > 0
    harness.run(core, [mixed[3]])  # alone
    num_served = len(log)
    results = load_and_allocate()
    return count(log.end(), num_ready, num_served, num_ranks) | {"results after": results}


if __name__ == "__main__":
    folder, drafter, num_ranks = sys.argv[1:]
    # First of all: CUDA is not called before.
    print(json.dumps(serve(CallLog(Path(folder)), drafter, int(num_ranks))))
